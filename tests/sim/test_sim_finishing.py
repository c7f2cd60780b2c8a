"""What is put off until it is looked at, or carried on from before, is what it would be if it were made anew each time."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.policy.staleness import StalenessPolicy, StalePolicy
from runtime.sim.decoding import Decoding, Lane
from runtime.sim.flow import SimulatedFlow
from runtime.sim.lengths import LengthModel
from runtime.sim.rules import FlowRules, WeightsPath
from runtime.sim.speed import ReplicaSpeed, TrainerSpeed
from runtime.sim.timeline import Timeline

SPEEDS = tuple(
    ReplicaSpeed(
        slots=slots,
        base_s=0.004 + 0.0002 * np.arange(slots + 1),
        kv_s=np.full(slots + 1, 2e-7),
        kv_tokens=kv_tokens,
        prefill=(0.001, 1e-5, 0.0),
    )
    for slots, kv_tokens in ((24, 12_000.0), (40, np.inf))  # the first has no room for 24 long answers
)


def flow_of(stale: StalePolicy, seed: int, block: int | None, train_s: float, *, drawn: bool) -> SimulatedFlow:
    """Two replicas, steps of 8 groups of 4. With a timeline (`drawn`) everything is put into the figures in each window."""
    rules = FlowRules(
        policy=StalenessPolicy(eta=2, prompts_per_step=8, stale=stale),
        responses_per_prompt=4,
        prompt=LengthModel(family="lognormal", mean_tokens=100, cv=0.5, max_tokens=400),
        response=LengthModel(family="lognormal", mean_tokens=400, cv=1.0, max_tokens=3000),
        block=block,
        steps=12,
    )
    flow = SimulatedFlow(rules, seed, Timeline("test") if drawn else None)
    for i, speed in enumerate(SPEEDS):
        flow.add_replica(f"r{i}", speed, WeightsPath(link="wire", bytes_per_s=1e9, size_bytes=3e8))
    flow.set_trainer(TrainerSpeed(train_s=train_s))
    return flow


def figures(flow: SimulatedFlow) -> list[object]:
    """All that was added up, to the last bit."""
    g = flow.groups
    arrays = [a.tolist() for a in (g.tokens, g.starts, g.left, g.complete_s, g.sequence2, flow.decoding.spent)]
    return [vars(flow.books), flow.now_s, flow.version, flow.finishing.complete, flow.in_flight_tokens(), arrays]


@settings(max_examples=30)
@given(
    st.sampled_from(("mask", "wait", "drop")),
    st.integers(0, 99),
    st.sampled_from((None, 16)),
    st.sampled_from((0.5, 4.0, 20.0)),
    st.lists(st.tuples(st.floats(0.1, 30.0), st.sampled_from(("look", "lost", "back", "slow"))), max_size=5),
)
def test_samples_put_into_the_figures_later_are_as_those_put_at_once(
    stale: StalePolicy, seed: int, block: int | None, train_s: float, changes: list[tuple[float, str]]
) -> None:
    late, at_once = (flow_of(stale, seed, block, train_s, drawn=drawn) for drawn in (False, True))
    for after_s, change in changes:
        for flow in (late, at_once):
            flow.advance(flow.now_s + after_s)
            if change == "lost":
                flow.remove_replica("r0", lost=True)
            elif change == "back" and "r0" not in flow.numbers:
                flow.add_replica("r0", SPEEDS[0], WeightsPath())
            elif change == "slow":
                flow.slow_replica("r1", 2.0)
        assert figures(late) == figures(at_once)
    assert late.advance(1e6) == at_once.advance(1e6)
    assert figures(late) == figures(at_once)
    assert late.books.finished > 0


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.sampled_from(("lease", "clear", "add", "remove", "pause")), st.integers(0, 2**16)), max_size=25
    )
)
def test_counts_carried_on_are_those_made_anew(moves: list[tuple[str, int]]) -> None:
    d = Decoding()
    d.add(Lane(name="r", speed=SPEEDS[0]), 0, 24)
    for what, seed in moves:
        rng = np.random.default_rng(seed)
        on = np.isfinite(d.ends)
        if what == "add":
            d.add(Lane(name="r", speed=SPEEDS[seed % 2]), 0, 24)
        elif what == "remove" and len(d.lanes) > 1:
            d.remove(seed % len(d.lanes))
        elif what == "pause":
            (d.pause if seed % 3 else d.resume)(seed % len(d.lanes))
        elif what == "lease":
            at = np.flatnonzero(~on & (rng.random(len(on)) < 0.4))
            tokens, prompts = rng.integers(1, 500, len(at)), rng.random(len(at)) * 99
            d.lease(
                at, starts=d.v[d.rep[at]], rows=at, lengths=tokens, before=prompts, first=0 * at, now_s=0.0 * prompts,
            )  # fmt: skip
        elif what == "clear":
            d.clear(np.flatnonzero(on & (rng.random(len(on)) < 0.4)))
        d.recount()
        on = np.isfinite(d.ends)
        assert d.on.tolist() == np.flatnonzero(on).tolist()
        assert d.on_rep.tolist() == d.rep[on].tolist()
        assert d.running == on.sum() == d.n.sum()
        assert d.n.tolist() == [int(on[d.rep == i].sum()) for i in range(len(d.lanes))]
        assert d.pausing == d.paused.sum()
        own = [float((d.before - d.starts + d.v[d.rep])[on & (d.rep == i)].sum()) for i in range(len(d.lanes))]
        assert np.allclose(d.context, own)


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, 400), min_size=8, max_size=24),
    st.floats(1.0, 60.0),
    st.sampled_from((-1.0, -0.3, 0.0, 1.0)),
    st.sampled_from((-24, 0, 9)),
    st.sampled_from((1, 500, 8_000, 30_000)),
)
def test_who_has_more_to_sample_ends_later_however_context_shrinks(
    lengths: list[int], h: float, growth: float, drift: int, after: int
) -> None:
    d = Decoding()
    d.add(Lane(name="r", speed=SPEEDS[1]), 0, 40)
    at = np.arange(len(lengths))
    prompts = np.full(len(at), 300.0)
    d.lease(
        at, starts=d.v[d.rep[at]], rows=at, lengths=np.array(lengths), before=prompts, first=0 * at, now_s=0 * prompts
    )
    d.recount()
    d.growth[:], d.drift[:] = growth, drift
    d.open_window(h, constant=False)
    ended = d.ended()
    into = d.seconds_into(ended)
    assert (np.diff(into[np.argsort(d.ends[ended], kind="stable")]) >= 0).all()
    assert (into <= h * (1 + 1e-9)).all()
    assert (d.seconds_into(ended, after=after) > into).all()
