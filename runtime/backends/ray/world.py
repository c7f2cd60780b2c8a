"""What every part of the backend needs to know of the run: one value, passed on. And the actors' creation."""

from typing import Any

from planner.cluster import Cluster
from planner.record import record
from runtime.backends.ray import names
from runtime.backends.ray.actors.body import BodyActor
from runtime.backends.ray.actors.flow import FlowActor
from runtime.backends.ray.actors.identity import Identity, Parts, Ranks
from runtime.backends.ray.actors.rewards import RewardActor
from runtime.backends.ray.names import BodyName
from runtime.cards import cards_of, is_gpu, parts_of
from runtime.config.schema import Config
from runtime.paths import RunPaths
from runtime.rl.types import RunLimits

FLOW_CALLS = 256  # waiting at once: two a replica, a trainer's long poll, the daemon's


@record
class World:
    """The run as the backend sees it. `ray` is the connected module."""

    ray: Any
    run_id: str
    hexctl_version: str
    daemon_epoch: int
    config: Config
    paths: RunPaths
    cluster: Cluster
    limits: RunLimits
    parts: Parts = Parts()
    import_path: tuple[str, ...] = ()

    @property
    def namespace(self) -> str:
        """Namespace of the run's named actors."""
        return names.namespace(self.run_id)

    def uses_gpu(self, device_id: str) -> bool:
        """Whether a device is a real GPU, or a part of one."""
        return is_gpu(device_id)

    def identity(
        self, name: str, id_: str, epoch: int, devices: tuple[str, ...] = (), ranks: Ranks | None = None
    ) -> Identity:
        """Identity of a new actor."""
        gpus = cards_of(devices)
        kinds = [self.cluster.kind_of(d) for d in devices]
        paced = any(k.paced for k in kinds)
        return Identity(
            run=self.run_id,
            hexctl_version=self.hexctl_version,
            daemon_epoch=self.daemon_epoch,
            name=name,
            id=id_,
            epoch=epoch,
            log=str(self.paths.logs / f"{name}.log"),
            devices=devices,
            kind=kinds[0].name if kinds else "",
            paced=paced,
            gpus=gpus,
            gpu_share=1 / max(map(parts_of, devices), default=1),
            import_path=self.import_path,
            torch_threads=_threads(name, gpu=bool(gpus), paced=paced or ranks is not None),
            ranks=ranks,
        )

    def bundles(self, body: BodyName, devices: tuple[str, ...]) -> list[dict[str, float]]:
        """Bundles of a body's placement group: one for a replica, one a rank for a trainer."""
        if body.role == "trainer":
            return [self.bundle((d,)) for d in devices]
        return [self.bundle(devices)]

    def bundle(self, devices: tuple[str, ...]) -> dict[str, float]:
        """Resources of one actor on `devices` (one node)."""
        bundle = {names.resource(d): 1.0 for d in devices}
        if gpus := sum(1 / parts_of(d) for d in devices if is_gpu(d)):
            bundle["GPU"] = gpus
        return bundle

    def find(self, name: str) -> Any:
        """Handle of a living named actor of the run; None when there is none."""
        try:
            return self.ray.get_actor(name, namespace=self.namespace)
        except ValueError:
            return None


def _threads(name: str, *, gpu: bool, paced: bool) -> int:
    """Torch threads. Paced devices share the host by the clock: one each. An unpaced CPU trainer gets two."""
    return 2 if name.startswith("trainer-") and not paced and not gpu else 1


def start_rewards(world: World) -> Any:
    """The rewards actor, found or made."""
    return _service(world, RewardActor, names.REWARDS, 0, world.parts.rewards, world.config, world.paths)


def start_flow(world: World) -> Any:
    """The flow actor, found or made. Ray restarts it for ever; a call that was under way is the caller's to repeat."""
    return _service(world, FlowActor, names.FLOW, -1, world.parts.flow, world.config, world.paths, world.limits)


def _service(world: World, actor: type, name: str, restarts: int, *parts: Any) -> Any:
    """An actor that holds no device. `restarts`: as Ray counts them, -1 for ever."""
    return (
        world.ray.remote(actor)
        .options(
            name=name,
            namespace=world.namespace,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=restarts,
            max_task_retries=0,
            max_concurrency=FLOW_CALLS,
        )
        .remote(world.identity(name, name, world.daemon_epoch), *parts)
    )


def start_body(
    world: World, body: BodyName, group: Any, devices: tuple[str, ...], shares: tuple[float, ...] = ()
) -> None:
    """The actors of a replica or trainer in its placement group, found or made: a trainer's are one a device."""
    known = names.rank_names(body, devices)
    if len(known) == 1:
        me = world.identity(known[0], body.id, body.epoch, devices)
        _start_actor(world, body, me, group, 0)
        return
    for rank, (name, device) in enumerate(zip(known, devices, strict=True)):
        ranks = Ranks(
            rank=rank,
            devices=devices,
            kinds=tuple(world.cluster.kind_of(d).name for d in devices),
            shares=shares or (1 / len(devices),) * len(devices),
        )
        _start_actor(world, body, world.identity(name, body.id, body.epoch, (device,), ranks), group, rank)


def _start_actor(world: World, body: BodyName, me: Identity, group: Any, index: int) -> None:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    build = world.parts.replica if body.role == "replica" else world.parts.trainer
    bundle = world.bundle(me.devices)
    (
        world.ray.remote(BodyActor)
        .options(
            name=me.name,
            namespace=world.namespace,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            num_gpus=bundle.pop("GPU", 0),
            resources=bundle,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=4,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            ),
        )
        .remote(me, build, world.config, world.paths)
    )
