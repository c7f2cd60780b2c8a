"""The judge: a valid plan broken in each way must be caught, and for the right reason."""

from collections.abc import Callable

import pytest
from fleets import BANDWIDTH, COMPUTE, MIXED, cluster, kind, problem, workload

from planner import Capabilities, Problem, violations
from planner.override import Override
from planner.plan import Placement, Plan, Stage
from planner.record import replace

FLEET = cluster(*[("compute", "a")] * 2, *[("compute", "b")] * 2, *[("bandwidth", "c")] * 3, kinds=(COMPUTE, BANDWIDTH))
TRAIN = Placement(
    role="train",
    kind="compute+bandwidth",
    devices=("d0", "d1", "d2", "d3", "d4"),
    tp=2,
    dp=2,
    pp=2,
    stages=(
        Stage(devices=("d0", "d1", "d2", "d3"), kind="compute", dp=2, tp=2, layers=20),
        Stage(devices=("d4",), kind="bandwidth", dp=1, tp=1, layers=4),
    ),
)
ROLL = (
    Placement(role="rollout", kind="bandwidth", devices=("d5",), max_running=8),
    Placement(role="rollout", kind="bandwidth", devices=("d6",)),
)
GOOD = Plan(placements=(TRAIN, *ROLL))


def with_train(**changes: object) -> Plan:
    return Plan(placements=(replace(TRAIN, **changes), *ROLL))


def with_stage(**changes: object) -> Plan:
    return with_train(stages=(replace(TRAIN.stages[0], **changes), TRAIN.stages[1]))


def with_roll(**changes: object) -> Plan:
    return Plan(placements=(TRAIN, replace(ROLL[0], **changes), ROLL[1]))


def test_the_plan_itself_is_valid() -> None:
    assert violations(GOOD, problem(FLEET)) == ()


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        (with_roll(devices=("d4",)), "used by 2"),
        (with_roll(devices=("d9",)), "not in the cluster"),
        (with_roll(devices=("d5", "d6")), "used by 2"),
        (Plan(placements=(TRAIN,)), "at least one rollout"),
        (Plan(placements=ROLL), "exactly one trainer"),
        (Plan(placements=(replace(TRAIN, stages=()), *ROLL)), "no stages"),
        (with_roll(kind="compute"), "not all of kind compute"),
        (with_roll(tp=2), "not tp 2"),
        (with_roll(dp=2), "dp 2"),
        (with_roll(max_running=10**6), "memory allow"),
        (with_roll(max_running=0), "memory allow"),
        (with_train(tp=1), "not those of its stages"),
        (with_train(pp=1), "not those of its stages"),
        (with_stage(layers=21), "not the model's 24"),
        (with_stage(dp=1), "not dp 1 x tp 2"),
        (with_stage(tp=4, dp=1), "spans machines"),
        (with_stage(devices=("d0", "d2", "d1", "d3")), "spans machines"),
        (with_stage(kind="bandwidth"), "not all of kind bandwidth"),
        (with_stage(devices=("d0", "d1", "d2")), "do not partition"),
        (with_stage(devices=("d0", "d1", "d2", "d4")), "do not partition"),
    ],
)  # fmt: skip
def test_a_broken_plan_is_caught(broken: Plan, word: str) -> None:
    assert any(word in v for v in violations(broken, problem(FLEET)))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"capabilities": Capabilities.single_device_roles()}, "exceed what it can do (1)"),
        ({"capabilities": Capabilities(train_max_kinds=1)}, "2 kind blocks"),
        ({"capabilities": Capabilities(train_max_tp=1)}, "tp 2 exceeds"),
        ({"capabilities": Capabilities(rollout_max_running=3)}, "8 running samples"),
        ({"overrides": (Override(device="d6", kind="cordon"),)}, "under cordon"),
        ({"overrides": (Override(device="d0", kind="drain"),)}, "under drain"),
        ({"overrides": (Override(device="d6", kind="pin", role="train"),)}, "pinned to train"),
        ({"overrides": (Override(device="d0", kind="pin", role="idle"),)}, "pinned to idle"),
        ({"workload": workload(prompts_per_step=1, responses_per_prompt=1)}, "dp 2 exceeds the 1 samples"),
        ({"model": replace(problem().model, heads=7, kv_heads=1)}, "tp 2 does not divide"),
        ({"model": replace(problem().model, hidden=16384, intermediate=200_000)}, "stage 0: needs"),
        ({"model": replace(problem().model, vocab=40_000_000)}, "do not fit in memory"),
    ],
)
def test_a_plan_that_the_problem_forbids_is_caught(change: dict[str, object], word: str) -> None:
    assert any(word in v for v in violations(GOOD, problem(FLEET, **change)))


def test_the_later_pin_and_any_cordon_win() -> None:
    def pinned(*said: Override) -> Problem:
        return problem(FLEET, overrides=said)

    train, roll = (Override(device="d6", kind="pin", role=r) for r in ("train", "rollout"))
    cordon = Override(device="d6", kind="cordon")
    assert violations(GOOD, pinned(train, roll)) == ()
    idle = Plan(placements=GOOD.placements[:2])
    assert violations(idle, pinned(cordon, roll)) == ()
    assert violations(idle, pinned(roll)) != ()


def test_a_pipeline_of_replicas_and_its_limits() -> None:
    plan = Plan(placements=(TRAIN, Placement(role="rollout", kind="bandwidth", devices=("d5", "d6"), pp=2)))
    assert violations(plan, problem(FLEET)) == ()
    assert any(
        "pp 2 exceeds" in v for v in violations(plan, problem(FLEET, capabilities=Capabilities(rollout_max_pp=1)))
    )


def test_a_tp_group_of_two_kinds_is_caught_even_in_one_machine() -> None:
    both = cluster(("compute", "a"), ("bandwidth", "a"), ("bandwidth", "a"), kinds=(COMPUTE, BANDWIDTH))
    stage = Stage(devices=("d0",), kind="compute", dp=1, tp=1, layers=24)
    train = Placement(role="train", kind="compute", devices=("d0",), stages=(stage,))
    good = Placement(role="rollout", kind="bandwidth", devices=("d1", "d2"), tp=2)
    assert violations(Plan(placements=(train, good)), problem(both)) == ()
    mixed = replace(stage, devices=("d0", "d1"), tp=2)
    bad = replace(train, devices=("d0", "d1"), tp=2, stages=(mixed,))
    last = Placement(role="rollout", kind="bandwidth", devices=("d2",))
    assert any("not all of kind" in v for v in violations(Plan(placements=(bad, last)), problem(both)))


def test_memory_of_a_small_card() -> None:
    small: Callable[[float], Problem] = lambda memory: problem(  # noqa: E731
        cluster(*[("compute", "a")] * 2, kinds=(kind("compute", memory=memory),))
    )
    stage = Stage(devices=("d0",), kind="compute", dp=1, tp=1, layers=24)
    train = Placement(role="train", kind="compute", devices=("d0",), stages=(stage,))
    plan = Plan(placements=(train, Placement(role="rollout", kind="compute", devices=("d1",))))
    assert violations(plan, small(80e9)) == ()
    assert [v.split(":")[0] for v in violations(plan, small(8e9))] == ["trainer stage 0"]
    assert len(violations(plan, small(1e9))) == 2


def test_empty_plan() -> None:
    assert len(violations(Plan(placements=()), problem(MIXED))) == 2
