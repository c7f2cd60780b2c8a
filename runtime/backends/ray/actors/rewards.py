"""Host of the reward workers: verifiers in children of this actor that can be killed hard."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

from runtime.backends.ray.actors.host import Broken, built, enter, level_of, resolve
from runtime.backends.ray.actors.identity import ActorLevel, Identity
from runtime.backends.ray.actors.marks import write_mark
from runtime.config.schema import Config
from runtime.paths import RunPaths
from runtime.rl.rewards.items import RewardItem, RewardResult
from runtime.rl.types import SampleId

GATHER_S = 0.03  # results that come within this time travel together


class RewardActor:
    """An async actor in a process group of its own. `build` names `(identity, config, paths, on_results) -> pool`; the pool
    calls `on_results` from threads of its own."""

    def __init__(self, me: Identity, build: str, config: Config, paths: RunPaths) -> None:
        enter(me, own_group=True)
        with contextlib.suppress(OSError):
            os.nice(5)  # verifiers are many and short; decoding must not wait for them
        write_mark(paths, me)
        self._me, self._build, self._args = me, build, (config, paths)
        self._built: Any = None
        self._waiting: dict[SampleId, list[asyncio.Queue[RewardResult]]] = {}

    @property
    def _pool(self) -> Any:
        """The pool, built at the first call in the event loop's thread. When that failed, every use raises why."""
        if self._built is None:
            loop = asyncio.get_running_loop()

            def on_results(results: Sequence[RewardResult]) -> None:
                loop.call_soon_threadsafe(self._hand_out, tuple(results))

            self._built = built(self._me, lambda: resolve(self._build)(self._me, *self._args, on_results))
        return self._built

    def _hand_out(self, results: tuple[RewardResult, ...]) -> None:
        for result in results:
            for queue in self._waiting.pop(result.sample, ()):
                queue.put_nowait(result)

    async def ping(self) -> ActorLevel:
        """The level now: `failed` with the reason when the pool could not be built."""
        pool = self._pool
        return pool.level() if isinstance(pool, Broken) else level_of(self._me, "running")

    async def ready(self) -> None:
        """Raises what kept the pool from being built."""
        if isinstance(pool := self._pool, Broken):
            raise pool.error

    async def score(self, items: tuple[RewardItem, ...]) -> AsyncIterator[tuple[RewardResult, ...]]:
        """Results as they come, several at a time; a slow verifier holds up nobody else's."""
        queue: asyncio.Queue[RewardResult] = asyncio.Queue()
        missing = {item.sample for item in items}
        for sample in missing:
            self._waiting.setdefault(sample, []).append(queue)
        self._pool.submit(items)
        while missing:
            results = [await queue.get()]
            await asyncio.sleep(GATHER_S)
            while not queue.empty():
                results.append(queue.get_nowait())
            missing -= {r.sample for r in results}
            yield tuple(results)
