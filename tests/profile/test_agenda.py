"""What is measured, and how long it is said to take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.record import replace
from runtime.profile.agenda import LIMIT_S, QUICK_LIMIT_S, Card, Machine, Order, OwnRun, agenda, expected_s, limit_s


def cards(*kinds: str, memory_bytes: float = 80e9) -> tuple[Card, ...]:
    return tuple(Card(uuid=f"GPU-{i}", kind=k, name=k, memory_bytes=memory_bytes) for i, k in enumerate(kinds))


MACHINES = {
    "cpu": Machine(host="h", cores=2),
    "one": Machine(host="h", cards=cards("H100"), cores=16),
    "eight": Machine(host="h", cards=cards(*["H100"] * 8), cores=128),
    "mixed": Machine(host="h", cards=cards("A100-40", "L4", "A100-40", memory_bytes=24e9), cores=32),
}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("quick", [False, True])
def test_a_node_takes_less_than_its_limit(name: str, quick: bool) -> None:
    items = agenda(MACHINES[name], Order(quick=quick))
    assert expected_s(items) < (QUICK_LIMIT_S if quick else LIMIT_S)
    assert all(i.seconds > 0 for i in items)
    if quick:
        assert expected_s(items) < expected_s(agenda(MACHINES[name], Order()))


def test_each_kind_is_measured_once_and_together_only_where_there_are_two() -> None:
    items = agenda(MACHINES["mixed"], Order())
    assert [(i.kind, i.card) for i in items if i.part == "gemm"] == [("A100-40", 0), ("L4", 1)]
    assert {i.kind for i in items if i.part in ("peer", "collectives")} == {"A100-40"}
    # 18 bytes a parameter in half of 24 GB: 0.6 b fits, 1.7 b does not.
    assert {i.model for i in items if i.part == "trainer"} == {"reference-0.6b"}
    eight = agenda(MACHINES["eight"], Order())
    assert [i.ranks for i in eight if i.part == "collectives"] == [2, 4, 8]
    assert [i.part for i in eight[-2:]] == ["engine", "trainer"], (
        "a trainer that compiles may take longer than it is said to"
    )


def test_a_cpu_is_measured_only_without_cards_and_paced_kinds_beside_it() -> None:
    assert {i.kind for i in agenda(MACHINES["one"], Order())} == {"H100"}
    both = agenda(MACHINES["cpu"], Order(paced=("fast",)))
    assert {i.kind for i in both} == {"fast", "host-cpu"}
    assert {i.kind for i in agenda(MACHINES["cpu"], Order(paced=("fast",), cpu=False))} == {"fast"}


OWN = OwnRun(model="smollm2-135m", engine="vllm-eager", params=1.35e8)


@pytest.mark.parametrize("engine", ["torch", "vllm", "vllm-eager"])
def test_a_run_comes_first_and_takes_the_place_of_the_reference_models(engine: str) -> None:
    two = Machine(host="h", cards=cards("H200", "H200"), cores=16)
    items = agenda(two, Order(run=replace(OWN, engine=engine)))
    assert [(i.part, i.kind, i.card) for i in items[:2]] == [("run_beside", "H200", 0), ("gemm", "H200", 0)]
    assert not {i.part for i in items} & {"engine", "trainer", "run_engine", "run_trainer"}
    # Trainer and engine come up within the limit of a node; what follows is left out where time runs out.
    assert expected_s(items[:1]) < LIMIT_S
    whole = agenda(MACHINES["one"], Order(run=replace(OWN, engine=engine, parts=1)))
    assert [(i.part, i.kind, i.card) for i in whole[:2]] == [("run_trainer", "H100", 0), ("run_engine", "H100", 0)]


@pytest.mark.parametrize("engine", ["torch", "vllm", "vllm-eager"])
def test_roles_on_parts_of_a_card_are_measured_beside_each_other_and_kernels_on_the_card(engine: str) -> None:
    """One card is two parts by itself. All of it takes less than a node may."""
    items = agenda(MACHINES["one"], Order(run=replace(OWN, engine=engine)))
    assert [(i.part, i.kind) for i in items if i.part.startswith("run_")] == [("run_beside", "H100 1/2")]
    assert {i.kind for i in items[1:]} == {"H100"}
    assert expected_s(items) < LIMIT_S
    eight = agenda(MACHINES["eight"], Order(run=replace(OWN, engine=engine, parts=3)))
    assert [(i.part, i.kind, i.card) for i in eight[:2]] == [("run_beside", "H100 1/3", 0), ("gemm", "H100", 0)]


def test_a_run_on_a_cpu_is_measured_as_the_kind_that_its_configuration_names() -> None:
    items = agenda(MACHINES["cpu"], Order(quick=True, run=replace(OWN, engine="torch", cpu_kind="cpu")))
    assert [(i.part, i.kind) for i in items if i.part.startswith("run_")] == [("run_beside", "cpu")]
    assert expected_s(items) < QUICK_LIMIT_S


@given(st.floats(1e7, 4e9), st.booleans())
def test_a_runs_own_model_gets_the_time_that_it_takes(params: float, quick: bool) -> None:
    """A large one is made thrice on the host and its checkpoints are written: 1.5B does not fit in three minutes."""
    two = Machine(host="h", cards=cards("H200", "H200"), cores=16)
    order = Order(quick=quick, run=replace(OWN, engine="vllm", params=params))
    items = agenda(two, order)
    if quick:
        assert limit_s(items, order) == QUICK_LIMIT_S
        assert [i.part for i in items[:2]] == ["run_trainer", "run_engine"], "the trainer alone may have the time"
        return
    assert items[0].part == "run_beside"
    assert limit_s(items, order) >= max(LIMIT_S, expected_s(items[:1]))
    assert (limit_s(items, order) > LIMIT_S) == (expected_s(items[:1]) > LIMIT_S)
    if params > 1.5e9:
        assert limit_s(items, order) > 1.5 * LIMIT_S
        assert limit_s(items, order) == expected_s(items), "the kernels are measured too"


def test_a_model_whose_optimiser_does_not_fit_is_not_trained() -> None:
    """Its engine is measured where a card is one device; a part that cannot train has no run."""
    for parts, measured in ((1, ["run_engine"]), (2, [])):
        items = agenda(MACHINES["one"], Order(run=replace(OWN, params=8e9, parts=parts)))
        assert [i.part for i in items if i.part.startswith("run_")] == measured


@given(st.sets(st.sampled_from(["gemm", "copy", "decode", "collectives", "engine"])))
def test_only_what_is_asked_for(parts: set[str]) -> None:
    items = agenda(MACHINES["eight"], Order(only=tuple(parts)))  # type: ignore[arg-type]
    assert {i.part for i in items} == parts if parts else len(items) > 5
