"""A frame of the dashboard with 512 rows: a new snapshot in, lines drawn and compared, headless at 140x45."""

import asyncio

from benchmarks.timing import median_ms
from hexctl.tui.app import HexApp
from hexctl.tui.sample import wide_snapshot
from hexctl.tui.theme import load_theme
from runtime.api.wire import Command, CommandResult, Snapshot


class Silent:
    """A source with nothing new: frames are pushed by the benchmark."""

    async def snapshot(self, after: int, wait_s: float) -> Snapshot | None:
        await asyncio.sleep(wait_s)
        return None

    async def command(self, command: Command) -> CommandResult:
        raise AssertionError(command)


def run() -> dict[str, float]:
    """Milliseconds from snapshot to drawn screen."""

    async def frames() -> float:
        app = HexApp(Silent(), "bench", load_theme("dark"))
        async with app.run_test(size=(140, 45)) as pilot:
            taken = []
            snapshots = [wide_snapshot(512, seq=i) for i in range(1, 31)]
            loop = asyncio.get_running_loop()
            for s in snapshots:
                started = loop.time()
                app.show_snapshot(s)
                await pilot.pause()
                taken.append((loop.time() - started) * 1e3)
            return sorted(taken[5:])[len(taken[5:]) // 2]

    return {"frame_512_rows_ms": asyncio.run(frames()), "build_sample_ms": median_ms(lambda: wide_snapshot(512))}
