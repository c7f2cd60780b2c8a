"""Host of flow: the data plane's only writer. The one actor that Ray restarts; it rebuilds itself from the ledger."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from runtime.backends.ray.actors.host import Broken, built, enter, level_of, resolve
from runtime.backends.ray.actors.identity import ActorLevel, Identity
from runtime.backends.ray.actors.marks import write_mark
from runtime.backends.ray.actors.verifiers import RewardDispatch
from runtime.config.schema import Config
from runtime.paths import RunPaths
from runtime.rl.rewards.items import RewardResult
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

LONG_POLL_S = 1.0
TICK_S = 1.0
logger = logging.getLogger(__name__)


class FlowActor:
    """An async actor: one call at a time touches flow, and a waiting `next_batch` holds up nobody's `exchange`.

    `build` names a function `(identity, config, paths, limits, rewards, on_change) -> flow`. Flow is built in the event
    loop's thread at the first call, since a ledger belongs to one thread. Errors of flow (RefusedError, LedgerError)
    travel to the caller as they were raised.
    """

    def __init__(self, me: Identity, build: str, config: Config, paths: RunPaths, limits: RunLimits) -> None:
        enter(me, own_group=False)
        write_mark(paths, me)
        self._me, self._build, self._args = me, build, (config, paths, limits)
        self._built: Any = None
        self._changed = asyncio.Event()
        self._asked = 0  # times that a trainer asked for a batch
        self._verifiers = RewardDispatch(me.run, self._rewarded)
        self._background: set[asyncio.Task[None]] = set()

    @property
    def _flow(self) -> Any:
        """Flow, built on first use. When that failed, every use raises why."""
        if self._built is None:
            self._built = built(
                self._me, lambda: resolve(self._build)(self._me, *self._args, self._verifiers, self._changed.set)
            )
            self._verifiers.start()
            if not isinstance(self._built, Broken):
                task = asyncio.get_running_loop().create_task(self._tick())
                self._background.add(task)
        return self._built

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._flow.tick()
            except Exception:
                logger.exception("tick")  # the next call that needs what failed says so to its caller

    def _rewarded(self, results: tuple[RewardResult, ...]) -> None:
        self._flow.rewarded(results)

    async def ping(self) -> ActorLevel:
        """The level now: `failed` with the reason when flow could not be built."""
        flow = self._flow
        return flow.level() if isinstance(flow, Broken) else level_of(self._me, "running")

    async def ready(self) -> None:
        """Raises what kept flow from being built."""
        if isinstance(flow := self._flow, Broken):
            raise flow.error

    async def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        """A replica's flush, level and plea for work."""
        reply: ExchangeReply = self._flow.exchange(request)
        return reply

    async def hello(self, hello: TrainerHello) -> TrainerWelcome:
        """A trainer's first call."""
        welcome: TrainerWelcome = self._flow.hello(hello)
        return welcome

    async def next_batch(self, trainer: str, epoch: int) -> NextBatch:
        """Work for the trainer; waits about a second for it."""
        return await self._batch(trainer, epoch, ahead=False)

    async def batch_ahead(self, trainer: str, epoch: int) -> NextBatch:
        """The next batch while the trainer publishes; "wait" when there was none until it asked by `next_batch`."""
        return await self._batch(trainer, epoch, ahead=True)

    async def _batch(self, trainer: str, epoch: int, *, ahead: bool) -> NextBatch:
        loop = asyncio.get_running_loop()
        until = loop.time() + LONG_POLL_S
        self._asked += 1
        mine = self._asked
        self._changed.set()  # a question asked ahead is over when the trainer asks again
        while True:
            if ahead and self._asked != mine:
                return NextBatch(order="wait")
            self._changed.clear()
            answer: NextBatch = self._flow.next_batch(trainer, epoch, ahead=ahead)
            left = until - loop.time()
            if answer.order != "wait" or left <= 0:
                return answer
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                return answer

    async def applied(self, applied: Applied) -> None:
        """The step is made; `applied` says whether it is in a complete checkpoint."""
        self._flow.applied(applied)

    async def published(self, ref: WeightsRef, epoch: int, stored: bool = True) -> None:
        """A new weight generation is on disk, or at the engines alone."""
        self._flow.published(ref, epoch, stored)

    async def set_order(self, daemon_epoch: int, replica: str, epoch: int, order: ReplicaOrder) -> None:
        """What a replica shall do from its next exchange on."""
        self._flow.set_order(daemon_epoch, replica, epoch, order)

    async def set_trainer_order(self, daemon_epoch: int, epoch: int, order: TrainOrder) -> None:
        """What the trainer shall do at its next call."""
        self._flow.set_trainer_order(daemon_epoch, epoch, order)

    async def expect_replica(self, daemon_epoch: int, replica: str, epoch: int) -> None:
        """A replica is about to start."""
        self._flow.expect_replica(daemon_epoch, replica, epoch)

    async def allot(self, daemon_epoch: int, slots: Mapping[str, int]) -> None:
        """How many samples each replica decodes at once, by name."""
        self._flow.allot(daemon_epoch, slots)

    async def forget_replica(self, daemon_epoch: int, replica: str, epoch: int, decoded_tokens: int | None) -> None:
        """A replica is gone; `decoded_tokens` by its own counter, flushed or not."""
        self._flow.forget_replica(daemon_epoch, replica, epoch, decoded_tokens)

    async def forget_trainer(self, daemon_epoch: int, epoch: int) -> None:
        """A trainer is gone."""
        self._flow.forget_trainer(daemon_epoch, epoch)

    async def set_limits(self, daemon_epoch: int, limits: RunLimits) -> None:
        """When the run ends by itself."""
        self._flow.set_limits(daemon_epoch, limits)

    async def set_cost(self, daemon_epoch: int, usd_per_h: float | None) -> None:
        """What the fleet costs now."""
        self._flow.set_cost(daemon_epoch, usd_per_h)

    async def status(self) -> FlowStatus:
        """One consistent reading."""
        status: FlowStatus = self._flow.status()
        return status

    async def finish(self, daemon_epoch: int) -> None:
        """Replicas are told to drain, the trainer to stop at its step boundary; nothing new is leased."""
        self._flow.finish(daemon_epoch)

    async def close(self) -> None:
        """Close the ledger. No call but `ping` is answered after it."""
        for task in self._background:
            task.cancel()
        self._flow.close()
