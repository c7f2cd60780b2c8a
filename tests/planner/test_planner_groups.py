"""`hex` on workflows of several tasks: against brute force, and its bound."""

import pytest
from fleets import LINK, cluster, kind, problem, problems, workload, workloads
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import Budget, Capabilities, Feasible, Infeasible, Problem, solve, violations
from planner.bound import upper_bound
from planner.cluster import Link
from planner.cost import CostModel
from planner.override import Override
from planner.record import replace
from planner.workload import Lengths

SLACK = 1 + 1e-6
EVERYTHING = Budget(evaluations=10**9)


@st.composite
def workflows(draw: st.DrawFn, *, most: int = 4, modes: tuple[str, ...] = ("async", "sync")) -> Problem:
    """Several tasks, or generation that may share devices."""
    p = draw(problems(most=most, overrides=draw(st.booleans())))
    w = replace(
        draw(workloads()),
        mode=draw(st.sampled_from(modes)),
        algorithm=draw(st.sampled_from(["grpo", "ppo"])),
        reference_model=draw(st.booleans()),
        reward=draw(st.sampled_from(["rule", "model"])),
    )
    caps = Capabilities(
        task_groups=draw(st.sampled_from([1, 2])),
        colocate=draw(st.booleans()),
        train_max_pp=2,
        train_max_kinds=draw(st.sampled_from([1, 2])),
        trainer=draw(st.sampled_from(["replicated", "fsdp"])),
    )
    if caps.task_groups == 2 and len(p.cluster.devices) > 3:  # brute force takes half a minute there
        kept = p.cluster.devices[:3]
        ids = {d.id for d in kept}
        p = replace(
            p, cluster=replace(p.cluster, devices=kept), overrides=tuple(o for o in p.overrides if o.device in ids)
        )
    if caps.task_groups == 2 and caps.colocate:
        w = replace(w, reward="rule")  # for the same reason
    return replace(p, workload=w, capabilities=caps)


def compared(p: Problem) -> None:
    best, found = solve(p, scheduler="exhaustive", budget=EVERYTHING), solve(p, scheduler="hex")
    assert isinstance(best, Feasible) == isinstance(found, Feasible)
    if isinstance(best, Feasible) and isinstance(found, Feasible):
        assert violations(found.plan, p) == ()
        bound = upper_bound(CostModel(p))  # a solution never shows one that its own plan beats
        assert bound is not None
        assert bound.step_s <= best.prediction.step_s * SLACK
        assert found.prediction.step_s == pytest.approx(best.prediction.step_s, rel=1e-6)
    else:
        assert isinstance(found, Infeasible)


@settings(max_examples=10)
@given(workflows(modes=("async",)))
def test_hex_finds_the_optimum_of_workflows_of_several_tasks(p: Problem) -> None:
    compared(p)


@settings(max_examples=10)
@given(workflows(modes=("sync",)))
def test_hex_finds_the_optimum_where_tasks_take_turns(p: Problem) -> None:
    compared(p)


def said(device: str, role: str) -> Override:
    return Override(device=device, kind="pin", role=role)  # type: ignore[arg-type]


@settings(max_examples=10)
@given(
    workflows(most=3, modes=("sync",)),
    st.lists(st.sampled_from(["", "train", "rollout", "idle"]), min_size=3, max_size=3),
)
def test_pins_are_kept_where_two_groups_share_devices_with_replicas(p: Problem, roles: list[str]) -> None:
    pins = tuple(said(d.id, r) for d, r in zip(p.cluster.devices, roles, strict=False) if r)
    w = replace(p.workload, reward="rule")
    compared(replace(p, workload=w, overrides=pins, capabilities=replace(p.capabilities, task_groups=2, colocate=True)))


def test_a_device_pinned_to_train_does_not_score_alone() -> None:
    """Without the pin the small card, which generates faster, scores between its turns and leaves training to the large one. A
    group of scoring tasks has not the role "train"."""
    large, small = kind("large", tflops=989, hbm=3e11), kind("small", tflops=989, hbm=1e12, memory=12e9)
    lengths = Lengths(mean_tokens=1500, cv=0.8, max_tokens=6000)
    sizes = {"prompts_per_step": 8, "responses_per_prompt": 2, "response": lengths}
    w = workload(mode="sync", algorithm="ppo", reference_model=True, update_mode="overlapped", **sizes)
    p = problem(
        cluster(("large", "a"), ("small", "c"), kinds=(large, small), cross=LINK),
        workload=w,
        capabilities=Capabilities(task_groups=2, colocate=True, train_max_pp=2),
    )
    free = solve(p, scheduler="exhaustive", budget=EVERYTHING)
    assert isinstance(free, Feasible)
    assert free.plan.role_of("d1") == "score"
    compared(replace(p, overrides=(said("d1", "train"),)))


@settings(max_examples=10)
@given(workflows(most=3), st.lists(st.sampled_from(["x", "y"]), min_size=3, max_size=3), st.sampled_from([1e8, 1e9]))
def test_no_plan_over_two_regions_beats_the_bound(p: Problem, where: list[str], rate: float) -> None:
    """A group that no region holds crosses a border; brute force lays it out every way."""
    region = dict(zip("abc", where, strict=True))
    devices = tuple(replace(d, region=region[d.node]) for d in p.cluster.devices)
    links = {("x", "y"): Link(latency_s=0.02, bytes_per_s=rate)}
    p = replace(p, cluster=replace(p.cluster, devices=devices, regions=links))
    best, found = solve(p, scheduler="exhaustive", budget=EVERYTHING), solve(p, scheduler="hex")
    assert isinstance(best, Feasible) == isinstance(found, Feasible)
    if isinstance(best, Feasible) and isinstance(found, Feasible):
        bound = upper_bound(CostModel(p))
        assert bound is not None
        assert bound.step_s <= best.prediction.step_s * SLACK
        assert found.prediction.step_s == pytest.approx(best.prediction.step_s, rel=1e-6)
