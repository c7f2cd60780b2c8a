"""The engine's costs told apart, against an engine in virtual time whose costs are known; and the samples that it is given."""

import itertools
import queue
import random
import statistics
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.record import record
from runtime.profile.steady import Course, OneGeneration, Publishing, Steady, Supply, Turn, mean_of, steady, updated
from runtime.rl.types import Append, EngineStats, ExchangeRequest, WeightsRef


@record
class Costs:
    """Of a virtual engine, in seconds. At most `chunk` tokens are prefilled a step."""

    step_s: float = 0.006
    prefill_s: float = 4e-6
    recompute_s: float = 2e-6
    swap_s: float = 0.02
    chunk: int = 8192
    noise: float = 0.0  # of each step's seconds
    flat: bool = True  # whether a step takes as long for few samples


class Virtual:
    """Samples in slots, each with tokens to prefill and tokens to decode. One that needs prefill decodes once it has it."""

    def __init__(self, costs: Costs, *, slots: int, prompt: int, length: int, every: int, hold: int = 1) -> None:
        """New weights every `every` steps (0: never); replacements are let in together every `hold` steps."""
        self.costs, self.prompt, self.length, self.every, self.hold = costs, prompt, length, every, hold
        self.random = random.Random(1)
        self.slots = [[self.random.randrange(length), 0] for _ in range(slots)]  # decoded, to prefill
        self.ended: list[int] = []
        self.busy_s, self.steps, self.tokens, self.prefilled, self.begun, self.updates = 0.0, 0, 0, 0, 0, 0
        self.again = 0  # tokens to be computed anew

    def step(self) -> Turn:
        c, at = self.costs, self.steps
        if self.every and at and at % self.every == 0:
            self.updates += 1
            for i, slot in enumerate(self.slots):
                if i not in self.ended:
                    slot[1] += self.prompt + slot[0] - 1
                    self.again += self.prompt + slot[0] - 1
        if at % self.hold == 0:
            for i in self.ended:
                self.slots[i] = [0, self.prompt - 1]
                self.begun += self.prompt - 1
            self.ended = []
        room, new = c.chunk, 0
        decoded = 0
        for i, slot in enumerate(self.slots):
            if i in self.ended:
                continue
            done = min(room, slot[1])
            room -= done
            slot[1] -= done
            new += done
            if slot[1] == 0:
                slot[0] += 1
                decoded += 1
                if slot[0] >= self.length:
                    self.ended.append(i)
        anew = min(new, self.again)
        self.again -= anew
        work_s = (
            c.step_s * (decoded > 0 if c.flat else decoded / len(self.slots))
            + anew * c.recompute_s
            + (new - anew) * c.prefill_s
        )
        self.busy_s += work_s * (1 + c.noise * self.random.gauss(0, 1))
        self.steps += decoded > 0
        self.tokens += decoded
        self.prefilled += new
        running = sum(s[1] == 0 for i, s in enumerate(self.slots) if i not in self.ended)
        return Turn(
            busy_s=self.busy_s,
            steps=self.steps,
            tokens=self.tokens,
            prefill_tokens=self.prefilled,
            begun_tokens=self.begun,
            running=running,
            updates=self.updates,
            pause_s=c.swap_s if self.updates else None,
            context=self.prompt + statistics.fmean(s[0] for s in self.slots),
        )


def turns(costs: Costs, steps: int = 600, *, every: int = 0, hold: int = 1, slots: int = 64) -> list[Turn]:
    engine = Virtual(costs, slots=slots, prompt=100, length=150, every=every, hold=hold)
    return [engine.step() for _ in range(steps)]


@pytest.mark.parametrize("hold", [1, 8])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_plain_step_and_a_prompts_cost_are_told_apart(hold: int, noise: float) -> None:
    """With 64 slots and 150 tokens 0.4 samples end a step; held back for eight steps some slots are idle."""
    costs = Costs(noise=noise)
    found = steady(turns(costs, 2000, hold=hold))
    assert found is not None
    assert found.step_s == pytest.approx(costs.step_s, rel=0.01)
    assert found.running == pytest.approx(64 if hold == 1 else 62.5, rel=0.01)
    assert found.context == pytest.approx(175, rel=0.02)
    if not noise:
        assert found.prefill_s == pytest.approx(costs.prefill_s, rel=0.02)


def test_a_step_is_found_where_every_one_prefills() -> None:
    """256 slots, 1.7 ends a step: hardly a step without. The line through the steps says what one would take."""
    costs = Costs(prefill_s=2e-5)
    made = turns(costs, 400, slots=256)
    assert sum(b.prefill_tokens == a.prefill_tokens for a, b in itertools.pairwise(made)) < 200
    found = steady(made)
    assert found is not None
    assert found.step_s == pytest.approx(costs.step_s, rel=0.03)
    assert found.prefill_s == pytest.approx(costs.prefill_s, rel=0.1)


@settings(max_examples=40, deadline=None)
@given(
    swap_s=st.floats(1e-4, 0.5),
    recompute_s=st.floats(5e-7, 2e-5),
    prefill_s=st.floats(0.0, 2e-5),
    chunk=st.sampled_from([1000, 8192, 100_000]),
)
def test_a_swap_and_what_is_computed_anew_are_told_apart(
    swap_s: float, recompute_s: float, prefill_s: float, chunk: int
) -> None:
    costs = Costs(swap_s=swap_s, recompute_s=recompute_s, prefill_s=prefill_s, chunk=chunk, flat=False)
    plain = Steady(running=64, context=175, step_s=costs.step_s, prefill_s=prefill_s, busy_s=1.0)
    found = updated(turns(costs, 700, every=100), plain)
    assert found is not None
    assert found.updates == 6
    assert found.swap_s == swap_s
    assert found.recompute_s == pytest.approx(recompute_s, rel=0.06)
    assert found.samples * found.prefix == pytest.approx(64 * 174, rel=0.06)


def test_decoding_that_slows_down_meanwhile_is_part_of_what_is_lost() -> None:
    """Eleven thousand tokens anew take twelve steps of a thousand; if each takes as long as one of all samples, half of the decoding
    of these steps is lost besides: six steps of 6 ms over 11,136 tokens."""
    plain = Steady(running=64, context=175, step_s=0.006, prefill_s=4e-6, busy_s=1.0)
    found = updated(turns(Costs(chunk=1000), 700, every=100), plain)
    assert found is not None
    assert found.recompute_s == pytest.approx(2e-6 + 6 * 0.006 / (64 * 174), rel=0.15)


def test_paces_are_averaged_over_time() -> None:
    """Ten seconds at 5 ms are 2,000 steps, twelve at 8 ms 1,500: 3,500 in 22 s, and so 4/7 of them at the first pace."""
    fast = Steady(running=220, context=190, step_s=0.005, prefill_s=2e-6, busy_s=10.0)
    slow = Steady(running=213, context=197, step_s=0.008, prefill_s=9e-6, busy_s=12.0)
    both = mean_of((fast, slow))
    assert both.step_s == pytest.approx(22 / 3500)
    assert (both.running, both.context) == (pytest.approx(217), pytest.approx(193))
    assert both.prefill_s == pytest.approx(5e-6)
    assert both.busy_s == 22.0
    assert both.slowest == pytest.approx(22 / 3500 / 0.008)
    assert mean_of((slow,)).slowest is None
    for field in ("running", "context", "step_s", "prefill_s", "busy_s"):
        assert getattr(mean_of((slow,)), field) == pytest.approx(getattr(slow, field))


def test_an_update_whose_samples_are_not_back_by_the_end_says_nothing() -> None:
    plain = Steady(running=64, context=175, step_s=0.006, prefill_s=0.0, busy_s=1.0)
    made = turns(Costs(chunk=1000), 205, every=100)
    one = updated(made, plain)
    assert one is not None
    assert one.updates == 1, "the second needs twelve steps"
    assert updated(made[:105], plain) is None
    assert updated(turns(Costs(), 100), plain) is None
    assert steady(made[:1]) is None


def request(seq: int, appends: tuple[Append, ...] = ()) -> ExchangeRequest:
    return ExchangeRequest(replica="r", epoch=1, seq=seq, version=0, digest="d", appends=appends, stats=EngineStats())


def test_the_first_samples_come_as_a_steady_state_leaves_them() -> None:
    """Lengths uniform from 50 to 150: one that is met at work has a mean of 108 tokens, of which half are behind it; those that follow
    begin at their prompt and have 100. Nobody is beyond `longest`."""
    course = Course(running=4000, prompt_tokens=7, new_tokens=100, longest=400, vocab=50)
    ref = WeightsRef(lineage=0, version=0, path="", digest="d")
    supply = Supply(course, OneGeneration(ref))
    first = supply.send(request(1)).result(0.0).leases
    assert len(first) == 4000
    assert statistics.fmean(x.max_new_tokens for x in first) == pytest.approx(108.3, rel=0.02)
    assert statistics.fmean(len(x.tokens) / x.max_new_tokens for x in first) == pytest.approx(0.5, abs=0.02)
    assert supply.first_tokens == sum(7 + len(x.tokens) - 1 for x in first)
    assert supply.context(4000) == pytest.approx(1 + 7 + statistics.fmean(len(x.tokens) for x in first))
    ends = tuple(Append(x.sample, 1, len(x.tokens), (5,), (-1.0,), 0, "eos") for x in first)
    then = supply.send(request(2, ends)).result(0.0).leases
    assert len(then) == 4000
    assert {x.tokens for x in then} == {()}
    assert statistics.fmean(x.max_new_tokens for x in then) == pytest.approx(100, rel=0.02)
    short = Supply(Course(running=100, prompt_tokens=1, new_tokens=100, longest=120, vocab=50), OneGeneration(ref))
    assert max(x.max_new_tokens for x in short.send(request(1)).result(0.0).leases) <= 120


def test_a_generation_follows_so_many_tokens_after_the_last_was_taken() -> None:
    """Every 10 tokens; the first try fails for want of a place, the fourth for good."""
    first = WeightsRef(lineage=0, version=4, path="", digest="d")
    asked: queue.Queue[int] = queue.Queue()
    tries = iter(range(1, 5))

    def make(version: int) -> WeightsRef | None:
        nth = next(tries)
        asked.put(version)
        if nth == 4:
            raise OSError("the disk is full")
        return None if nth == 1 else WeightsRef(lineage=0, version=version, path="", digest=f"d{version}")

    weights = Publishing(first, make, period_tokens=10)
    weights.told(4, 9)
    weights.told(4, 1)
    assert [asked.get(timeout=60), asked.get(timeout=60)] == [5, 5]
    until(lambda: weights.stored.version == 5)
    weights.told(4, 100)
    assert asked.empty(), "it is not taken yet"
    weights.told(5, 10)
    assert asked.get(timeout=60) == 6
    until(lambda: weights.stored.version == 6)
    assert (weights.direct, weights.failed) == (None, None)
    weights.told(6, 10)
    assert asked.get(timeout=60) == 7
    until(lambda: isinstance(weights.failed, OSError))
    weights.close()


def test_closing_while_a_generation_is_made_waits_for_that_alone() -> None:
    """The word that ends it must not be taken for the one that it has just done with."""
    begun, late = threading.Event(), threading.Event()

    def make(version: int) -> WeightsRef:
        begun.set()
        late.wait(0.5)  # until `close` waits
        return WeightsRef(lineage=0, version=version, path="", digest="d")

    weights = Publishing(WeightsRef(lineage=0, version=0, path="", digest="d"), make, period_tokens=1)
    weights.told(0, 1)
    assert begun.wait(60.0)
    before = time.monotonic()
    weights.close()
    assert time.monotonic() - before < 25.0  # it would give up after thirty
    assert not weights._thread.is_alive()


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)
