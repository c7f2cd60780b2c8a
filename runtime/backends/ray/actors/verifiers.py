"""Flow's way to the verifiers: items go to the rewards actor, results come back as a call in flow's event loop."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence

from runtime.backends.ray import names
from runtime.backends.ray.calls import unwrap, why_dead
from runtime.rl.rewards.items import RewardItem, RewardResult

GATHER_S = 0.1
AGAIN_S = (0.5, 1.0, 2.0, 5.0)
logger = logging.getLogger(__name__)


class RewardDispatch:
    """`runtime.rl.rewards.items.RewardClient` over the rewards actor. Items that a dead actor had are sent to the next one."""

    def __init__(self, run_id: str, deliver: Callable[[tuple[RewardResult, ...]], None]) -> None:
        self._run_id, self._deliver = run_id, deliver
        self._gathered: list[RewardItem] = []  # waits for `start`, then for the end of a gathering
        self._started = self._gathering = False
        self._sent_s = float("-inf")
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, items: Sequence[RewardItem]) -> None:
        """Never waits. Before `start` items are kept: flow submits while it is being built."""
        self._gathered += items
        if self._started and self._gathered and not self._gathering:
            self._gathering = True
            self._spawn(self._gather())

    def start(self) -> None:
        """From now on items are sent. Runs in the event loop."""
        self._started = True
        self.submit(())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _gather(self) -> None:
        """Samples end one by one; a call for each would cost more than most verifiers do. The first after a pause goes at
        once: somebody may wait for it alone."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._sent_s + GATHER_S - loop.time()))
        self._sent_s = loop.time()
        items, self._gathered, self._gathering = tuple(self._gathered), [], False
        self._spawn(self._score(items))

    async def _score(self, items: tuple[RewardItem, ...]) -> None:
        """Until every item is answered; what a dead actor had not answered goes to the next one."""
        import ray

        missing = {item.sample: item for item in items}
        attempt = 0
        while missing:
            try:
                handle = ray.get_actor(names.REWARDS, namespace=names.namespace(self._run_id))
                stream = handle.score.options(num_returns="streaming").remote(tuple(missing.values()))
                async for ref in stream:
                    results: tuple[RewardResult, ...] = await ref
                    self._take(results)
                    for result in results:
                        missing.pop(result.sample, None)
            except (ValueError, ray.exceptions.RayError) as e:
                logger.warning("rewards: %s; %d items will be sent again", why_dead(unwrap(e)), len(missing))
            if missing:
                await asyncio.sleep(AGAIN_S[min(attempt, len(AGAIN_S) - 1)])
                attempt += 1

    def _take(self, results: tuple[RewardResult, ...]) -> None:
        try:
            self._deliver(results)
        except Exception:
            logger.exception("rewards: flow did not take %d results; it will ask for them again", len(results))
