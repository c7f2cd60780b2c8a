"""Plans for devices that are slower than their kind: what a plan is worth on them by hand, and what is planned for them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from planner.catalogue import CATALOGUE
from planner.cluster import Cluster, Device, Link
from planner.errors import InvalidInput
from planner.judge import violations
from planner.model import ModelSpec
from planner.override import Override
from planner.plan import Placement, Plan, Prediction
from planner.problem import Budget, Capabilities, Problem
from planner.record import replace
from planner.slowed import scored, slowed, with_kinds_of_their_own
from planner.solution import Feasible
from planner.workload import Lengths, Workload

QUICK = Budget(evaluations=40, mip_seconds=1.0)
MODEL = ModelSpec(
    name="half-billion",
    hidden=896,
    intermediate=4864,
    layers=24,
    heads=14,
    kv_heads=2,
    head_dim=64,
    vocab=151936,
    tied=True,
)
PROBLEM = Problem(
    cluster=Cluster(
        kinds={"H800": CATALOGUE["H800"], "H20": CATALOGUE["H20"]},
        devices=tuple(
            Device(id=f"{n}{i}", kind="H800" if n == "a" else "H20", node=n, index=i) for n in "ab" for i in range(4)
        ),
        same_kind=Link(latency_s=1e-5, bytes_per_s=5e9),
        cross_kind=Link(latency_s=1e-4, bytes_per_s=1.5e9),
    ),
    model=MODEL,
    workload=Workload(
        prompts_per_step=64,
        responses_per_prompt=8,
        prompt=Lengths(mean_tokens=100, max_tokens=200),
        response=Lengths(mean_tokens=400, cv=0.6, max_tokens=2000),
        eta=4,
    ),
    capabilities=Capabilities(train_max_kinds=1, train_max_pp=1),
)


def solve(problem: Problem) -> Feasible:
    found = planner.solve(problem, budget=QUICK)
    assert isinstance(found, Feasible)
    return found


@pytest.fixture(scope="module")
def plain() -> Feasible:
    return solve(PROBLEM)


def plan_of(**rates: float) -> Plan:
    """A trainer on devices t0 and t1, replicas of these rates on the devices named."""
    replicas = tuple(Placement(role="rollout", kind="k", devices=(d,), rate_tokens_per_s=r) for d, r in rates.items())
    return Plan(placements=(Placement(role="train", kind="k", devices=("t0", "t1"), dp=2), *replicas))


PREDICTED = Prediction(
    step_s=10.0, train_s=10.0, rollout_s=6.0, update_s=0.0, tokens_per_s=100.0, usd_per_h=None, usd_per_mtok=None
)


@pytest.mark.parametrize(
    ("speeds", "synchronous", "expected"),
    [
        ({}, False, 100.0),
        ({"t1": 0.5}, False, 50.0),  # the trainer waits for its slowest device: 20 s
        ({"a": 0.5}, False, 100.0),  # 6 s x 4 / (1 + 3 / 2): 9.6 s, below the trainer's 10
        ({"a": 0.1}, False, 100.0 * 10 / 18.461538),  # 6 s x 4 / 1.3 = 18.46 s
        ({"t0": 0.8, "t1": 0.5}, True, 100.0 * 16 / 26),  # 20 + 6 s
    ],
)
def test_a_plan_on_slow_devices_by_hand(speeds: dict[str, float], synchronous: bool, expected: float) -> None:
    plan = plan_of(a=30.0, b=10.0)
    assert slowed(plan, PREDICTED, speeds, synchronous=synchronous).prediction.tokens_per_s == pytest.approx(expected)


def test_replicas_that_must_do_as_much_wait_for_the_slowest() -> None:
    plan = replace(plan_of(a=30.0, b=10.0), even_shares=True)
    told = slowed(plan, PREDICTED, {"b": 0.25}, synchronous=True)
    assert told.prediction.rollout_s == pytest.approx(24.0)


def test_a_slow_plan_says_slow_rates_and_gives_slow_replicas_less() -> None:
    plan = plan_of(a=30.0, b=10.0)
    halves = replace(
        plan, placements=tuple(replace(p, share=0.5) if p.role == "rollout" else p for p in plan.placements)
    )
    told = slowed(halves, PREDICTED, {"a": 0.5}, synchronous=False).plan
    assert [p.rate_tokens_per_s for p in told.rollouts] == [15.0, 10.0]
    assert [p.share for p in told.rollouts] == [pytest.approx(1 / 3), pytest.approx(2 / 3)]


def test_a_trainer_does_not_wait_for_a_slow_device(plain: Feasible) -> None:
    assert plain.plan.train is not None
    slow = plain.plan.train.devices[0]
    asked = replace(PROBLEM, speeds={slow: 0.3}, in_force=plain.plan)
    found = solve(asked)
    stays = scored(asked, plain.plan)
    assert stays is not None
    assert found.prediction.tokens_per_s > 1.2 * stays.prediction.tokens_per_s
    assert not violations(found.plan, replace(asked, speeds={}))
    kinds = {d.id: d.kind for d in PROBLEM.cluster.devices}
    assert all(p.kind == "+".join(dict.fromkeys(kinds[d] for d in p.devices)) for p in found.plan.rollouts)
    again = scored(asked, found.plan)
    assert again is not None
    assert again.prediction.tokens_per_s == pytest.approx(found.prediction.tokens_per_s)


@pytest.mark.parametrize("device", [d.id for d in PROBLEM.cluster.devices])
def test_a_device_hardly_slower_changes_hardly_anything(plain: Feasible, device: str) -> None:
    """A slow part of a kind keeps its curves and links: nothing but its speed is another."""
    told = scored(replace(PROBLEM, speeds={device: 1 - 1e-6}), plain.plan)
    assert told is not None
    assert told.prediction.rollout_s == pytest.approx(plain.prediction.rollout_s, rel=1e-4)
    assert told.prediction.step_s == pytest.approx(plain.prediction.step_s, rel=1e-4)
    assert told.prediction.update_s == plain.prediction.update_s


def test_what_an_update_costs_a_slow_replica_is_as_long_as_before(plain: Feasible) -> None:
    """All replicas at half their speed: twice the seconds of decoding and of the prefixes, the same of the transfer."""
    generates = {d for p in plain.plan.rollouts for d in p.devices}
    told = scored(replace(PROBLEM, speeds=dict.fromkeys(generates, 0.5)), plain.plan)
    assert told is not None
    before, after = plain.prediction, told.prediction
    assert after.update_s == before.update_s
    assert after.rollout_s == pytest.approx(2 * before.rollout_s - before.update_s, rel=1e-6)
    rates = zip(plain.plan.rollouts, told.plan.rollouts, strict=True)
    assert all(b.rate_tokens_per_s == pytest.approx((a.rate_tokens_per_s or 0.0) / 2) for a, b in rates)


def test_slow_machines_of_a_kind_are_joined_as_before() -> None:
    found, _ = with_kinds_of_their_own(PROBLEM, {"b1": 0.5})
    there = {d.id: d for d in found.cluster.devices}
    far = replace(there["b2"], id="c0", node="c")
    assert found.cluster.link(there["b1"], far) == found.cluster.same_kind
    assert found.cluster.link(there["b1"], there["a0"]) == found.cluster.cross_kind
    assert [found.cluster.kinds[d.kind].base for d in found.cluster.devices] == ["H800"] * 4 + ["H20"] * 4


@pytest.mark.parametrize("kind", ["pin", "cordon"])
def test_an_operators_word_on_a_slow_device_stands(plain: Feasible, kind: str) -> None:
    assert plain.plan.train is not None
    slow = plain.plan.train.devices[0]
    word = Override(device=slow, kind=kind, role="train" if kind == "pin" else None)  # type: ignore[arg-type]
    found = solve(replace(PROBLEM, speeds={slow: 0.3}, overrides=(word,), in_force=plain.plan))
    assert found.plan.role_of(slow) == ("train" if kind == "pin" else "idle")


def test_a_frozen_trainer_stays_however_slow(plain: Feasible) -> None:
    assert plain.plan.train is not None
    slow = plain.plan.train.devices[0]
    word = Override(device=slow, kind="freeze")
    found = solve(replace(PROBLEM, speeds={slow: 0.3}, overrides=(word,), in_force=plain.plan))
    assert found.plan.train is not None
    assert found.plan.train.devices == plain.plan.train.devices


def test_a_move_that_costs_too_much_is_not_planned(plain: Feasible) -> None:
    assert plain.plan.train is not None
    asked = replace(PROBLEM, speeds={plain.plan.train.devices[0]: 0.9}, in_force=plain.plan)
    dear = solve(replace(asked, switch_s=3600.0, switch_horizon_s=600.0))
    assert {p.devices for p in dear.plan.placements} == {p.devices for p in plain.plan.placements}


def test_slow_devices_are_kinds_of_their_own_with_their_share_of_both_efficiencies() -> None:
    found, names = with_kinds_of_their_own(PROBLEM, {"a0": 0.52, "b1": 0.5})
    assert names == {"H800 at 0.50": "H800", "H20 at 0.50": "H20"}
    slow, whole = found.cluster.kinds["H800 at 0.50"], found.cluster.kinds["H800"]
    assert (slow.rollout_efficiency, slow.train_efficiency) == (
        whole.rollout_efficiency / 2,
        whole.train_efficiency / 2,
    )
    assert {d.id for d in found.cluster.devices if d.kind in names} == {"a0", "b1"}


def test_speeds_are_shares_and_strangers_count_for_nothing(plain: Feasible) -> None:
    with pytest.raises(InvalidInput, match="no share"):
        replace(PROBLEM, speeds={"a0": 1.5})
    assert solve(replace(PROBLEM, speeds={"gone": 0.5, "a0": 1.0})) == plain


@settings(max_examples=8, deadline=None)
@given(st.dictionaries(st.sampled_from([d.id for d in PROBLEM.cluster.devices]), st.floats(0.1, 0.95), max_size=4))
def test_the_answer_is_valid_within_its_bound_and_no_worse_than_staying(
    plain: Feasible, speeds: dict[str, float]
) -> None:
    asked = replace(PROBLEM, speeds=speeds, in_force=plain.plan)
    found, stays = solve(asked), scored(asked, plain.plan)
    assert stays is not None
    assert not violations(found.plan, replace(asked, speeds={}))
    assert found.prediction.tokens_per_s <= plain.bound_tokens_per_s * (1 + 1e-9)
    assert found.prediction.tokens_per_s >= stays.prediction.tokens_per_s * (1 - 1e-6)
