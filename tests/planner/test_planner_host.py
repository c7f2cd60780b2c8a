"""Host memory: what a plan takes of each machine's RAM, by hand, and what follows where it is short."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from planner.cost.assumptions import Assumptions
from planner.cost.context import context_of
from planner.cost.host import host_use, overfull, within_host_memory
from planner.cost.model import CostModel
from planner.errors import InvalidInput
from planner.judge import violations
from planner.override import Override
from planner.plan import Placement, Plan, Stage
from planner.problem import Budget, Capabilities, Problem
from planner.record import replace
from planner.solution import Feasible, Infeasible
from tests.planner.fleets import BANDWIDTH, COMPUTE, MIXED, SMALL, cluster, problem, problems

A = Assumptions()
P = SMALL.params
REPLICA = A.host_engine_bytes + A.host_replica_bytes + 2 * P
# Of 16 bytes a parameter (bf16 weights and gradients, fp32 master, two moments) all but the gradients are in a checkpoint.
TRAINER = A.host_trainer_bytes + 14 * P
QUICK = Budget(evaluations=50, mip_seconds=1.0)


def declared(p: Problem, **nodes: float) -> Problem:
    return replace(p, cluster=replace(p.cluster, host_memory_bytes=nodes))


def trainer(*devices: str, tp: int = 1) -> Placement:
    dp = len(devices) // tp
    stage = Stage(devices=devices, kind="compute", dp=dp, tp=tp, layers=SMALL.layers)
    return Placement(role="train", kind="compute", devices=devices, dp=dp, tp=tp, stages=(stage,))


def replica(*devices: str) -> Placement:
    return Placement(role="rollout", kind="bandwidth", devices=devices, tp=len(devices))


def test_by_hand() -> None:
    """A trainer of two ranks on one machine reads its checkpoint once; a replica of two devices has two processes of an
    engine and one copy of the weights, two replicas have two."""
    ctx = context_of(problem())
    one = host_use(ctx, Plan(placements=(trainer("d0", "d1"), replica("d2", "d3"))))
    assert list(one) == ["a", "b"]
    assert one["a"].total == pytest.approx(TRAINER + A.host_trainer_bytes)
    assert one["b"].total == pytest.approx(REPLICA + A.host_engine_bytes)
    two = host_use(ctx, Plan(placements=(trainer("d0"), replica("d2"), replica("d3"))))
    assert two["a"].total == pytest.approx(TRAINER)
    assert two["b"].total == pytest.approx(2 * REPLICA)
    assert two["b"].weights == 4 * P
    fsdp = context_of(problem(capabilities=Capabilities(trainer="fsdp")))
    assert host_use(fsdp, Plan(placements=(trainer("d0", "d1"), replica("d2"))))["a"].loaded == pytest.approx(14 * P)


def test_a_copy_that_is_written_beside_the_training_counts_where_it_is_more_than_what_was_loaded() -> None:
    """bf16: 12 bytes a parameter and a generation of 2 are the 14 that were loaded; fp32: 12 and 4, where 12 were loaded."""
    for width, often, seldom in ((2, 14, 14), (4, 12, 16)):
        p = problem()
        p = replace(p, model=replace(p.model, dtype_bytes=width))
        plan = Plan(placements=(trainer("d0"), replica("d2")))
        for every, expected in ((None, often), (1, often), (4, seldom)):
            ctx = context_of(replace(p, workload=replace(p.workload, checkpoint_every=every)))
            assert host_use(ctx, plan)["a"].loaded == pytest.approx(expected * P), (width, every)


def test_paced_devices_are_not_counted() -> None:
    kinds = {n: replace(k, paced=True) for n, k in MIXED.kinds.items()}
    ctx = context_of(problem(replace(MIXED, kinds=kinds)))
    assert host_use(ctx, Plan(placements=(trainer("d0"), replica("d2")))) == {}


def test_what_does_not_fit_is_no_plan_and_says_so() -> None:
    plan = Plan(placements=(trainer("d0"), replica("d2"), replica("d3")))
    enough, short = 2 * REPLICA / A.host_memory_share * 1.001, 2 * REPLICA / A.host_memory_share * 0.999
    assert CostModel(declared(problem(), b=enough)).evaluate(plan) is not None
    assert violations(plan, declared(problem(), b=enough)) == ()
    assert CostModel(declared(problem(), b=short)).evaluate(plan) is None
    (said,) = violations(plan, declared(problem(), b=short))
    assert said.startswith("machine b: needs 6.7 GB of host memory, a run may take 6.7 GB")
    with pytest.raises(InvalidInput, match="host_memory_bytes"):
        declared(problem(), b=0.0)


def test_replicas_are_left_out_until_the_rest_fits() -> None:
    p = declared(problem(), b=1.5 * REPLICA / A.host_memory_share)
    plan = Plan(placements=(trainer("d0"), replica("d2"), replica("d3")))
    kept = within_host_memory(context_of(p), plan)
    assert [r.devices for r in kept.rollouts] == [("d2",)]
    assert within_host_memory(context_of(p), plan, kept=("d3",)).rollouts == (replica("d3"),)
    assert within_host_memory(context_of(problem()), plan) is plan


def test_a_fleet_short_of_memory_gets_a_plan_that_fits_and_says_what_it_needs() -> None:
    fleet = cluster(*[("compute", "a")] * 2, *[("bandwidth", "b")] * 6, kinds=(COMPUTE, BANDWIDTH))
    roomy = problem(fleet)
    p = declared(roomy, b=3 * REPLICA / A.host_memory_share * 1.01)
    free, found = (planner.solve(x, budget=QUICK) for x in (roomy, p))
    assert isinstance(free, Feasible)
    assert isinstance(found, Feasible)
    assert violations(found.plan, p) == ()
    assert found.prediction.tokens_per_s <= free.prediction.tokens_per_s * (1 + 1e-9)
    assert found.prediction.tokens_per_s <= found.bound_tokens_per_s * (1 + 1e-9)
    (line,) = [x for x in found.explanation.lines if x.startswith("host memory needed: ")]
    assert "of 10 GB that a run may take) on b" in line
    assert "(not declared) on a" in line


def test_no_plan_for_lack_of_host_memory_has_one_reason() -> None:
    found = planner.solve(declared(problem(), a=3e9, b=3e9), budget=QUICK)
    assert isinstance(found, Infeasible)
    (why,) = found.conflicts
    assert why.limit == "host_memory"
    assert "has 3.0 GB, of which a run may take 2.7 GB; a replica on one device needs 3.4 GB" in why.detail


@settings(max_examples=30)
@given(
    problems(least=3, most=4, single=True), st.dictionaries(st.sampled_from("abc"), st.floats(4e9, 4e10), min_size=1)
)
def test_every_plan_fits_and_pinned_replicas_stay(p: Problem, nodes: dict[str, float]) -> None:
    p = declared(p, **nodes)
    last = p.cluster.devices[-1].id
    p = replace(p, overrides=(Override(device=last, kind="pin", role="rollout"),))
    found = planner.solve(p, budget=QUICK)
    if isinstance(found, Feasible):
        assert violations(found.plan, p) == ()
        assert overfull(context_of(p), found.plan) == {}
        assert found.plan.role_of(last) == "rollout"
