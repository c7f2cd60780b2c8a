"""The baseline schedulers: valid plans, reproducible, obedient to a stop, and not better than `hex`."""

import importlib.util
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from fleets import BANDWIDTH, COMPUTE, SMALL, cluster, kind, problem, problems, workload
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import bench_baselines
from planner import Budget, Capabilities, Feasible, Infeasible, Problem, solve, violations
from planner.bound import upper_bound
from planner.cluster import Device
from planner.columns import Columns
from planner.cost import CostModel
from planner.cost.model import Scored
from planner.errors import InvalidInput
from planner.model import load_model_spec
from planner.override import Override
from planner.plan import Plan
from planner.record import replace
from planner.schedulers import SCHEDULERS
from planner.schedulers.baselines.deap_search import _drawing_from
from planner.schedulers.baselines.genome import Genome
from planner.schedulers.baselines.uniform import Uniform, balanced_cut
from planner.search import Search
from planner.space import BlockShape
from runtime.config.load import load_config
from runtime.config.problem import cluster_from_config, problem_from_config

BASELINES = ("verl", "areal", "streamrl", "random", "deap")
SLACK = 1 + 1e-6
FEW = Budget(evaluations=150)
EVERYTHING = Budget(evaluations=10**9)
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


HAS_DEAP = importlib.util.find_spec("deap") is not None
every = pytest.mark.parametrize(
    "name",
    [
        *BASELINES[:-1],
        pytest.param("deap", marks=pytest.mark.skipif(not HAS_DEAP, reason="the extra deap is not installed")),
    ],
)


def shipped(config_name: str) -> Problem:
    config = load_config(CONFIGS / config_name).config
    return problem_from_config(config, cluster_from_config(config), load_model_spec(config.model.path))


@st.composite
def workflows(draw: st.DrawFn, most: int = 5) -> Problem:
    """Small problems of every algorithm, with overrides, several groups, co-location and single-device roles."""
    single = draw(st.integers(0, 3)) == 0
    p = draw(problems(most=most, least=0, overrides=True, single=single))
    work = replace(
        p.workload,
        algorithm=draw(st.sampled_from(["grpo", "ppo"])),
        reward=draw(st.sampled_from(["rule", "model"])),
        reference_model=draw(st.booleans()),
    )
    if single:  # the bound of single-device roles is for one group that shares no device
        return replace(p, workload=work)
    caps = replace(p.capabilities, task_groups=draw(st.integers(1, 2)), colocate=draw(st.booleans()))
    return replace(p, workload=work, capabilities=caps)


def in_plan_space(p: Problem, plan: Plan) -> bool:
    """Whether the trainer's layers lie as the plan space has them, in proportion to compute. `verl`, `areal` and
    `streamrl` give every device the same work where kinds are mixed, which bound and oracle do not look at."""
    columns = Columns(CostModel(p))
    for side in plan.sides:
        blocks: list[BlockShape] = []
        for s in side.stages:
            if blocks and (blocks[-1].kind, blocks[-1].tp, blocks[-1].dp) == (s.kind, s.tp, s.dp):
                blocks[-1] = replace(blocks[-1], pp=blocks[-1].pp + 1)
            else:
                blocks.append(BlockShape(kind=s.kind, tp=s.tp, dp=s.dp, pp=1))
        if columns.split(blocks, side.tasks) != tuple(s.layers for s in side.stages):
            return False
    return True


@every
@settings(max_examples=12)
@given(p=workflows())
def test_plans_are_valid_told_truly_and_below_the_bound(name: str, p: Problem) -> None:
    found = solve(p, scheduler=name, budget=FEW)
    cost = CostModel(p)
    bound = upper_bound(cost)
    if isinstance(found, Infeasible):
        assert found.conflicts or bound is not None
        return
    assert violations(found.plan, p) == ()
    scored = cost.evaluate(found.plan)
    assert scored is not None
    assert scored.prediction.step_s == pytest.approx(found.prediction.step_s, rel=1e-9)
    assert bound is not None
    if in_plan_space(p, found.plan):
        assert found.prediction.tokens_per_s <= bound.tokens_per_s * SLACK
    for o in p.overrides:
        assert found.plan.role_of(o.device) == (o.role if o.kind == "pin" else "idle")


@every
@settings(max_examples=6)
@given(p=workflows())
def test_the_same_seed_gets_the_same_plan_and_no_global_state_is_touched(name: str, p: Problem) -> None:
    random.seed(1)
    first, state = solve(p, scheduler=name, budget=FEW), random.getstate()
    random.seed(2)
    assert solve(p, scheduler=name, budget=FEW) == first
    random.seed(1)
    assert random.getstate() == state


@every
@settings(max_examples=10)
@given(p=workflows(), after=st.integers(0, 6))
def test_a_stop_at_any_moment_returns_the_best_so_far(name: str, p: Problem, after: int) -> None:
    shown: list[Feasible] = []
    asked = iter(range(10**9))
    found = solve(p, scheduler=name, budget=FEW, should_stop=lambda: next(asked) >= after, on_incumbent=shown.append)
    if isinstance(found, Infeasible):
        assert not shown
        return
    assert violations(found.plan, p) == ()
    assert found.plan == shown[-1].plan


@every
@settings(max_examples=12)
@given(p=problems(most=5, overrides=True))
def test_no_baseline_is_better_than_hex_in_async_grpo(name: str, p: Problem) -> None:
    p = replace(p, workload=replace(p.workload, mode="async", eta=max(1, p.workload.eta)))
    found, ours = solve(p, scheduler=name, budget=FEW), solve(p, scheduler="hex")
    if isinstance(found, Infeasible) or not in_plan_space(p, found.plan):
        return
    assert isinstance(ours, Feasible)
    assert ours.prediction.step_s <= found.prediction.step_s * SLACK


@every
@settings(max_examples=4)
@given(p=workflows(most=4))
def test_no_baseline_is_better_than_brute_force(name: str, p: Problem) -> None:
    best = solve(p, scheduler="exhaustive", budget=EVERYTHING)
    found = solve(p, scheduler=name, budget=FEW)
    if isinstance(found, Infeasible) or not in_plan_space(p, found.plan):
        return
    assert isinstance(best, Feasible)
    assert best.prediction.step_s <= found.prediction.step_s * SLACK


@every
def test_on_the_published_fleet_plans_are_valid_and_hex_is_not_beaten(name: str) -> None:
    p = shipped("areal-hex-24.toml")
    found, again, ours = (solve(p, scheduler=s, budget=FEW) for s in (name, name, "hex"))
    assert isinstance(found, Feasible)
    assert isinstance(ours, Feasible)
    assert again == found
    assert violations(found.plan, p) == ()
    assert found.prediction.tokens_per_s <= ours.prediction.tokens_per_s * SLACK
    assert found.prediction.tokens_per_s <= found.bound_tokens_per_s * SLACK


# What each models.

FLEET = cluster(*[("compute", "a")] * 4, *[("bandwidth", "b")] * 4, kinds=(COMPUTE, BANDWIDTH))


def best(p: Problem, scheduler: str) -> Feasible:
    found = solve(p, scheduler=scheduler)
    assert isinstance(found, Feasible)
    return found


def test_verl_shares_every_device_where_generation_may_take_turns() -> None:
    p = problem(FLEET, workload=workload(mode="sync"), capabilities=Capabilities(colocate=True))
    plan = best(p, "verl").plan
    ids = {d.id for d in FLEET.devices}
    train = plan.train
    assert train is not None
    assert set(train.devices) == ids
    assert {d for r in plan.rollouts for d in r.devices} == ids
    assert len({r.tp for r in plan.rollouts}) == 1
    # Each device has the same number of layers, whatever its kind.
    assert {s.layers * len(train.devices) for s in train.stages} == {24 * s.dp * s.tp for s in train.stages}


def test_verl_is_cut_once_elsewhere() -> None:
    plan = best(problem(FLEET), "verl").plan
    train = plan.train
    assert train is not None
    assert not {d for r in plan.rollouts for d in r.devices} & set(train.devices)
    assert len({r.tp for r in plan.rollouts}) == 1
    assert [d.id for d in FLEET.devices if d.id in train.devices] == [f"d{i}" for i in range(len(train.devices))]


def test_areal_trains_on_the_last_quarter_whatever_its_kind() -> None:
    plan = best(problem(FLEET), "areal").plan
    train = plan.train
    assert train is not None
    assert len(train.devices) == 2
    assert set(train.devices) <= {"d4", "d5", "d6", "d7"}  # the machine listed last; its devices are interchangeable
    assert len({d for r in plan.rollouts for d in r.devices}) == 6


def test_a_rule_without_a_plan_offers_nothing() -> None:
    """Cards too small for the weights, however they are split. `solve` would look for a plan made otherwise."""
    tiny = kind("tiny", memory=1e9)
    search = Search(CostModel(problem(cluster(*[("tiny", "a")] * 4, kinds=(tiny,)))), FEW)
    for name in BASELINES[:-1]:
        SCHEDULERS[name](search)
    assert search.best is None


def test_areal_gives_training_more_where_a_quarter_is_too_small() -> None:
    small = kind("small", memory=5e9)
    p = problem(cluster(*[("small", "a")] * 8, kinds=(small,)))
    plan = best(p, "areal").plan
    assert plan.train is not None
    assert len(plan.train.devices) > 2


def test_streamrl_keeps_each_group_in_one_region() -> None:
    devices = tuple(Device(id=f"d{i}", kind="compute", node=f"n{i // 2}", region=f"r{i // 4}") for i in range(8))
    fleet = replace(FLEET, devices=devices, kinds={"compute": COMPUTE})
    plan = best(problem(fleet), "streamrl").plan
    region = {d.id: d.region for d in devices}
    assert plan.train is not None
    assert len({region[d] for d in plan.train.devices}) == 1
    assert len({region[d] for r in plan.rollouts for d in r.devices}) == 1


def test_streamrl_trains_on_compute_and_generates_on_bandwidth() -> None:
    backwards = cluster(*[("bandwidth", "b")] * 4, *[("compute", "a")] * 4, kinds=(COMPUTE, BANDWIDTH))
    plan = best(problem(backwards), "streamrl").plan
    assert plan.train is not None
    assert plan.train.stages[0].kind == "compute"


def test_balanced_cut_finds_the_balance() -> None:
    """Training takes 100 / n, generation 100 / (32 - n): equal at 16."""
    seen: dict[int, float] = {}

    def plan(n: int) -> Scored | None:
        seen[n] = max(100 / n, 100 / (32 - n))
        return SimpleNamespace(prediction=SimpleNamespace(train_s=100 / n, rollout_s=100 / (32 - n)))  # type: ignore[return-value]

    balanced_cut(1, 31, plan)
    assert min(seen, key=seen.__getitem__) == 16
    assert len(seen) <= 10


@settings(max_examples=15)
@given(p=workflows(), rng=st.randoms(use_true_random=False))
def test_genes_decode_to_plans_that_only_overrides_or_memory_can_refuse(p: Problem, rng: random.Random) -> None:
    genome = Genome(Search(CostModel(p), FEW))
    for _ in range(10):
        plan = genome.decode([rng.randint(0, n) for n in genome.highest])
        for said in violations(plan, p) if plan is not None else ():
            assert any(w in said for w in ("pinned", "needs", "do not fit", "fewer layers", "allow")), said


def test_genes_reach_every_role_and_group() -> None:
    p = problem(FLEET, workload=workload(algorithm="ppo"), capabilities=Capabilities(task_groups=2))
    genome, rng = Genome(Search(CostModel(p), FEW)), random.Random(0)
    plans = [x for _ in range(300) if (x := genome.decode([rng.randint(0, n) for n in genome.highest])) is not None]
    assert {len(x.sides) for x in plans} == {1, 2}
    assert {x.role_of(d.id) for x in plans for d in FLEET.devices} == {"train", "rollout", "score", "idle"}
    assert {len(s.stages) for x in plans for s in x.sides} >= {1, 2, 3}


@pytest.mark.parametrize(
    "name", ["random", pytest.param("deap", marks=pytest.mark.skipif(not HAS_DEAP, reason="no deap"))]
)
def test_another_seed_draws_other_plans(name: str) -> None:
    few = Budget(evaluations=30)
    plans = [solve(problem(FLEET, seed=s), scheduler=name, budget=few) for s in range(4)]
    assert any(p != plans[0] for p in plans)


@every
def test_the_budget_is_kept(name: str) -> None:
    found = solve(problem(FLEET), scheduler=name, budget=Budget(evaluations=45))
    assert isinstance(found, Feasible)
    assert found.evaluations <= 45


@every
@pytest.mark.parametrize("devices", [0, 1])
def test_a_fleet_too_small_is_infeasible(name: str, devices: int) -> None:
    p = problem(cluster(*[("compute", "a")] * devices, kinds=(COMPUTE,)))
    assert isinstance(solve(p, scheduler=name, budget=FEW), Infeasible)
    search = Search(CostModel(p), FEW)
    SCHEDULERS[name](search)
    assert search.best is None


@every
def test_pins_and_cordons_are_kept(name: str) -> None:
    said = (
        Override(device="d7", kind="pin", role="train"),
        Override(device="d0", kind="pin", role="rollout"),
        Override(device="d1", kind="cordon"),
        Override(device="d2", kind="pin", role="idle"),
    )
    found = solve(problem(FLEET, overrides=said), scheduler=name, budget=Budget(evaluations=600))
    assert isinstance(found, Feasible)
    assert [found.plan.role_of(d) for d in ("d7", "d0", "d1", "d2")] == ["train", "rollout", "idle", "idle"]


def test_without_the_library_deap_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deap", None)
    with pytest.raises(InvalidInput, match=r'pip install "hexctl\[deap\]"'):
        solve(problem(FLEET), scheduler="deap")


def test_deap_operators_draw_from_the_generator_given() -> None:
    tools = pytest.importorskip("deap.tools", reason="the extra deap is not installed")

    def drawn(seed: int) -> list[int]:
        mutate: Callable[..., tuple[list[int]]] = _drawing_from(random.Random(seed), tools.mutUniformInt)
        return mutate([0] * 8, low=0, up=[9] * 8, indpb=1.0)[0]

    rng = random.Random(5)
    assert drawn(5) == [(rng.random(), rng.randint(0, 9))[1] for _ in range(8)]
    assert drawn(5) == drawn(5) != drawn(6)


def test_the_benchmark_runs_on_three_fleets(tmp_path: Path) -> None:
    found = bench_baselines.run(3, evaluations=20, to=tmp_path / "out.json", gpus=8)
    report = json.loads((tmp_path / "out.json").read_text())
    assert len(report["fleets"]) == 3
    assert set(report["efficiency"]) >= {"hex", "areal-hex", "verl", "areal", "streamrl", "random"}
    for points in report["efficiency"].values():
        rates = [rate for *_, rate in points]
        assert rates == sorted(rates)
    assert found["hex_over_areal.fleets"] + found["hex_over_areal.no_plan"] == 3
    assert (tmp_path / "out.svg").read_text().startswith("<svg")


def test_every_baseline_is_registered() -> None:
    assert set(BASELINES) <= set(SCHEDULERS)


def test_uniform_counts_every_device_once() -> None:
    uniform = Uniform(Search(CostModel(problem(FLEET)), FEW))
    pools = uniform.cut(uniform.order, 3)
    assert sum(pools.train) == 3
    assert [a + b for a, b in zip(pools.train, pools.rollout, strict=True)] == [c.size for c in uniform.classes]
    assert SMALL.layers == 24
