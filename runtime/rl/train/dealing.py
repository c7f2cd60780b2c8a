"""Which rank of a trainer takes which samples: a function of the batch and the shares alone, so that every rank
deals alike and nobody has to be told."""

from collections.abc import Sequence

from runtime.rl.train.packing import size_of
from runtime.rl.types import TrainSample


def deal(samples: Sequence[TrainSample], shares: Sequence[float]) -> tuple[tuple[TrainSample, ...], ...]:
    """The samples of every rank, in the order given. Rank r gets about `shares[r]` of the tokens (shares sum to 1).

    Longest first, each to the rank that is then the least loaded for its share (LPT on uniform machines; Gonzalez, Ibarra and
    Sahni, SIAM J. Comput. 6(1), 1977). Samples without a trained token take no part.
    """
    loads = [0] * len(shares)
    owner: dict[int, int] = {}
    taught = [i for i, s in enumerate(samples) if any(s.weights)]
    for i in sorted(taught, key=lambda i: (-size_of(samples[i]), samples[i].sample)):
        size = size_of(samples[i])
        rank = min(range(len(shares)), key=lambda r: ((loads[r] + size) / shares[r], r))
        loads[rank] += size
        owner[i] = rank
    return tuple(tuple(samples[i] for i in taught if owner[i] == r) for r in range(len(shares)))


def micro_batch_tokens(most: int, shares: Sequence[float], rank: int) -> int:
    """Tokens of a rank's micro-batches when the fastest rank's hold `most`.

    Ranks run their micro-batches in step (each gathers parameters from all), so a slower rank's must be smaller, not fewer.
    """
    return max(1, round(most * shares[rank] / max(shares)))
