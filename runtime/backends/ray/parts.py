"""The real workload of each actor. Named by `Parts`, called inside the actor; torch is imported here and not before."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from runtime.backends.ray.actors.host import Ready, keep_to_part, set_threads
from runtime.backends.ray.actors.identity import Gauge, Identity, Ranks
from runtime.backends.ray.actors.ports import RayFlowClient, RayTrainerFlow
from runtime.cards import is_gpu
from runtime.config.schema import Config
from runtime.core.observation import Work
from runtime.errors import ConfigError
from runtime.paths import RunPaths
from runtime.rl.counter import TokenCounter
from runtime.rl.pacing import DevicePace, Pacer, Pacing
from runtime.rl.rewards.items import RewardClient, RewardResult
from runtime.rl.types import RunLimits

if TYPE_CHECKING:
    from runtime.rl.protocols import RolloutEngine
    from runtime.rl.rollout import ReplicaLevel
    from runtime.rl.train.gang import GangSpec
    from runtime.rl.train.loop import Pace, TrainerLevel, TrainerWork


def pacing_of(me: Identity, config: Config) -> Pacing | None:
    """The declared speed of a paced device; None for a real one."""
    if not me.paced:
        return None
    if config.fleet.pacing is None:
        raise ConfigError("a paced device without declared speeds", where="fleet.pacing", got=me.kind)
    return DevicePace(config.fleet.pacing, me.kind, me.devices[0] if me.devices else "")


def device_of(me: Identity) -> str:
    """torch's name of the actor's device: its only visible GPU, or the CPU."""
    return "cuda:0" if me.gpus else "cpu"


def flow(  # noqa: PLR0917 - called by name inside the actor
    me: Identity,
    config: Config,
    paths: RunPaths,
    limits: RunLimits,
    rewards: RewardClient,
    on_change: Callable[[], None],
) -> Any:
    """The run's flow over its ledger."""
    from runtime.rl.flow.open import open_flow
    from runtime.rl.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.model.tokenizer, config.model.path.parent)
    return open_flow(config, paths, tokenizer, rewards, limits=limits, on_change=on_change)


def rewards(me: Identity, config: Config, paths: RunPaths, on_results: Callable[[Sequence[RewardResult]], None]) -> Any:
    """The verifiers' pool."""
    del paths
    from runtime.rl.rewards.pool import RewardPool, verifier_spec

    task = config.task
    if task is None:
        raise ConfigError("this configuration is for planning only", expected="a [task] table", hint="add [task]")
    return RewardPool(
        verifier_spec(task, me.import_path),
        workers=task.reward_workers,
        timeout_s=task.reward_timeout,
        on_results=on_results,
    )


def replica(me: Identity, config: Config, paths: RunPaths, ready: Ready) -> str:
    """The configured engine against flow, until flow says stop."""
    set_threads(me.torch_threads)
    from runtime.rl.rollout import ReplicaLoop

    with contextlib.closing(_engine(me, config)) as engine:
        loop = ReplicaLoop(
            engine,
            RayFlowClient(me.run),
            replica=me.id,
            epoch=me.epoch,
            counter=TokenCounter(paths.counters / f"{me.id}-{me.epoch}"),
            pacing=pacing_of(me, config),
            device_kind=me.kind,
        )
        ready(lambda: _replica_gauge(loop.level()))
        loop.run()
        return loop.level().failure or "stopped by flow"


def _engine(me: Identity, config: Config) -> "RolloutEngine":
    """The engine on the actor's devices."""
    if config.rollout.engine == "vllm":
        from runtime.rl.engine.vllm_factory import build_vllm_engine

        return build_vllm_engine(
            config,
            gpus=len(me.gpus),
            threads=me.torch_threads,
            incarnation=f"{me.id}/{me.epoch}",
            card_part=me.gpu_share,
        )
    from runtime.rl.engine.factory import build_engine

    keep_to_part(me)
    return build_engine(config, device=device_of(me))


def _replica_gauge(level: "ReplicaLevel") -> Gauge:
    return Gauge(host_lag_share=level.stats.host_lag_share, detail=level.failure)


def trainer(me: Identity, config: Config, paths: RunPaths, ready: Ready) -> str:
    """A torch trainer against flow, until flow says stop; or one of its ranks, until rank 0 says so."""
    set_threads(me.torch_threads)
    keep_to_part(me)
    from runtime.rl.train.factory import build_trainer

    if me.ranks is None:
        return _lead(me, config, paths, build_trainer(config, paths, device=device_of(me)), ready)
    import torch

    from runtime.rl.train.gang import Gang
    from runtime.rl.train.ranks import Leader, follow

    gang = Gang(gang_spec(me, me.ranks, config, paths), torch.device(device_of(me)))
    with contextlib.closing(gang):
        made = build_trainer(config, paths, gang=gang)
        if me.ranks.rank:
            ready()
            return follow(made, gang)
        leader = Leader(made, gang)
        how = _lead(me, config, paths, leader, ready)
        leader.close()
        return how


def _lead(me: Identity, config: Config, paths: RunPaths, work: "TrainerWork", ready: Ready) -> str:
    from runtime.rl.train.loop import TrainerLoop
    from runtime.rl.weights.open import open_direct

    loop = TrainerLoop(
        work,
        RayTrainerFlow(me.run),
        name=me.id,
        epoch=me.epoch,
        weights=paths.weights,
        direct=open_direct(
            config,
            paths.weights,
            device=device_of(me),
            device_kind=me.kind,
            epoch=me.epoch,
            host=_own_address(),
            one_card=me.gpu_share < 1,
        ),
        eta=config.algorithm.bound,
        checkpoint_every=config.trainer.checkpoint_every_steps,
        pace=_pace(me, config),
        on_ready=lambda: ready(lambda: _trainer_gauge(loop.level())),
    )
    return loop.run()


def _own_address() -> str:
    """Where other nodes of the cluster reach this one; loopback in a cluster of one machine."""
    import ray

    address: str = ray.util.get_node_ip_address()
    return address


def gang_spec(me: Identity, ranks: Ranks, config: Config, paths: RunPaths) -> "GangSpec":
    """Where and how long the ranks of this epoch meet. ConfigError for ranks on GPUs and CPUs together."""
    from ray.util import get_node_ip_address

    from runtime.rl.train.gang import GangSpec
    from runtime.rl.train.meeting import Meeting

    gpus = [d for d in ranks.devices if is_gpu(d)]
    if gpus and len(gpus) < len(ranks.devices):
        raise ConfigError("a trainer's ranks are on GPUs and CPUs", got=", ".join(ranks.devices), expected="one sort")
    meeting = Meeting(
        file=paths.folder / "ranks" / f"{me.id}-{me.epoch}.json",
        host=get_node_ip_address(),
        deadline_s=config.trainer.meet_deadline,
        names=ranks.devices,
    )
    return GangSpec(
        rank=ranks.rank, shares=ranks.shares, meeting=meeting, collective_s=config.trainer.collective_deadline
    )


def _pace(me: Identity, config: Config) -> "Pace | None":
    """The declared speed of a paced trainer: of several ranks, of the one that takes longest for its share."""
    from runtime.rl.train.loop import Pace

    mine = pacing_of(me, config)
    if mine is None or config.fleet.pacing is None:
        return None
    if me.ranks is None:
        return Pace(pacer=Pacer(threading.Event().wait), step_s=mine.training_s)
    path, of = config.fleet.pacing, me.ranks
    ranks = [(DevicePace(path, k, d), share) for k, d, share in zip(of.kinds, of.devices, of.shares, strict=True)]
    return Pace(
        pacer=Pacer(threading.Event().wait),
        step_s=lambda tokens: max(pace.training_s(round(share * tokens)) for pace, share in ranks),
    )


def _trainer_gauge(level: "TrainerLevel") -> Gauge:
    work = Work(busy_s=level.busy_s, steps=level.steps, tokens=level.busy_tokens)
    return Gauge(host_lag_share=level.lag_share, detail=level.waits_for, work=work)
