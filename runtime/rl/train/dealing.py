"""Which rank of a trainer takes which samples. Pure Python: a function of the batch and the shares alone, so that every rank
deals alike and nobody has to be told."""

from collections.abc import Sequence

from runtime.rl.types import TrainBatch, TrainSample


def tokens_of(sample: TrainSample) -> int:
    """Tokens that a forward pass over the sample sees."""
    return len(sample.prompt_tokens) + len(sample.tokens)


def deal(batch: TrainBatch, shares: Sequence[float]) -> tuple[tuple[TrainSample, ...], ...]:
    """The samples of every rank, in the batch's order. Rank r gets about `shares[r]` of the tokens (shares sum to 1).

    Longest first, each to the rank that is then the least loaded for its share (LPT on uniform machines; Gonzalez, Ibarra and
    Sahni, SIAM J. Comput. 6(1), 1977). Samples without a trained token take no part.
    """
    loads = [0] * len(shares)
    owner: dict[int, int] = {}
    trained = [i for i, s in enumerate(batch.samples) if any(s.weights)]
    for i in sorted(trained, key=lambda i: (-tokens_of(batch.samples[i]), batch.samples[i].sample)):
        size = tokens_of(batch.samples[i])
        rank = min(range(len(shares)), key=lambda r: ((loads[r] + size) / shares[r], r))
        loads[rank] += size
        owner[i] = rank
    return tuple(tuple(batch.samples[i] for i in trained if owner[i] == r) for r in range(len(shares)))


def micro_batch_tokens(most: int, shares: Sequence[float], rank: int) -> int:
    """Tokens of a rank's micro-batches when the fastest rank's hold `most`.

    Ranks run their micro-batches in step (each gathers parameters from all), so a slower rank's must be smaller, not fewer.
    """
    return max(1, round(most * shares[rank] / max(shares)))
