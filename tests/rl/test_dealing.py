"""Dealing a batch to ranks, and saying it to them."""

from hypothesis import given
from hypothesis import strategies as st

from planner.record import replace
from runtime.rl.train.dealing import deal, micro_batch_tokens
from runtime.rl.train.packing import size_of
from runtime.rl.train.wire import batch_message, batch_of, decode, encode
from runtime.rl.types import SampleId, TrainBatch, TrainSample


def sample(number: int, size: int, *, trained: bool = True) -> TrainSample:
    return TrainSample(
        sample=SampleId(number, 0),
        prompt_tokens=(1,),
        tokens=(2,) * size,
        logprobs=(-0.1,) * size,
        versions=(0,) * size,
        weights=(float(trained),) * size,
        reward=0.0,
        advantage=1.0,
        finish="eos",
    )


@st.composite
def batches(draw: st.DrawFn) -> TrainBatch:
    sizes = draw(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=30))
    return TrainBatch(step=3, ids_hash="h", samples=tuple(sample(i, n, trained=t) for i, (n, t) in enumerate(sizes)))


shares = st.lists(st.integers(1, 10), min_size=1, max_size=5).map(lambda w: tuple(x / sum(w) for x in w))


@given(batches(), shares)
def test_every_trained_sample_goes_to_one_rank_and_no_rank_gets_much_more_than_its_share(batch, parts):
    dealt = deal(batch.samples, parts)
    trained = [s for s in batch.samples if any(s.weights)]
    assert sorted(s.sample for d in dealt for s in d) == [s.sample for s in trained]
    total, largest = sum(map(size_of, trained)), max(map(size_of, trained), default=0)
    for mine, share in zip(dealt, parts, strict=True):
        assert sum(map(size_of, mine)) <= share * (total + (len(parts) - 1) * largest) + largest
    # The order in which flow lists the samples says nothing.
    assert [set(d) for d in deal(batch.samples[::-1], parts)] == [set(d) for d in dealt]


def test_a_worked_deal():
    batch = TrainBatch(step=0, ids_hash="h", samples=tuple(sample(i, n - 1) for i, n in enumerate((6, 4, 3, 3, 2))))
    assert [[size_of(s) for s in d] for d in deal(batch.samples, (2 / 3, 1 / 3))] == [[6, 3, 3], [4, 2]]
    assert [micro_batch_tokens(60, (2 / 3, 1 / 3), r) for r in (0, 1)] == [60, 30]


@given(batches())
def test_a_batch_is_heard_as_it_was_said(batch):
    odd = tuple(replace(s, reward=0.1 + 1e-17 * i, advantage=-1 / 3) for i, s in enumerate(batch.samples))
    batch = replace(batch, samples=odd)
    head, body = decode(encode(*batch_message(batch)))
    assert batch_of(head, body) == batch
