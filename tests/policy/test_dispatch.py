"""Dispatch against oracles: best makespans by trying every split, the speed model against the law it is fed."""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.record import record, replace
from runtime.policy.dispatch import (
    Candidate,
    Home,
    ReplicaLoad,
    SpeedModel,
    ahead,
    choose,
    first_ramp,
    grant,
    is_strong,
    next_ramp,
)


@record
class Kind:
    """A replica's law: a decode step with n samples takes a + b n seconds."""

    slots: int
    a: float
    b: float = 0.0

    def tau_s(self, n: int) -> float:
        return self.a + self.b * n


def measured(kind: Kind) -> SpeedModel:
    model = SpeedModel()
    for n in (1, max(1, kind.slots // 2), kind.slots, kind.slots):
        model = model.observe(n, n / kind.tau_s(n))
    return model


def makespan(kinds: Sequence[Kind], samples: int, tokens: int, take: Callable[[int, list[int], int], int]) -> float:
    """Seconds until `samples` of `tokens` tokens each are decoded. `take(replica, held, waiting)` is asked at the start
    and whenever samples of a replica end. Samples advance step by step, all that are held together."""
    held: list[list[int]] = [[] for _ in kinds]  # tokens left
    waiting, end = samples, 0.0
    queue = [(0.0, i) for i in range(len(kinds))]
    while queue:
        now, i = heapq.heappop(queue)
        held[i] = [left - 1 for left in held[i] if left > 1]
        n = min(waiting, take(i, [len(h) for h in held], waiting))
        held[i] += [tokens] * n
        waiting -= n
        if held[i]:
            heapq.heappush(queue, (now + kinds[i].tau_s(len(held[i])), i))
            end = max(end, now + kinds[i].tau_s(len(held[i])))
        elif waiting:
            heapq.heappush(queue, (now + 0.05, i))
    return end


def policy_of(kinds: Sequence[Kind]) -> Callable[[int, list[int], int], int]:
    models = [measured(k) for k in kinds]

    def take(i: int, held: list[int], waiting: int) -> int:
        loads = [
            ReplicaLoad(slots=k.slots, leased=n, speed=m, ramp=k.slots)
            for k, n, m in zip(kinds, held, models, strict=True)
        ]
        return grant(loads[i], loads[:i] + loads[i + 1 :], waiting=waiting)

    return take


def best_split(kinds: Sequence[Kind], samples: int, tokens: int) -> float:
    """The best makespan over all fixed splits of the samples: brute force."""

    def alone(kind: Kind, n: int) -> float:
        if n == 0:
            return 0.0
        return makespan([kind], n, tokens, lambda _, held, waiting: min(kind.slots - held[0], waiting))

    table = [[alone(k, n) for n in range(samples + 1)] for k in kinds]
    best = float("inf")
    for split in itertools.product(range(samples + 1), repeat=len(kinds) - 1):
        rest = samples - sum(split)
        if rest >= 0:
            best = min(best, max(t[n] for t, n in zip(table, (*split, rest), strict=True)))
    return best


@pytest.mark.parametrize("samples", [1, 2, 4, 8, 12, 17, 24, 32])
@pytest.mark.parametrize(
    "kinds",
    [
        (Kind(slots=4, a=0.02), Kind(slots=4, a=0.02), Kind(slots=4, a=0.1)),
        (Kind(slots=4, a=0.01, b=0.005), Kind(slots=4, a=0.01, b=0.005), Kind(slots=8, a=0.01, b=0.03)),
        (Kind(slots=2, a=0.02), Kind(slots=2, a=0.02), Kind(slots=16, a=0.15)),
    ],
)
def test_two_fast_and_a_slow_replica_end_near_the_optimum(kinds: tuple[Kind, ...], samples: int) -> None:
    tokens = 20
    ours = makespan(kinds, samples, tokens, policy_of(kinds))
    assert ours <= 1.25 * best_split(kinds, samples, tokens)


def test_by_request_count_the_slow_one_would_hold_everybody_up() -> None:
    kinds = (Kind(slots=8, a=0.02), Kind(slots=8, a=0.02), Kind(slots=8, a=0.4))
    tokens, samples = 20, 24

    def fewest_in_flight(i: int, held: list[int], waiting: int) -> int:
        return max(0, min(kinds[i].slots - held[i], waiting))

    best = best_split(kinds, samples, tokens)
    assert makespan(kinds, samples, tokens, policy_of(kinds)) <= 1.25 * best
    assert makespan(kinds, samples, tokens, fewest_in_flight) > 5 * best


def test_with_much_waiting_everybody_works() -> None:
    kinds = (Kind(slots=4, a=0.02), Kind(slots=4, a=0.1))
    take = policy_of(kinds)
    assert take(0, [0, 0], 500) == 4
    assert take(1, [0, 0], 500) == 4
    assert take(1, [4, 0], 1) == 0


@given(a=st.floats(0.001, 0.5), b=st.floats(0.0, 0.05), many=st.lists(st.integers(1, 32), min_size=2, max_size=20))
def test_the_speed_model_finds_the_line(a: float, b: float, many: list[int]) -> None:
    model = SpeedModel()
    for n in many:
        model = model.observe(n, n / (a + b * n))
    assert model.known
    last = many[-1]
    if len(set(many)) == 1:
        assert model.tau_s(last) == pytest.approx(a + b * last)
    if len({*many[-3:]}) > 1 and max(many) >= 2 * min(many[-3:]):
        assert model.tau_s(last) == pytest.approx(a + b * last, rel=0.3)


def test_the_speed_model_is_exact_on_a_line_and_ignores_nothing_measured() -> None:
    model = SpeedModel()
    for n in (2, 4, 8, 16):
        model = model.observe(n, n / (0.1 + 0.02 * n))
    assert model.tau_s(32) == pytest.approx(0.1 + 0.02 * 32)
    assert model.observe(0, 5.0) == model
    assert model.observe(4, 0.0) == model


def test_a_new_replica_begins_slowly_and_grows_only_while_it_is_measured() -> None:
    load = ReplicaLoad(slots=16, leased=0, ramp=first_ramp(16))
    assert grant(load, (), waiting=100) == 4
    held = replace(load, leased=4)
    assert next_ramp(held, progressed=True) == 4, "blind: no rate was measured"
    seen = replace(held, speed=SpeedModel().observe(4, 40.0))
    assert next_ramp(seen, progressed=True) == 8
    assert next_ramp(seen, progressed=False) == 4
    assert next_ramp(replace(seen, leased=2), progressed=True) == 4, "it does not use what it has"
    assert next_ramp(replace(seen, leased=16, ramp=16), progressed=True) == 16


def test_work_ahead_is_what_ends_until_a_refill() -> None:
    """40,000 tokens/s, 300 ms, 120 tokens a sample: 100 end on average, and 2 sqrt(100) more now and then. At 10 ms: 3.33,
    3.65 more. Never more than there are slots. None where nothing is decoded, nor for 1.5 of 256 slots: with 8,000 tokens a
    sample lives 51 s, 171 refills."""
    assert ahead(256, 40_000.0, 0.3, 120.0) == 120
    assert ahead(256, 40_000.0, 0.01, 120.0) == 7
    assert ahead(64, 40_000.0, 0.3, 120.0) == 64
    assert ahead(256, 40_000.0, 0.3, 8_000.0) == 0
    assert ahead(256, 0.0, 0.3, 120.0) == ahead(256, 40_000.0, 0.0, 120.0) == 0


@given(mean=st.floats(0.5, 200.0))
def test_work_ahead_nearly_always_lasts(mean: float) -> None:
    """Against the Poisson distribution itself: more ends than there is ahead in at most 1 of 20 times."""
    covered, at = 0.0, math.exp(-mean)
    for k in range(ahead(math.floor(99 * mean), mean, 1.0, 1.0) + 1):
        covered += at
        at *= mean / (k + 1)
    assert covered >= 0.95


def test_work_ahead_comes_after_the_free_slots_of_others() -> None:
    """Each has 8 slots and may hold 8 more; `full` has all slots taken. Of 10 that wait it takes half when the other is full as
    well, none of 8 when the other has 8 slots free, half of the 4 that are left of 12; three quarters when it is three times as
    fast; all when it is alone."""
    speed = SpeedModel().observe(8, 80.0)
    full = ReplicaLoad(slots=8, leased=8, ramp=8, ahead=8, speed=speed)
    empty = replace(full, leased=0)
    assert grant(full, (full,), waiting=10) == 5
    assert grant(full, (empty,), waiting=8) == 0
    assert grant(full, (empty,), waiting=12) == 2
    assert grant(replace(full, speed=SpeedModel().observe(8, 240.0)), (full,), waiting=8) == 6
    assert grant(full, (replace(full, speed=SpeedModel()),), waiting=10) == 5, "one is not measured: equal shares"
    assert grant(full, (), waiting=100) == 8
    assert grant(empty, (), waiting=100) == 16


@given(slots=st.integers(1, 64), leased=st.integers(0, 64), kv=st.floats(0, 1), waiting=st.integers(0, 200))
def test_grants_respect_slots_and_kv_room(slots: int, leased: int, kv: float, waiting: int) -> None:
    load = ReplicaLoad(slots=slots, leased=leased, kv_used_share=kv, ramp=slots, speed=SpeedModel().observe(4, 40.0))
    n = grant(load, (), waiting=waiting)
    assert 0 <= n <= waiting
    assert n == 0 or leased + n <= slots
    if kv >= 0.9:
        assert n == 0
    elif leased and n:
        assert kv / leased * (leased + n) <= 0.9 + 1e-9


def test_long_prefills_go_to_strong_replicas_but_older_steps_first() -> None:
    queue = [Candidate(index=i, due=due, length=length, group=i) for i, (due, length) in enumerate(
        [(0, 5), (0, 9), (0, 1), (1, 99), (1, 2)]
    )]  # fmt: skip
    assert choose(queue, 1, strong=True) == (1,)
    assert choose(queue, 1, strong=False) == (2,)
    assert choose(queue, 4, strong=True) == (1, 0, 2, 3)
    assert choose(queue, 4, strong=False) == (2, 0, 1, 4)
    assert choose(queue, 9, strong=True) == (1, 0, 2, 3, 4)


def test_a_group_goes_on_where_it_is_and_whole_ones_are_taken_before_the_next() -> None:
    """Groups of three, all due at once: 0 is decoded elsewhere and has two left, 1 is decoded here with one left, 2 and 3 are new,
    3 with the longer prompt."""
    groups = (
        ((0, 5, Home.ELSEWHERE),) * 2 + ((1, 5, Home.HERE),) + ((2, 5, Home.NOWHERE),) * 3 + ((3, 9, Home.NOWHERE),) * 3
    )
    queue = [Candidate(index=i, due=0, length=n, group=g, home=home) for i, (g, n, home) in enumerate(groups)]
    assert choose(queue, 4, strong=True) == (2, 6, 7, 8)
    assert choose(queue, 4, strong=False) == (2, 3, 4, 5)
    assert choose(queue, 5, strong=True) == (2, 6, 7, 8, 3)
    assert choose(queue, 9, strong=True) == (2, 6, 7, 8, 3, 4, 5, 0, 1), "no slot stays empty to keep a group together"
    earlier = [*queue, Candidate(index=9, due=-1, length=1, group=4, home=Home.ELSEWHERE)]
    assert choose(earlier, 1, strong=True) == (9,), "and nobody waits a step for it"


@st.composite
def queues(draw: st.DrawFn) -> list[Candidate]:
    """Up to twelve groups of up to six waiting samples, in the order of their steps."""
    out: list[Candidate] = []
    due = 0
    for group in range(draw(st.integers(0, 12))):
        due += draw(st.integers(0, 1))
        home, length = draw(st.sampled_from(Home)), draw(st.integers(1, 9))
        for _ in range(draw(st.integers(1, 6))):
            out.append(Candidate(index=len(out), due=due, length=length, group=group, home=home))
    return out


@given(queue=queues(), count=st.integers(0, 40), strong=st.booleans())
def test_choices_fill_the_slots_keep_to_the_steps_and_break_at_most_one_group_a_home(
    queue: list[Candidate], count: int, strong: bool
) -> None:
    chosen = [queue[i] for i in choose(queue, count, strong=strong)]
    assert len({c.index for c in chosen}) == len(chosen) == min(count, len(queue)), "work-conserving"
    assert [c.due for c in chosen] == sorted(c.due for c in queue)[: len(chosen)], "older steps first"
    left = [c for c in queue if c not in chosen]
    for due in {c.due for c in queue}:
        nearest = min((c.home for c in left if c.due == due), default=Home.ELSEWHERE)
        assert all(c.home <= nearest for c in chosen if c.due == due), (
            "none is taken from another while there are nearer ones"
        )
    broken = [g for g in {c.group for c in chosen} if any(c.group == g for c in left)]
    assert len(broken) <= 1, "one group is taken whole before the next is begun"


def test_strength_is_relative() -> None:
    fast = ReplicaLoad(slots=4, leased=2, ramp=4, speed=SpeedModel().observe(2, 200.0))
    slow = ReplicaLoad(slots=4, leased=2, ramp=4, speed=SpeedModel().observe(2, 20.0))
    assert is_strong(fast, (slow,))
    assert not is_strong(slow, (fast,))
    assert is_strong(slow, ())
