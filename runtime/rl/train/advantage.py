"""Group-relative advantages. Pure Python on purpose: whoever assembles a batch needs neither torch nor NumPy.

Source: DeepSeekMath (arXiv:2402.03300), section 4.1.2: A_i = (r_i - mean(r)) / std(r) over the responses to one prompt.
Without the division it is the estimator of Dr. GRPO (arXiv:2503.20783).
"""

import math
from collections.abc import Sequence

STD_FLOOR = 1e-4  # keeps groups of nearly equal rewards finite


def group_advantages(rewards: Sequence[float], *, normalise: bool) -> tuple[float, ...]:
    """Advantages of one group's responses, in the order of `rewards`.

    `normalise` divides by the sample standard deviation (n - 1) plus `STD_FLOOR`. A group of equal rewards, or of one
    response, has advantage exactly 0 everywhere: it teaches nothing.
    """
    if not rewards:
        return ()
    if min(rewards) == max(rewards):
        return (0.0,) * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = tuple(r - mean for r in rewards)
    if not normalise:
        return centred
    deviation = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return tuple(c / (deviation + STD_FLOOR) for c in centred)
