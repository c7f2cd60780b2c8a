"""The end of a run: suspend, settle, end the actors, end Ray if it is ours. One deadline over everything."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from runtime.backends.ray import cluster as ray_cluster
from runtime.backends.ray import names
from runtime.backends.ray.actors.host import in_words
from runtime.backends.ray.actors.marks import drop_mark, read_mark
from runtime.backends.ray.calls import call
from runtime.backends.ray.cluster import RayHead
from runtime.backends.ray.names import BodyName
from runtime.backends.ray.placement import groups, remove_group
from runtime.backends.ray.procs import end, group_members
from runtime.backends.ray.stopping import decoded_tokens, end_actor, forget_counter
from runtime.backends.ray.world import World
from runtime.rl.types import FlowStatus

logger = logging.getLogger(__name__)
SUSPEND_SHARE = 0.6  # of the deadline for suspending; the rest for ending processes


class Ending:
    """Brings one run down. What fails is logged and does not keep the rest from ending."""

    def __init__(self, world: World, head: RayHead, flow: Any, deadline_s: float) -> None:
        self._world, self._head, self._flow = world, head, flow
        self._until = time.monotonic() + deadline_s * SUSPEND_SHARE

    def run(self) -> None:
        """Everything, in order."""
        bodies = self._attempt("read Ray's table", lambda: tuple(g.body for g in groups(self._world))) or ()
        if bodies:
            self._attempt("suspend", lambda: self._suspend(bodies))
        for body in bodies:
            self._attempt(f"end {body.role} {body.id}", lambda: self._end_body(body))  # noqa: B023 - called at once
        self._attempt("close the ledger", lambda: self._ask("close"))
        for service in (names.FLOW, names.REWARDS):
            self._attempt(f"end {service}", lambda: self._end_service(service))  # noqa: B023 - called at once
        ray_cluster.disconnect()
        if self._head.owned and (left := ray_cluster.stop_head(self._head.processes)):
            logger.error("processes that do not end: %s", ", ".join(str(m.pid) for m in left))

    def _ask(self, method: str, *args: Any) -> Any:
        left = max(1.0, self._until - time.monotonic())
        ref = getattr(self._flow, method).remote(*args)
        return call(self._world.ray, ref, what=f"flow.{method}", deadline_s=left)

    def _suspend(self, bodies: tuple[BodyName, ...]) -> None:
        """Tell all to let go and wait until flow says that nothing is leased and the trainer stands."""
        self._ask("finish", self._world.daemon_epoch)
        pause = threading.Event()
        while time.monotonic() < self._until and not self._settled(self._ask("status"), self._living(bodies)):
            pause.wait(0.1)

    def _living(self, bodies: tuple[BodyName, ...]) -> set[BodyName]:
        """Bodies whose loop still runs; one that does not answer may."""
        ray = self._world.ray
        handles = {b: h for b in bodies if (h := self._world.find(names.actor_name(b))) is not None}
        asked = {h.ping.remote(): b for b, h in handles.items()}
        if not asked:
            return set()
        ready, silent = ray.wait(list(asked), num_returns=len(asked), timeout=1.0)
        living = {asked[ref] for ref in silent}
        for ref in ready:
            with contextlib.suppress(ray.exceptions.RayError):
                if ray.get(ref).phase in ("starting", "running"):
                    living.add(asked[ref])
        return living

    @staticmethod
    def _settled(status: FlowStatus, living: set[BodyName]) -> bool:
        rows = {BodyName(role="replica", id=r.replica, epoch=r.epoch): r for r in status.replicas}
        trains = any(b.role == "trainer" and b.epoch == status.trainer_epoch for b in living)
        return not any(rows[b].leased for b in living if b in rows) and not (
            trains and status.trainer_state in ("training", "waiting")
        )

    def _end_body(self, body: BodyName) -> None:
        end_actor(self._world, body)
        if body.role == "replica":  # flow may be what has failed: the devices are given back all the same
            self._attempt(f"settle {body.id}", lambda: self._settle(body))
        remove_group(self._world, body)

    def _settle(self, body: BodyName) -> None:
        tokens = decoded_tokens(self._world.paths, body)
        self._ask("forget_replica", self._world.daemon_epoch, body.id, body.epoch, tokens)
        forget_counter(self._world.paths, body)

    def _end_service(self, name: str) -> None:
        handle, found = self._world.find(name), read_mark(self._world.paths, name)
        if handle is not None:
            self._world.ray.kill(handle, no_restart=True)
        if found is not None:
            children = group_members(found.group) if found.group == found.process.pid else ()
            end({found.process, *children}, term_s=0.0)
        drop_mark(self._world.paths, name)

    @staticmethod
    def _attempt(what: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as e:  # noqa: BLE001 - the end goes on whatever happens
            logger.warning("%s: %s", what, in_words(e))
            return None
