"""Host of flow: the data plane's only writer. The one actor that Ray restarts; it rebuilds itself from the ledger."""

import inspect
from collections.abc import Mapping
from typing import Any

from runtime.backends.ray.actors.host import Broken, built, enter, level_of, resolve
from runtime.backends.ray.actors.identity import ActorLevel, Identity
from runtime.backends.ray.actors.marks import write_mark
from runtime.config.schema import Config
from runtime.paths import RunPaths
from runtime.rl.types import (
    Applied,
    ExchangeReply,
    ExchangeRequest,
    FlowStatus,
    NextBatch,
    ReplicaOrder,
    RunLimits,
    TrainerHello,
    TrainerWelcome,
    TrainOrder,
    WeightsRef,
)


async def _answer(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


class FlowActor:
    """An async actor: a waiting `next_batch` holds up nobody's `exchange`.

    `build` names a function `(identity, config, paths, limits) -> flow`. Errors of flow (RefusedError, LedgerError) travel
    to the caller.
    """

    def __init__(self, me: Identity, build: str, config: Config, paths: RunPaths, limits: RunLimits) -> None:
        enter(me, own_group=False)
        write_mark(paths, me)
        self._me = me
        # An exception here would leave a dead actor and only text; kept, it reaches every caller as it was raised.
        self._flow: Any = built(me, lambda: resolve(build)(me, config, paths, limits))

    async def ping(self) -> ActorLevel:
        """The level now: `failed` with the reason when flow could not be built."""
        return self._flow.level() if isinstance(self._flow, Broken) else level_of(self._me, "running")

    async def ready(self) -> None:
        """Raises what kept flow from being built."""
        if isinstance(self._flow, Broken):
            raise self._flow.error

    async def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        """A replica's flush, level and plea for work."""
        reply: ExchangeReply = await _answer(self._flow.exchange(request))
        return reply

    async def hello(self, hello: TrainerHello) -> TrainerWelcome:
        """A trainer's first call."""
        welcome: TrainerWelcome = await _answer(self._flow.hello(hello))
        return welcome

    async def next_batch(self, trainer: str, epoch: int) -> NextBatch:
        """Work for the trainer; waits about a second for it."""
        batch: NextBatch = await _answer(self._flow.next_batch(trainer, epoch))
        return batch

    async def applied(self, applied: Applied) -> None:
        """Step is in a complete checkpoint."""
        await _answer(self._flow.applied(applied))

    async def published(self, ref: WeightsRef, epoch: int) -> None:
        """A new weight generation is on disk."""
        await _answer(self._flow.published(ref, epoch))

    async def set_order(self, daemon_epoch: int, replica: str, epoch: int, order: ReplicaOrder) -> None:
        """What a replica shall do from its next exchange on."""
        await _answer(self._flow.set_order(daemon_epoch, replica, epoch, order))

    async def set_trainer_order(self, daemon_epoch: int, epoch: int, order: TrainOrder) -> None:
        """What the trainer shall do at its next call."""
        await _answer(self._flow.set_trainer_order(daemon_epoch, epoch, order))

    async def expect_replica(self, daemon_epoch: int, replica: str, epoch: int) -> None:
        """A replica is about to start."""
        await _answer(self._flow.expect_replica(daemon_epoch, replica, epoch))

    async def forget_replica(self, daemon_epoch: int, replica: str, epoch: int, decoded_tokens: int) -> None:
        """A replica is gone; `decoded_tokens` by its own counter, flushed or not."""
        await _answer(self._flow.forget_replica(daemon_epoch, replica, epoch, decoded_tokens))

    async def status(self) -> FlowStatus:
        """One consistent reading."""
        status: FlowStatus = await _answer(self._flow.status())
        return status

    async def finish(self) -> Mapping[str, int] | None:
        """Suspend what is leased, settle, close the ledger. No call is answered after it but `ping`."""
        counts: Mapping[str, int] | None = await _answer(self._flow.finish())
        return counts
