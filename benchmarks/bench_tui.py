"""A frame of the dashboard with 512 rows: a new snapshot in, lines drawn and compared, headless at 140x45."""

import asyncio
import statistics

from hexctl.tui.measure import frame_seconds


def run() -> dict[str, float]:
    """CPU milliseconds from snapshot to drawn screen."""
    return {"frame_512_rows_cpu_ms": 1e3 * statistics.median(asyncio.run(frame_seconds(devices=512, frames=20)))}
