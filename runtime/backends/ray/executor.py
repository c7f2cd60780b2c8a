"""Carries migration steps out, each in a thread of its own with a deadline. Idempotent by what exists in Ray.

Nothing here is needed after a restart of the daemon: names and marks find every body again. What failed is kept in words
until the body is stopped, so that the next observation can say it.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from planner.record import record
from runtime.backends.ray import names
from runtime.backends.ray.actors.host import in_words
from runtime.backends.ray.calls import call
from runtime.backends.ray.names import BodyName
from runtime.backends.ray.placement import ensure_group, groups, remove_group
from runtime.backends.ray.stopping import decoded_tokens, end_actor, forget_counter
from runtime.backends.ray.world import World, start_body
from runtime.core.action import (
    DrainReplica,
    QuiesceTrainer,
    StartReplica,
    StartTrainer,
    Step,
    StopReplica,
    StopTrainer,
    describe,
)
from runtime.errors import DeadlineError, RefusedError, RunError

PLACE_S = 10.0
FLOW_S = 30.0  # flow may be restarting
logger = logging.getLogger(__name__)


@record
class BodyNote:
    """What this daemon knows of a body beyond Ray: it is being started, or how its start failed."""

    devices: tuple[str, ...]
    starting: bool
    reason: str = ""  # why it failed
    settled_s: float = 0.0  # monotonic seconds when the start ended


class Executor:
    """Applies steps. `flow_built` is set from when flow answers on; `memory_back(devices)` waits until GPUs show nobody's memory
    and says which do not. Of a run that `lived` before, nobody here saw whom the GPUs were last used by: each is asked for before
    its first use."""

    def __init__(
        self,
        world: World,
        flow: Callable[[], Any],
        flow_built: threading.Event,
        memory_back: Callable[[tuple[str, ...]], str],
        *,
        lived: bool,
    ) -> None:
        self._world, self._flow, self._flow_built, self._memory_back = world, flow, flow_built, memory_back
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._under_way: dict[str, threading.Thread] = {}  # by id of the step
        self._notes: dict[BodyName, BodyNote] = {}
        self._quiescing: set[int] = set()
        self._fenced = ""
        self._quarantine: dict[str, str] = {}
        self._unseen = {d.id for d in world.cluster.devices if lived and world.uses_gpu(d.id)}
        self._tells: list[threading.Thread] = []

    def notes(self) -> dict[BodyName, BodyNote]:
        """Bodies being started, or whose start failed."""
        with self._lock:
            return dict(self._notes)

    def problems(self) -> tuple[str, ...]:
        """Fence and quarantine, in words."""
        with self._lock:
            return ((self._fenced,) if self._fenced else ()) + tuple(self._quarantine.values())

    def quiescing(self, epoch: int) -> bool:
        """Whether this daemon told that trainer to quiesce."""
        with self._lock:
            return epoch in self._quiescing

    def apply(self, step: Step) -> None:
        """Begin a step unless it is under way; returns at once."""
        with self._lock:
            if step.id in self._under_way or self._fenced or self._ended.is_set():
                return
            thread = threading.Thread(target=self._carry, args=(step,), name=step.id, daemon=True)
            self._under_way[step.id] = thread
        thread.start()

    def tell(self, method: str, *args: Any) -> None:
        """Call flow in a thread of its own; what it answers is seen in its status."""

        def ask() -> None:
            try:
                self._ask(method, self._world.daemon_epoch, *args)
            except Exception as e:  # noqa: BLE001 - flow may be gone; the observation says so
                logger.warning("flow.%s: %s", method, in_words(e))

        thread = threading.Thread(target=ask, name=f"tell-{method}", daemon=True)
        self._tells = [*(t for t in self._tells if t.is_alive()), thread]
        thread.start()

    def hush(self, deadline_s: float) -> None:
        """Wait for what `tell` still says: a call after the connection is closed would make Ray open another by itself."""
        end = time.monotonic() + deadline_s
        for thread in self._tells:
            thread.join(max(0.0, end - time.monotonic()))

    def end(self, deadline_s: float) -> None:
        """No step is begun or goes on to make anything from now on; wait for those under way, then for what `tell` says."""
        until = time.monotonic() + deadline_s
        with self._lock:
            self._ended.set()
            under_way = tuple(self._under_way.values())
        for thread in under_way:
            thread.join(max(0.0, until - time.monotonic()))
        self.hush(max(0.0, until - time.monotonic()))

    def _go_on(self) -> None:
        if self._ended.is_set():
            raise RunError("the run ends")

    def settle_lost(self) -> None:
        """Tell flow of replicas it waits for that have no body any more: Ray ended with them, and nobody stopped them."""
        rows = self._ask("status").replicas
        # In this order: whoever is started meanwhile has a note before flow hears of it.
        bodies = {*self.notes(), *(g.body for g in groups(self._world))}
        for row in rows:
            body = BodyName(role="replica", id=row.replica, epoch=row.epoch)
            if body not in bodies:
                tokens = decoded_tokens(self._world.paths, body)
                self._ask("forget_replica", self._world.daemon_epoch, body.id, body.epoch, tokens)
                forget_counter(self._world.paths, body)

    def busy(self) -> bool:
        """Whether any step is under way."""
        with self._lock:
            return bool(self._under_way)

    def _carry(self, step: Step) -> None:
        try:
            self._do(step)
        except RefusedError as e:
            with self._lock:
                self._fenced = f"flow refuses this daemon: {e.what}"
            logger.error("%s: %s", describe(step), e)
        except Exception as e:  # noqa: BLE001 - the next observation shows what is; the log says why
            logger.error("%s: %s", describe(step), in_words(e))
        finally:
            with self._lock:
                self._under_way.pop(step.id, None)

    def _do(self, step: Step) -> None:
        epoch = self._world.daemon_epoch
        match step:
            case StartReplica():
                body = BodyName(role="replica", id=step.replica, epoch=step.epoch)
                self._start(body, step.devices)
            case StartTrainer():
                body = BodyName(role="trainer", id=step.trainer, epoch=step.epoch)
                self._start(body, step.devices, step.shares)
            case DrainReplica():
                self._ask("set_order", epoch, step.replica, step.epoch, "drain")
            case QuiesceTrainer():
                self._ask("set_trainer_order", epoch, step.epoch, "quiesce")
                with self._lock:
                    self._quiescing.add(step.epoch)
            case StopReplica():
                self._stop_replica(BodyName(role="replica", id=step.replica, epoch=step.epoch))
            case StopTrainer():
                self._stop_trainer(BodyName(role="trainer", id=step.trainer, epoch=step.epoch))

    def _ask(self, method: str, *args: Any, deadline_s: float = FLOW_S) -> Any:
        """Call flow; repeat while it restarts, until the deadline."""
        until = time.monotonic() + deadline_s
        while True:
            left = max(0.5, until - time.monotonic())
            try:
                ref = getattr(self._flow(), method).remote(*args)
                return call(self._world.ray, ref, what=f"flow.{method}", deadline_s=left)
            except (RefusedError, DeadlineError):
                raise
            except RunError:
                if time.monotonic() + 0.5 >= until or self._ended.wait(0.25):
                    raise

    def _start(self, body: BodyName, devices: tuple[str, ...], shares: tuple[float, ...] = ()) -> None:
        with self._lock:
            if (note := self._notes.get(body)) is not None and note.reason:
                return  # it failed; stop it and start another epoch
            self._notes[body] = BodyNote(devices=devices, starting=True)
        reason = ""
        try:
            if any(self._world.find(name) is None for name in names.rank_names(body, devices)):
                self._place(body, devices, shares)
        except RefusedError:
            reason = "flow refuses this daemon"
            raise
        except Exception as e:  # noqa: BLE001 - becomes the body's reason in the next observation
            reason = in_words(e)
            logger.error("start %s %s: %s", body.role, body.id, reason)
        finally:
            with self._lock:
                self._notes[body] = BodyNote(devices=devices, starting=False, reason=reason, settled_s=time.monotonic())

    def _place(self, body: BodyName, devices: tuple[str, ...], shares: tuple[float, ...]) -> None:
        blocked = [why for d in devices if (why := self._quarantined(d))]
        if blocked:
            raise RunError("device is in quarantine", got="; ".join(blocked))
        # Flow's word comes first, so that a daemon of the past is refused before it makes anything. While flow itself is being
        # built there is no such daemon, and imports and the engine's start need nothing of it.
        built = self._flow_built.is_set()
        if built:
            self._expect(body)
        self._go_on()
        group = ensure_group(self._world, body, devices, deadline_s=PLACE_S)
        self._go_on()
        start_body(self._world, body, group, devices, shares)
        if not built and body.role == "replica":
            while not self._flow_built.wait(0.25):
                self._go_on()
            self._expect(body)

    def _expect(self, body: BodyName) -> None:
        if body.role == "replica":
            self._ask("expect_replica", self._world.daemon_epoch, body.id, body.epoch)

    def _quarantined(self, device: str) -> str:
        """Why a device must not be used; asks again whether its memory has come back."""
        with self._lock:
            if device not in self._quarantine and device not in self._unseen:
                return ""
        return self._looked_at(device)

    def _looked_at(self, device: str) -> str:
        """Quarantine it while its memory is not back; why."""
        why = self._memory_back((device,))
        with self._lock:
            self._unseen.discard(device)
            if why:
                self._quarantine[device] = why
            else:
                self._quarantine.pop(device, None)
        return why

    def _stop_replica(self, body: BodyName) -> None:
        """Order, end the process group, tell flow what it had decoded, then free the devices: in that order, so that a daemon
        that dies in between finds the body again."""
        if self._world.find(names.actor_name(body)) is not None:
            try:
                self._ask("set_order", self._world.daemon_epoch, body.id, body.epoch, "stop", deadline_s=2.0)
            except (DeadlineError, RunError) as e:
                if isinstance(e, RefusedError):
                    raise
                logger.warning("stop %s: %s", body.id, in_words(e))
        devices = self._end(body)
        tokens = decoded_tokens(self._world.paths, body)
        self._ask("forget_replica", self._world.daemon_epoch, body.id, body.epoch, tokens)
        forget_counter(self._world.paths, body)
        self._free(body, devices)

    def _stop_trainer(self, body: BodyName) -> None:
        if self._world.find(names.actor_name(body)) is not None:
            try:
                self._ask("set_trainer_order", self._world.daemon_epoch, body.epoch, "stop", deadline_s=2.0)
            except (DeadlineError, RunError) as e:
                if isinstance(e, RefusedError):
                    raise
                logger.warning("stop trainer %s: %s", body.id, in_words(e))
        gpus = self._end(body)
        self._ask("forget_trainer", self._world.daemon_epoch, body.epoch)
        self._free(body, gpus)
        with self._lock:
            self._quiescing.discard(body.epoch)

    def _end(self, body: BodyName) -> tuple[str, ...]:
        """End the body's processes; returns its GPUs whose memory must come back."""
        devices = end_actor(self._world, body)
        return tuple(d for d in devices if self._world.uses_gpu(d))

    def _free(self, body: BodyName, gpus: tuple[str, ...]) -> None:
        for gpu in gpus:
            self._looked_at(gpu)
        remove_group(self._world, body)
        with self._lock:
            self._notes.pop(body, None)
