"""Opening the backend of a run: attach to its Ray, or start or join one; flow and rewards are made when they are not there."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from planner.cluster import Cluster
from planner.record import replace
from runtime.backends.ray import cluster as ray_cluster
from runtime.backends.ray import names
from runtime.backends.ray.actors.identity import Parts
from runtime.backends.ray.backend import RayBackend
from runtime.backends.ray.cluster import RayHead
from runtime.backends.ray.locks import claim
from runtime.backends.ray.revive import RevivingBackend
from runtime.backends.ray.world import World
from runtime.cards import cards_of
from runtime.config.schema import Config
from runtime.errors import RunError
from runtime.paths import RunPaths
from runtime.rl.types import RunLimits
from runtime.runs import ProcessMark, RunInfo, read_run, write_run
from runtime.telemetry.client import TelemetryAgent

logger = logging.getLogger(__name__)
OBJECT_STORE_BYTES = 128 * 2**20


def open_backend(  # noqa: PLR0917 - the seam between daemon and backend, in the order things come into being
    config: Config,
    paths: RunPaths,
    run: RunInfo,
    cluster: Cluster,
    daemon_epoch: int,
    limits: RunLimits,
    *,
    parts: Parts | None = None,
    extra_env: Mapping[str, str] | None = None,
    wait: bool = True,
) -> RevivingBackend:
    """A backend that observes and acts. Takes about 5 s when Ray must start, under 1 s when it runs; and with `wait` as long as
    flow takes to be built, which the caller waits for by `wait_built` otherwise, acting meanwhile.

    `run.json` gets Ray's address and processes as soon as they are known; the result's `.run` has them.
    Errors: DeadlineError when Ray does not come up, FleetError when a GPU belongs to another run, RunError otherwise; of the wait
    whatever kept flow or the verifiers from being built (ConfigError, LedgerError, DeadlineError).
    """

    def attach(run: RunInfo) -> RayBackend:
        lived = run.ray_address is not None
        head, run = _head(paths, run, cluster, extra_env or {})
        gpus = cards_of(d.id for d in cluster.devices)
        try:
            if gpus:
                claim(gpus, run.id, head.processes)
            token = paths.ray_token if head.owned else None
            ray = ray_cluster.connect(head.address, names.namespace(run.id), token=token)
        except RunError:
            if head.owned and head.start_s is not None:
                ray_cluster.stop_head(head.processes)
            raise
        world = World(
            ray=ray,
            run_id=run.id,
            hexctl_version=run.hexctl_version,
            daemon_epoch=daemon_epoch,
            config=config,
            paths=paths,
            cluster=cluster,
            limits=limits,
            parts=parts or Parts(),
            import_path=_import_path(run),
        )
        backend = RayBackend(world, run, head, TelemetryAgent(*(() if gpus else ("--no-gpus",))), lived=lived)
        backend.start()
        return backend

    opened = RevivingBackend(attach(run), attach)
    if wait:
        opened.wait_built()
    return opened


def _import_path(run: RunInfo) -> tuple[str, ...]:
    """Where modules of the user are looked for: beside the configuration, and where hexctl was started."""
    beside = os.path.dirname(run.config_path) if run.config_path else ""
    return tuple(dict.fromkeys(p for p in (beside, os.getcwd()) if p))


def _head(paths: RunPaths, run: RunInfo, cluster: Cluster, extra_env: Mapping[str, str]) -> tuple[RayHead, RunInfo]:
    """The run's Ray: the one it had, the one it is told to join, or a new one."""
    if run.ray_address is not None:
        head = RayHead(address=run.ray_address, owned=run.ray_owned, processes=run.ray_processes)
        if not head.owned or ray_cluster.is_up(head):
            return head, run
        logger.warning("Ray of this run is gone; starting it again from ledger and checkpoint")
    if run.ray_owned:
        ray_cluster.stop_head(run.ray_processes)
    address = os.environ.get(ray_cluster.ADDRESS_VARIABLE)
    if address:
        head = RayHead(address=address, owned=False)
        return head, _record(run, head.address, (), owned=False)

    def started(processes: tuple[ProcessMark, ...]) -> None:
        _record(run, None, processes, owned=True)

    head = ray_cluster.start_head(
        paths,
        {names.resource(d.id): 1.0 for d in cluster.devices},
        num_gpus=len(cards_of(d.id for d in cluster.devices)),
        object_store_bytes=OBJECT_STORE_BYTES,
        extra_env=extra_env,
        on_started=started,
    )
    logger.info("Ray started in %.1f s at %s", head.start_s or 0.0, head.address)
    return head, _record(run, head.address, head.processes, owned=True)


def _record(run: RunInfo, address: str | None, processes: tuple[ProcessMark, ...], *, owned: bool) -> RunInfo:
    """Into `run.json` as it is now: the daemon writes other fields of it."""
    now = replace(read_run(Path(run.folder)), ray_address=address, ray_owned=owned, ray_processes=processes)
    write_run(now)
    return now
