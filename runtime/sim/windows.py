"""How long a window of simulated time may be.

A window's speed is that of one number of running samples, so its length follows how fast that number moves. Whatever the
speed, nothing that changes what may begin can lie inside it: known events end it (`runtime.sim.flow`), and what is not known
yet, the end of a step whose batch becomes complete within the window, is bounded here from below.
"""

import math

import numpy as np

from runtime.sim.decoding import INF, Decoding
from runtime.sim.granting import Granting
from runtime.sim.groups import GroupTable
from runtime.sim.rules import FlowRules
from runtime.sim.speed import TrainerSpeed

FINE_SLOTS = 16  # fleets with no more slots are stepped from one end of a sample to the next
STEADY, FEW, MILD = 3.0, 8.0, 0.25  # times as long: while what ends is replaced, while few run; elasticity below which
SIGMAS, LEAST_SHARE = 4.0, 0.05  # a batch is taken to have no fewer tokens than so far below its mean
NARROW = 2.0  # times as short under `wait` and `drop`, where a batch that is taken lets other samples begin


def is_fine(d: Decoding) -> bool:
    """Whether windows go from one end of a sample to the next."""
    return bool(d.begin[-1] <= FINE_SLOTS)


def longest_s(d: Decoding, granting: Granting, rules: FlowRules, version: int) -> float:
    """Seconds of a window by the speed of the replicas alone; infinite where none decodes."""
    if not (d.n[~d.paused].any() if d.pausing else d.running):
        return INF
    if is_fine(d):
        return max(d.first_end_s(), 0.0) * (1 + 1e-12) + 1e-9
    step_s = d.step_s()
    h = step_s / d.running * rules.response.mean_tokens * rules.response.factor(version) / rules.windows
    if rules.policy.stale != "mask":
        return max(h / NARROW, 1e-9)
    if granting.ramping:
        return max(h, 1e-9)
    # Long windows do where the number running stays as it is, because whatever ends is replaced, or hardly matters.
    if granting.waiting > 2 * STEADY * d.running / rules.windows:
        return max(h * STEADY, 1e-9)
    return max(h * min(FEW, max(1.0, MILD / max(d.elasticity(step_s), 1e-9))), 1e-9)


def least_train_s(trainer: TrainerSpeed, rules: FlowRules, version: int) -> float:
    """Seconds that no step takes less than: of a batch with as few tokens as are to be expected in all of a run, the part
    that is quadratic in them left out."""
    if trainer.tokens <= 0:
        return trainer.train_s
    response, samples = rules.response, rules.policy.prompts_per_step * rules.responses_per_prompt
    grown = min(response.factor(v) for v in (version, max(0, version - rules.policy.eta - 1)))
    mean = rules.prompt.mean_tokens + min(response.mean_tokens * grown, response.max_tokens)
    share = max(LEAST_SHARE, 1 - SIGMAS * response.spread / math.sqrt(samples))
    return trainer.train_s * (1 - trainer.quadratic_share) * share * samples * mean / trainer.tokens


def soonest_batch_s(
    d: Decoding,
    groups: GroupTable,
    rules: FlowRules,
    complete_s: list[float],
    *,
    needed: int,
    began_s: float,
    more: int,
) -> tuple[float, float]:
    """When, in the window that is open, a sample ends first, and the earliest that `needed` groups can be complete (both
    infinite: not within the window). Groups whose samples all run are complete exactly when the last of them ends; `more`
    others may be at any moment. `complete_s`: of the groups that are complete, in order."""
    at = d.ended()
    if not len(at):
        return INF, INF
    ends = began_s + d.seconds_into(at)
    rows = d.row[at]
    last = np.zeros(len(groups.left))
    np.maximum.at(last, rows, ends)
    whole = np.flatnonzero(np.bincount(rows, minlength=len(last)) == np.maximum(groups.left, 1))
    times = np.concatenate([complete_s, np.maximum(last[whole], groups.complete_s[whole]) + rules.reward_s])
    place = needed - 1 - more
    first = float(ends.min())
    if place < 0:
        return first, first
    return first, float(np.partition(times, place)[place]) if place < len(times) else INF
