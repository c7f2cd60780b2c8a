"""What looking costs: seconds a frame for a fleet of any size, without a terminal."""

import asyncio
import math
import time

from hexctl.tui.app import HexApp
from hexctl.tui.sample import NOW_S, device, sample_snapshot
from hexctl.tui.theme import DEFAULT, load_theme
from planner.record import replace
from runtime.api.wire import Command, CommandResult, Snapshot


class _Nothing:
    """A source that never has news."""

    async def snapshot(self, after: int, wait_s: float) -> Snapshot | None:
        del after
        await asyncio.sleep(wait_s)
        return None

    async def command(self, command: Command) -> CommandResult:
        return CommandResult(accepted=False, message=f"{command.name} is not measured", override_rev=0, plan_rev=None)


def wide_snapshot(devices: int = 512, seq: int = 1) -> Snapshot:
    """A fleet of `devices` rows with figures that depend on `seq`, to measure what a frame costs."""
    rows = []
    for i in range(devices):
        wave = 0.5 + 0.5 * math.sin(i * 0.7 + seq)
        role = "train" if i % 4 == 0 else "rollout"
        rows.append(
            device(
                i,
                role=role,
                kind=("fast", "wide", "old")[i % 3],
                replica=f"{role[0]}{i}",
                version=200 + seq % 5,
                digest="9f3c41",
                util_share=wave,
                memory_used_bytes=wave * 80 * 2**30,
                memory_total_bytes=80 * 2.0**30,
                power_w=100 + 500 * wave,
                temperature_c=30 + 50 * wave,
                tokens_per_s=900 * wave,
                predicted_tokens_per_s=600.0,
                usd_per_h=2.0,
                usd_per_mtok=0.2 + wave,
                running=int(32 * wave),
                slots=32,
                pid=1000 + i,
                age_s=wave,
            )
        )
    base = sample_snapshot(seq)
    return replace(base, at_s=NOW_S + seq * 0.5, devices=tuple(rows), proposal=None)


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
