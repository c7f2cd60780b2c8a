"""The order of leaving against brute force over all permutations."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from runtime.core.order import Mover, find_order
from runtime.core.target import Wish


def replica(unit: str, *devices: str) -> Mover:
    return Mover(unit=unit, devices=devices, serves=True)


def keeps_floor(order: tuple[Mover, ...], wishes: list[Wish], serving: int, floor: int) -> bool:
    """Carry the order out one leave at a time; what can start after a leave does and serves."""
    here = list(order)
    started: set[int] = set()
    base = serving - sum(m.serves for m in order)

    def serves() -> int:
        held = {d for m in here for d in m.devices}
        started.update(i for i, w in enumerate(wishes) if not held & set(w.devices))
        return base + sum(m.serves for m in here) + sum(1 for i in started if wishes[i].role == "rollout")

    for m in order:
        if m.serves and serves() - 1 < floor:
            return False
        here.remove(m)
    return True


@st.composite
def moves(draw: st.DrawFn) -> tuple[list[Mover], list[Wish], int]:
    """Movers on disjoint devices, wishes on disjoint devices of the same pool and two free ones."""
    count = draw(st.integers(1, 6))
    devices = [f"d{i}" for i in range(count)]
    cuts = sorted(draw(st.sets(st.integers(1, max(1, count - 1)), max_size=count)))
    blocks = [devices[a:b] for a, b in zip([0, *cuts], [*cuts, count], strict=True) if devices[a:b]]
    trainer = draw(st.integers(0, len(blocks)))
    movers = [Mover(unit=f"u{i}", devices=tuple(b), serves=i != trainer) for i, b in enumerate(blocks)]
    pool = draw(st.permutations([*devices, "x", "y"]))
    size = draw(st.integers(1, 3))
    groups = [tuple(pool[i : i + size]) for i in range(0, len(pool) - size + 1, size)]
    kept = groups[: draw(st.integers(0, len(groups)))]
    wishes = [Wish(role="train" if i == 0 else "rollout", devices=g) for i, g in enumerate(kept)]
    others = draw(st.integers(0, 1))
    return movers, wishes, others + sum(m.serves for m in movers)


@given(moves(), st.integers(0, 2))
def test_found_exactly_when_some_permutation_keeps_the_floor(
    case: tuple[list[Mover], list[Wish], int], floor: int
) -> None:
    movers, wishes, serving = case
    found = find_order(movers, wishes, serving, floor)
    possible = any(keeps_floor(p, wishes, serving, floor) for p in itertools.permutations(movers))
    assert (found is not None) == possible
    if found is not None:
        assert sorted(m.unit for m in found) == sorted(m.unit for m in movers)
        assert keeps_floor(found, wishes, serving, floor)


def test_greedy_would_stick_where_another_order_goes() -> None:
    # Two replicas of two devices become three of one; leaving r0 first frees only what the trainer takes.
    movers = [replica("r0", "a", "b"), replica("r1", "c", "d")]
    wishes = [
        Wish(role="train", devices=("a",)),
        Wish(role="rollout", devices=("b",)),
        Wish(role="rollout", devices=("c",)),
    ]
    assert find_order(movers, wishes, 2, 1) is not None
    only = [replica("r0", "a", "b")]
    assert find_order(only, [Wish(role="rollout", devices=("a",))], 1, 1) is None


def test_a_thousand_movers_are_ordered_without_deep_search() -> None:
    movers = [replica(f"r{i}", f"d{i}") for i in range(512)]
    order = find_order(movers, [], 513, 1)
    assert order is not None
    assert len(order) == 512
