"""How stages of a pipeline add up to a step."""

import math
from collections.abc import Sequence

from planner.record import record


@record
class PipelineTime:
    """Seconds of a step's micro-batches through a pipeline, optimiser and gradient exchange apart."""

    total_s: float
    busy_s: float  # of the slowest stage
    wait_s: float  # of the slowest stage, for its borders
    bubble_s: float  # until the pipeline is full, and after it runs dry


def pipeline_time(stages_s: Sequence[float], borders_s: Sequence[float], rounds: int) -> PipelineTime:
    """`stages_s`: seconds of each stage for one micro-batch, forward and backward; `borders_s`: seconds a micro-batch blocks
    both neighbours of each border; `rounds` micro-batches.

    The slowest stage, its borders included, sets the pace; all others count once (1F1B), and so do borders it does not touch.
    """
    n = len(stages_s)
    waits = [sum(borders_s[max(0, i - 1) : i + 1]) for i in range(n)]
    slowest = max(range(n), key=lambda i: stages_s[i] + waits[i])
    busy, wait = rounds * stages_s[slowest], rounds * waits[slowest]
    bubble = math.fsum(stages_s) - stages_s[slowest] + math.fsum(borders_s) - waits[slowest]
    return PipelineTime(total_s=busy + wait + bubble, busy_s=busy, wait_s=wait, bubble_s=bubble)
