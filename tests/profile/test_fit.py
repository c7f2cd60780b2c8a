"""Costs of a step told apart from benches that mix them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.profile.fit import Decoded, step_cost


def bench(step_s: float, token_s: float, prefill_s: float, steps: int, running: int, prefill: int) -> Decoded:  # noqa: PLR0917
    tokens = steps * running
    busy_s = steps * step_s + tokens * token_s + prefill * prefill_s
    return Decoded(busy_s=busy_s, steps=steps, tokens=tokens, prefill_tokens=prefill)


costs = st.tuples(
    st.floats(1e-3, 0.5), st.one_of(st.just(0.0), st.floats(1e-5, 1e-2)), st.one_of(st.just(0.0), st.floats(1e-6, 1e-3))
)


@given(costs)
def test_the_costs_are_recovered(true: tuple[float, float, float]) -> None:
    benches = [
        bench(*true, 50, 8, 600),
        bench(*true, 40, 32, 1500),
        bench(*true, 30, 128, 4000),
        bench(*true, 30, 128, 40_000),
    ]
    found = step_cost(benches)
    assert (found.step_s, found.token_s, found.prefill_s) == pytest.approx(true, rel=1e-3, abs=1e-9)
    assert found.decode_tokens_per_s(16) == pytest.approx(16 / (true[0] + 16 * true[1]), rel=1e-3)


@given(
    st.lists(
        st.tuples(st.floats(0.01, 100), st.integers(1, 500), st.integers(1, 200), st.integers(0, 10**5)),
        min_size=1,
        max_size=6,
    )
)
def test_no_cost_is_negative_whatever_was_measured(rows: list[tuple[float, int, int, int]]) -> None:
    found = step_cost([Decoded(busy_s=b, steps=s, tokens=s * r, prefill_tokens=p) for b, s, r, p in rows])
    assert min(found.step_s, found.token_s, found.prefill_s) >= 0
    assert max(found.step_s, found.token_s, found.prefill_s) > 0


def test_two_benches_worked_by_hand() -> None:
    # 10 steps of 0.1 s and 1000 tokens of 1 ms: 2 s; 20 steps and 500 tokens: 2.5 s.
    found = step_cost(
        [
            Decoded(busy_s=2.0, steps=10, tokens=10, prefill_tokens=1000),
            Decoded(busy_s=2.5, steps=20, tokens=20, prefill_tokens=500),
        ]
    )
    assert found.step_s + found.token_s == pytest.approx(0.1)
    assert found.prefill_s == pytest.approx(1e-3)
