"""What looking costs: seconds a frame for a fleet of any size, without a terminal."""

import asyncio
import time

from hexctl.tui.app import HexApp
from hexctl.tui.sample import wide_snapshot
from hexctl.tui.theme import DEFAULT, load_theme
from runtime.api.wire import Command, CommandResult, Snapshot


class _Nothing:
    """A source that never has news."""

    async def snapshot(self, after: int, wait_s: float) -> Snapshot | None:
        del after
        await asyncio.sleep(wait_s)
        return None

    async def command(self, command: Command) -> CommandResult:
        return CommandResult(accepted=False, message=f"{command.name} is not measured", override_rev=0, plan_rev=None)


async def frame_seconds(devices: int = 512, frames: int = 20, size: tuple[int, int] = (140, 45)) -> tuple[float, ...]:
    """Seconds of each of `frames` frames of a fleet of `devices` rows in which every figure changes.

    A frame is everything from a snapshot to the text for the terminal: view rows, layout, strips. The first frame, which
    fills caches, is not counted.
    """
    app = HexApp(_Nothing(), "bench", load_theme(DEFAULT))
    snapshots = [wide_snapshot(devices, seq) for seq in range(frames + 1)]
    taken = []
    async with app.run_test(size=size) as pilot:
        for snapshot in snapshots:
            await pilot.pause()
            began = time.process_time()
            app.show_snapshot(snapshot)
            await pilot.pause()
            taken.append(time.process_time() - began)
    return tuple(taken[1:])
