"""Sampling that depends on nothing but the run's seed and a token's coordinates.

The uniform number behind a token is a function of (seed, group, member, position): whichever replica decodes it, in
whatever batch, before or after a hop, the number is the same. It is a chain of SplitMix64 finalisers (Steele, Lea and
Flood, 2014), one a coordinate:

    h = mix(seed + γ);  h = mix((h ^ group) + γ);  h = mix((h ^ member) + γ);  h = mix((h ^ position) + γ)
    u = (h >> 11) / 2^53                                   γ = 0x9E3779B97F4A7C15, arithmetic modulo 2^64

Each link is a bijection of 64 bits, so coordinates that differ in one place never collide.
"""

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def noise(seed: int, group: ArrayLike, member: ArrayLike, position: ArrayLike) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) for coordinates that broadcast against each other: whole numbers, taken modulo 2^64."""
    h = np.atleast_1d(np.asarray(seed & _MASK, dtype=np.uint64))  # an array: scalars would warn about wrapping
    h = _mix(h + _GAMMA)
    for coordinate in (group, member, position):
        h = _mix((h ^ np.asarray(coordinate).astype(np.uint64)) + _GAMMA)
    return (h >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits: torch.Tensor, u: torch.Tensor, *, temperature: float, accumulate: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row by inverting the cumulative distribution of softmax(logits / temperature) at `u`.

    logits [R,V] and u [R] in [0, 1) -> tokens [R] int64 and their logprobs [R] under the distribution sampled from.
    Sums are taken in `accumulate`: in float64 a token does not depend on what else is in the batch.
    """
    logprobs = torch.log_softmax(logits.to(accumulate) / temperature, dim=-1)
    cdf = logprobs.exp().cumsum(dim=-1)
    total = cdf[:, -1:]
    # Rounding may lift u * total to total itself; the largest number below keeps the answer a token of positive weight.
    target = torch.minimum(u.to(accumulate)[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cdf, target, right=True)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
