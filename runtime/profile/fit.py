"""What an engine's steps cost, from benches whose mixes of decoding and prefill differ. Pure."""

import itertools
from collections.abc import Sequence

import numpy as np

from planner.record import record


@record
class Decoded:
    """What an engine did in `busy_s` seconds of engine steps."""

    busy_s: float
    steps: int  # that decoded
    tokens: int  # decoded
    prefill_tokens: int

    @property
    def running(self) -> float:
        """Mean samples of a decode step."""
        return self.tokens / self.steps if self.steps else 0.0


@record
class StepCost:
    """busy_s = steps x step_s + decoded tokens x token_s + prefilled tokens x prefill_s."""

    step_s: float
    token_s: float
    prefill_s: float

    def decode_tokens_per_s(self, running: int) -> float:
        """Tokens a second with so many samples and nothing to prefill."""
        return running / (self.step_s + self.token_s * running)


def step_cost(benches: Sequence[Decoded]) -> StepCost:
    """The non-negative costs that explain the benches best, each bench weighing alike (least squares of relative errors).

    Three unknowns: with every subset of them at zero the rest is solved plainly, and the best non-negative answer is taken.
    """
    work = np.array([(b.steps, b.tokens, b.prefill_tokens) for b in benches], dtype=float)
    busy = np.array([b.busy_s for b in benches], dtype=float)
    scaled, ones = work / busy[:, None], np.ones(len(benches))
    best, least = (float(busy.sum() / max(1.0, work[:, 0].sum())), 0.0, 0.0), float("inf")
    for used in (c for n in (3, 2, 1) for c in itertools.combinations(range(3), n)):
        part = scaled[:, used]
        norm = np.linalg.norm(part, axis=0)
        if not np.all(norm > 0):
            continue
        found, _, rank, _ = np.linalg.lstsq(part / norm, ones, rcond=1e-9)
        if rank < len(used) or np.any(found < 0):
            continue
        left = float(np.sum((part / norm @ found - ones) ** 2))
        if left < least - 1e-12:
            costs = [0.0, 0.0, 0.0]
            for i, value in zip(used, found / norm, strict=True):
                costs[i] = float(value)
            best, least = (costs[0], costs[1], costs[2]), left
    return StepCost(step_s=best[0], token_s=best[1], prefill_s=best[2])
