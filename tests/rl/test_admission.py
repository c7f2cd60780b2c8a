"""When a running batch lets requests in: learnt price, hand-worked waits, and total time beside the best fixed rhythm."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.rl.engine.vllm_host.admission import FIRST_HOLD, Admission, Waiting

PLAIN_S = 0.004
TOKEN_S = 1e-6  # of prefill


@dataclass(frozen=True)
class Turns:
    """The card is another's too for `turn_s` of every `period_s`: steps then take `slower` times as long."""

    turn_s: float
    period_s: float
    slower: float


class Engine:
    """Slots with samples of `length` tokens that are replaced at once; a step that lets requests in takes `extra_s` more."""

    def __init__(
        self, *, slots: int, length: int, prompt: int, extra_s: float, turns: Turns | None = None, seed: int = 0
    ) -> None:
        self.slots, self.prompt, self.extra_s, self.turns = slots, prompt, extra_s, turns
        rng = random.Random(seed)
        self._length: Callable[[], int] = lambda: rng.randint(max(1, length // 2), length + length // 2)
        self.left: dict[int, int] = {}
        self.seconds, self.tokens, self._next, self.admissions = 0.0, 0, 0, 0

    def run(self, steps: int, take: Callable[[int], list[Waiting]], add: Callable[[Waiting], None],
            stepped: Callable[[float, int], None]) -> float:  # fmt: skip
        """Tokens a second over the second half of the steps."""
        waiting = 0
        at_half = (0.0, 0)
        for i in range(steps):
            if i == steps // 2:
                at_half = (self.seconds, self.tokens)
            while len(self.left) + waiting < self.slots:
                add(Waiting(self._next, [1] * self.prompt, 1))
                self._next, waiting = self._next + 1, waiting + 1
            taken = take(len(self.left))
            waiting -= len(taken)
            for r in taken:
                self.left[r.key] = self._length()
            self.admissions += bool(taken)
            seconds = PLAIN_S + (self.extra_s + TOKEN_S * sum(len(r.tokens) for r in taken) if taken else 0.0)
            if self.turns is not None and self.seconds % self.turns.period_s < self.turns.turn_s:
                seconds *= self.turns.slower
            self.seconds += seconds
            self.tokens += len(self.left)
            running = len(self.left)
            self.left = {k: n - 1 for k, n in self.left.items() if n > 1}
            stepped(seconds, running)
        return (self.tokens - at_half[1]) / (self.seconds - at_half[0])


def held(engine: Engine, steps: int, *, hold: bool = True) -> tuple[float, Admission]:
    admission = Admission(slots=engine.slots, batched_tokens=8192, hold=hold)
    rate = engine.run(steps, admission.take, admission.add, admission.stepped)
    return rate, admission


def every(engine: Engine, steps: int, rhythm: int) -> float:
    """The oracle's way: let in what waits every `rhythm` steps."""
    waiting: list[Waiting] = []
    since = rhythm

    def take(running: int) -> list[Waiting]:
        nonlocal since
        if running and since < rhythm:
            return []
        taken = waiting[:]
        waiting.clear()
        since = 0 if taken else since
        return taken

    def stepped(seconds: float, running: int) -> None:
        nonlocal since
        since += 1

    return engine.run(steps, take, waiting.append, stepped)


@pytest.mark.parametrize("extra", [0.5, 1.5, 4.0])
@pytest.mark.parametrize("length", [20, 120, 600])
def test_is_nearly_as_fast_as_the_best_fixed_rhythm(extra: float, length: int) -> None:
    made: dict[str, Any] = {"slots": 64, "length": length, "prompt": 100, "extra_s": extra * PLAIN_S}
    steps = max(2000, 12 * length)
    best = max(every(Engine(**made), steps, rhythm) for rhythm in (1, 2, 3, 5, 8, 12, 18, 27, 40, 60))
    rate, admission = held(Engine(**made), steps)
    assert rate >= 0.94 * best
    assert admission.price_steps == pytest.approx(extra, rel=0.35)


@pytest.mark.parametrize(("extra", "turn_s", "slower"), [(0.5, 0.3, 1.5), (1.5, 0.3, 4.0), (3.0, 0.15, 4.0)])
def test_turns_of_others_on_the_card_are_no_price(extra: float, turn_s: float, slower: float) -> None:
    """What is counted over whole cycles comes to 1.4, 15 and 13 steps here: slots stood idle for others' turns."""
    turns = Turns(turn_s=turn_s, period_s=0.65, slower=slower)
    made: dict[str, Any] = {"slots": 256, "length": 140, "prompt": 100, "extra_s": extra * PLAIN_S, "turns": turns}
    rate, admission = held(Engine(**made), 4000)
    assert admission.price_steps == pytest.approx(extra, rel=0.1)
    assert rate >= 0.94 * max(every(Engine(**made), 4000, rhythm) for rhythm in (12, 18, 40))


def test_a_price_that_grew_from_nothing_is_noticed() -> None:
    """Nothing is waited for while an admission costs nothing, so that no plain step is seen, unless one is waited for."""
    engine = Engine(slots=64, length=100, prompt=100, extra_s=0.0)
    admission = Admission(slots=64, batched_tokens=8192)
    engine.run(1000, admission.take, admission.add, admission.stepped)
    assert admission.price_steps < 0.1
    engine.extra_s = 3 * PLAIN_S
    engine.run(1000, admission.take, admission.add, admission.stepped)
    assert admission.price_steps == pytest.approx(3.0, rel=0.1)


def test_beats_letting_each_in_at_once_where_an_admission_is_dear() -> None:
    made: dict[str, Any] = {"slots": 128, "length": 120, "prompt": 100, "extra_s": 1.5 * PLAIN_S}
    at_once, _ = held(Engine(**made), 2000, hold=False)
    assert held(Engine(**made), 2000)[0] > 1.6 * at_once


def test_what_tokens_cost_is_not_waited_for() -> None:
    """Where an admission costs nothing but its tokens, bunching them saves nothing: no slot is left idle for long."""
    engine = Engine(slots=64, length=100, prompt=4000, extra_s=0.0)
    rate, admission = held(engine, 2000)
    at_once, _ = held(Engine(slots=64, length=100, prompt=4000, extra_s=0.0), 2000, hold=False)
    assert rate > 0.97 * at_once
    assert admission.price_steps < 0.1


def fed(price: float, *, slots: int = 8) -> Admission:
    """An admission that has learnt `price`: plain steps of 1 s, admissions of `price` s more, whatever their tokens."""
    admission = Admission(slots=slots, batched_tokens=100)
    for key in range(8):
        admission.add(Waiting(key, [1] * 3, 1))
        while not admission.take(1):
            admission.stepped(1.0, 1)
        admission.stepped(1.0 + price, 2)
        for _ in range(6):
            admission.stepped(1.0, 1)
    return admission


def test_steps_that_may_carry_an_admission_are_not_plain() -> None:
    admission = Admission(slots=4, batched_tokens=100, hold=False)
    assert admission.stepped(1.0, 1)
    admission.add(Waiting(0, [1] * 250, 1))
    assert len(admission.take(1)) == 1
    plain = [admission.stepped(1.0, 2) for _ in range(6)]
    assert plain == [False] * 5 + [True], "250 tokens take three steps, and two more may be under way"


def test_waits_until_idle_slots_cost_as_much() -> None:
    """A price of 2 steps, 6 running, 2 waiting: a quarter of a step is lost a step, so they wait for eight."""
    admission = fed(2.0)
    assert admission.price_steps == pytest.approx(2.0)
    admission.add(Waiting(100, [1], 1))
    assert len(admission.take(0)) == 1  # an empty batch waits for nothing
    admission.add(Waiting(101, [1], 1))
    admission.add(Waiting(102, [1], 1))
    waited = 0
    while not (taken := admission.take(6)):
        admission.stepped(1.0, 6)
        waited += 1
    assert waited == 8
    assert [r.key for r in taken] == [101, 102]


def test_until_a_price_is_known_admissions_are_steps_apart() -> None:
    admission = Admission(slots=4, batched_tokens=100)
    admission.add(Waiting(1, [1], 1))
    assert admission.take(0)
    admission.add(Waiting(2, [1], 1))
    for _ in range(FIRST_HOLD):
        assert not admission.take(1)
        admission.stepped(1.0, 1)
    assert [r.key for r in admission.take(1)] == [2]


def test_no_more_are_let_in_than_there_are_slots() -> None:
    admission = Admission(slots=4, batched_tokens=100, hold=False)
    for key in range(6):
        admission.add(Waiting(key, [1], 1))
    assert [r.key for r in admission.take(1)] == [0, 1, 2]
    assert not admission.take(4)
    assert len(admission) == 3


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["add", "drop", "step", "change"]), st.integers(0, 30)), max_size=200),
    st.booleans(),
)
def test_every_request_is_let_in_once_or_dropped(moves: list[tuple[str, int]], hold: bool) -> None:
    """Whatever comes: first come, first served; none twice; none lost; a lone batch never starves."""
    admission = Admission(slots=5, batched_tokens=10, hold=hold)
    waiting: list[int] = []
    running: list[int] = []
    key = 0
    for what, n in moves:
        if what == "add":
            admission.add(Waiting(key, [1] * (n + 1), 1))
            waiting.append(key)
            key += 1
        elif what == "drop" and waiting:
            gone = waiting.pop(n % len(waiting))
            assert admission.drop(gone)
            assert not admission.drop(gone)
        elif what == "change":
            admission.forget_cycle()
        else:
            taken = [r.key for r in admission.take(len(running))]
            assert taken == waiting[: len(taken)]
            assert taken or running or not waiting
            del waiting[: len(taken)]
            running += taken
            assert len(running) <= 5
            admission.stepped(0.001 * (1 + n), len(running))
            running = running[n % 3 :]
        assert len(admission) == len(waiting)
