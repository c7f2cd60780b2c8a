"""The real workload of each actor. Named by `Parts`, called inside the actor; torch is imported here and not before."""

from collections.abc import Callable
from typing import Any

from runtime.backends.ray.actors.host import set_threads
from runtime.backends.ray.actors.identity import Identity
from runtime.backends.ray.actors.ports import RayFlowClient
from runtime.config.schema import Config
from runtime.errors import ConfigError
from runtime.paths import RunPaths
from runtime.rl.counter import TokenCounter
from runtime.rl.pacing import KindPacing, load_pacing
from runtime.rl.rewards.items import RewardClient
from runtime.rl.types import RunLimits


def pacing_of(me: Identity, config: Config) -> KindPacing | None:
    """The declared speed of a paced device; None for a real one."""
    if not me.paced:
        return None
    if config.fleet.pacing is None:
        raise ConfigError("a paced device without declared speeds", where="fleet.pacing", got=me.kind)
    return load_pacing(config.fleet.pacing).kind(me.kind, where=str(config.fleet.pacing))


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
    if limits.steps is not None:
        config = config.model_copy(update={"run": config.run.model_copy(update={"steps": limits.steps})})
    return open_flow(config, paths, tokenizer, rewards, on_change=on_change)


def replica(me: Identity, config: Config, paths: RunPaths, ready: Callable[[], None]) -> str:
    """A torch engine against flow, until flow says stop."""
    set_threads(me.torch_threads)
    from runtime.rl.engine.factory import build_engine
    from runtime.rl.rollout import ReplicaLoop

    loop = ReplicaLoop(
        build_engine(config, device=device_of(me)),
        RayFlowClient(me.run),
        replica=me.id,
        epoch=me.epoch,
        counter=TokenCounter(paths.counters / f"{me.id}-{me.epoch}"),
        pacing=pacing_of(me, config),
    )
    ready()
    loop.run()
    return loop.level().failure or "stopped"
