"""The feed: only the newest counts, silence is noticed and ends, a new daemon behind the socket is picked up."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from hexctl.tui.feed import Feed
from planner.record import replace
from runtime.api.wire import Snapshot
from tests.tui.samples import NOW_S, FakeSource, sample_snapshot

LIMIT_S = 60.0


class Watch:
    """Collects what a feed says, and lets a test wait for it."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.changes = 0
        self._woken = asyncio.Event()

    def on_snapshot(self, s: Snapshot) -> None:
        self.seen.append(s.seq)
        self._woken.set()

    def on_health(self) -> None:
        self.changes += 1
        self._woken.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not holds():
                self._woken.clear()
                await self._woken.wait()


@asynccontextmanager
async def feeding(source: FakeSource, watch: Watch, **options: object) -> AsyncIterator[Feed]:
    """A feed to which nothing is late by default: on a busy machine both ends of a long poll may come due at once."""
    settings = {"spacing_s": 0.0, "wait_s": 0.05, "late_s": LIMIT_S, "backoff_s": (0.01,), **options}
    feed = Feed(source, watch.on_snapshot, watch.on_health, **settings)  # type: ignore[arg-type]
    task = asyncio.create_task(feed.run())
    try:
        yield feed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_every_new_snapshot_arrives_once() -> None:
    source, watch = FakeSource(sample_snapshot(1)), Watch()
    async with feeding(source, watch):
        await watch.until(lambda: watch.seen == [1])
        for seq in (2, 5, 9):
            source.put(sample_snapshot(seq))
            await watch.until(lambda s=seq: watch.seen[-1] == s)  # type: ignore[misc]
        assert watch.seen == [1, 2, 5, 9]
        assert watch.changes == 0


async def test_between_frames_only_the_newest_is_kept() -> None:
    source, watch = FakeSource(sample_snapshot(1)), Watch()
    async with feeding(source, watch, spacing_s=30.0) as feed:
        await watch.until(lambda: watch.seen == [1])
        for seq in range(2, 200):
            source.put(sample_snapshot(seq))
        feed.nudge()  # as a terminal does that wakes up
        await watch.until(lambda: watch.seen == [1, 199])


async def test_no_news_is_not_silence() -> None:
    source, watch = FakeSource(sample_snapshot(1)), Watch()
    async with feeding(source, watch, wait_s=0.01) as feed:
        async with asyncio.timeout(LIMIT_S):
            while len(source.asked) < 6:
                await asyncio.sleep(0)
        assert feed.health.answering
        assert watch.seen == [1]  # the same snapshot is not shown twice


async def test_silence_is_told_with_its_reason_and_ends() -> None:
    source, watch = FakeSource(sample_snapshot(1)), Watch()
    now = [50.0]
    async with feeding(source, watch, clock=lambda: now[0]) as feed:
        await watch.until(lambda: watch.seen == [1])
        source.silent = True
        source.put(sample_snapshot(1))
        await watch.until(lambda: not feed.health.answering)
        now[0] += 12
        assert feed.health.silent_s == 12
        assert feed.health.reason in ("no daemon answers", "the daemon closed the connection")
        assert feed.health.retry_s == 0.01
        source.silent = False
        source.put(sample_snapshot(2))
        await watch.until(lambda: feed.health.answering and watch.seen[-1] == 2)
        assert feed.health.silent_s == 0


async def test_a_daemon_that_hangs_counts_as_silent() -> None:
    class Hanging(FakeSource):
        async def snapshot(self, after: int, wait_s: float) -> Snapshot | None:
            await asyncio.Event().wait()
            raise AssertionError("never woken")

    watch = Watch()
    async with feeding(Hanging(), watch, wait_s=0.01, late_s=0.01) as feed:
        await watch.until(lambda: not feed.health.answering)
        assert feed.health.reason == "no answer in time"


async def test_back_off_grows_to_its_last_step_and_a_nudge_cuts_it_short() -> None:
    source, watch = FakeSource(), Watch()
    source.silent = True
    retries: list[float | None] = []
    async with feeding(source, watch, backoff_s=(0.001, 0.002, 60.0)) as feed:
        await watch.until(lambda: watch.changes >= 1)
        async with asyncio.timeout(LIMIT_S):
            while feed.health.retry_s != 60.0:
                await asyncio.sleep(0)
                retries.append(feed.health.retry_s)
        asked = len(source.asked)
        assert asked == 3
        source.silent = False
        source.newest = sample_snapshot(3)
        feed.nudge()
        await watch.until(lambda: watch.seen == [3])


async def test_a_new_daemon_that_counts_from_one_again_is_shown() -> None:
    source, watch = FakeSource(sample_snapshot(5000)), Watch()
    async with feeding(source, watch):
        await watch.until(lambda: watch.seen == [5000])
        source.silent = True
        source.put(sample_snapshot(5000))
        await watch.until(lambda: watch.changes == 1)
        source.silent = False
        source.put(replace(sample_snapshot(1), at_s=NOW_S + 60))
        await watch.until(lambda: watch.seen == [5000, 1])
