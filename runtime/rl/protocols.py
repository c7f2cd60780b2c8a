"""Seams of the workload: what an engine and a trainer must do. Implementations declare capabilities."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from planner.record import record
from runtime.rl.types import (
    Append,
    ChannelMember,
    ChannelOffer,
    EngineStats,
    Lease,
    SampleId,
    StepMetrics,
    TrainBatch,
    WeightsRef,
)


@record
class EngineCapabilities:
    """What an engine can do; enters the planner's problem."""

    name: str
    max_tp: int
    max_pp: int
    kv_on_update: tuple[str, ...]


class RolloutEngine(Protocol):
    """Continuous batching over a KV cache. Not thread-safe: one thread calls it."""

    @property
    def capabilities(self) -> EngineCapabilities: ...

    @property
    def version(self) -> int | None:
        """Version of the loaded, verified weights; None before the first."""
        ...

    @property
    def digest(self) -> str | None: ...

    def free_slots(self) -> int:
        """How many more samples may be added now."""
        ...

    def limit(self, slots: int | None) -> None:
        """Decode at most so many samples at once from the next step on, never more than the engine was made for; None: as many as
        that. Those that run go on until they end, the others wait."""
        ...

    def add(self, leases: Sequence[Lease]) -> None:
        """Take samples; each continues after its `tokens`. A duplicate (sample, epoch) is ignored."""
        ...

    def step(self) -> tuple[Append, ...]:
        """Prefill what waits, decode one token for every running sample; one Append a sample that advanced. Empty when idle."""
        ...

    def abort(self, samples: Sequence[SampleId]) -> tuple[SampleId, ...]:
        """Forget samples (their tokens were already returned by `step`); returns those that were held."""
        ...

    def held(self) -> tuple[SampleId, ...]:
        """Samples running or waiting here."""
        ...

    def load_weights(self, ref: WeightsRef) -> None:
        """Swap weights in place between steps, verify every tensor's hash, then recompute the KV of running samples.
        Raises WeightsError and stays unroutable (version None) when a hash does not match."""
        ...

    def stats(self) -> EngineStats: ...

    def check(self) -> None:
        """Cheap, without waiting: RunError when whatever lives outside this process has ended. For turns without a step."""
        ...

    def close(self) -> None:
        """Let go of whatever lives outside this process. May be called twice; nothing else is called after it."""
        ...


@runtime_checkable
class TakesDirect(Protocol):
    """An engine that can also take weights straight from the trainer."""

    def join(self, offer: ChannelOffer, member: ChannelMember) -> None:
        """Take part in the transfers of that channel from now on; no more in those of an earlier one. Returns at once."""
        ...

    def swap_weights(self, ref: WeightsRef) -> bool:
        """Serve `ref` from the second buffer, as `load_weights` does from disk; False, and nothing changed, when it is not
        whole there. Raises WeightsError like `load_weights`."""
        ...


class Trainer(Protocol):
    """Holds parameters and optimiser. One optimiser step a batch."""

    @property
    def version(self) -> int: ...

    def train_step(self, batch: TrainBatch) -> StepMetrics:
        """One optimiser step on the whole global batch; turns version `step` into `step + 1`."""
        ...

    def save_checkpoint(self, ids_hash: str) -> str:
        """Complete checkpoint of the state after the last step: new folder, checksummed, renamed last. Returns its path."""
        ...

    def begin_checkpoint(self, ids_hash: str) -> bool:
        """Begin one of the state after the last step and return: it is written beside the training, at most one at a time. False,
        and nothing was begun, when that cannot be here: `save_checkpoint` can."""
        ...

    @property
    def checkpoint_written(self) -> bool:
        """`seal_checkpoint` would not wait, or would not wait long, for the one that was begun."""
        ...

    def seal_checkpoint(self) -> float:
        """Wait for the one that was begun and seal it: complete when this returns. Seconds for which it was written. Raises what
        kept it from the disk; nothing of it remains then."""
        ...

    def drop_checkpoint(self) -> None:
        """Nothing remains of one that was begun and is not sealed. Without one nothing happens."""
        ...

    def publish(self) -> WeightsRef:
        """Write the current weights as a generation and return its reference."""
        ...
