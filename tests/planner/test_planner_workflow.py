"""The workflow: which tasks there are, how their times compose, what co-located models take, and what the judge allows."""

import itertools

import pytest
from fleets import BANDWIDTH, COMPUTE, SMALL, cluster, kind, problem, workload

from planner import Budget, Capabilities, Feasible, Problem, solve, violations
from planner.cost import CostModel
from planner.cost.context import context_of
from planner.cost.decode import ReplicaShape
from planner.cost.memory import layers_of, task_state_bytes
from planner.plan import Placement, Plan, Stage, Task
from planner.record import replace
from planner.workflow import dependencies, groupings, phi, side_tasks

PPO = workload(algorithm="ppo", reward="model", reference_model=True, proximal_forward=True)
FLEET = cluster(*[("compute", "a")] * 3, ("bandwidth", "b"), ("bandwidth", "b"), kinds=(COMPUTE, BANDWIDTH))
ALL: tuple[Task, ...] = ("reward", "reference", "critic_values", "critic_training", "actor_training")


def group(*tasks: Task, on: str, role: str = "train") -> Placement:
    stage = Stage(devices=(on,), kind="compute", dp=1, tp=1, layers=24)
    return Placement(role=role, kind="compute", devices=(on,), stages=(stage,), tasks=tasks)  # type: ignore[arg-type]


ROLL = Placement(role="rollout", kind="bandwidth", devices=("d3",))


def test_the_tasks_of_ppo_and_grpo() -> None:
    assert side_tasks(PPO) == ALL
    assert side_tasks(workload()) == ("actor_training",)
    assert side_tasks(workload(reference_model=True, reward="model")) == ("reward", "reference", "actor_training")


def test_the_task_graph_scores_before_it_trains() -> None:
    graph = dependencies(PPO)
    assert graph["generation"] == ()
    assert set(graph["actor_training"]) == {"reward", "reference", "critic_values", "proximal"}
    assert set(graph["critic_training"]) == {"reward", "reference", "critic_values"}
    assert dependencies(workload())["actor_training"] == ("generation",)


@pytest.mark.parametrize(("tasks", "most", "ways"), [(5, 5, 52), (5, 2, 16), (5, 1, 1), (3, 3, 5), (1, 3, 1)])
def test_groupings_are_all_set_partitions_of_at_most_so_many_parts(tasks: int, most: int, ways: int) -> None:
    """Bell(5) = 52; with generation beside them the published count for six tasks, Bell(6) = 203, is the sum over the
    tasks that may join generation."""
    found = groupings(ALL[-tasks:], most)
    assert len(found) == ways
    assert len({frozenset(frozenset(g) for g in way) for way in found}) == ways
    for way in found:
        assert sorted(itertools.chain(*way)) == sorted(ALL[-tasks:])
        assert "actor_training" in way[0]


def test_groups_apart_overlap_and_tasks_of_a_group_add_up() -> None:
    p = problem(FLEET, workload=PPO, capabilities=Capabilities(task_groups=2))
    cost = CostModel(p)
    together = cost.evaluate(Plan(placements=(group(on="d0"), ROLL)))
    actor: tuple[Task, ...] = ("reference", "actor_training")
    critic: tuple[Task, ...] = ("reward", "critic_values", "critic_training")
    apart = cost.evaluate(Plan(placements=(group(*actor, on="d0"), group(*critic, on="d1"), ROLL)))
    assert together is not None
    assert apart is not None
    single = {t: cost.evaluate(Plan(placements=(group(t, on="d0"), ROLL))) for t in ("actor_training",)}
    assert single["actor_training"] is not None
    (_, a), (_, c) = apart.sides
    assert apart.prediction.score_s == pytest.approx(max(a.score_s, c.score_s))
    assert apart.prediction.train_s == pytest.approx(
        max(a.score_s, c.score_s) + max(a.train_s - a.score_s, c.train_s - c.score_s)
    )
    # The same tasks one after the other on one device: the sum (memory leaves room for all here).
    assert together.prediction.train_s == pytest.approx(a.train_s + c.train_s)
    assert together.prediction.score_s == pytest.approx(a.score_s + c.score_s)
    assert phi([]) == 0.0


def test_scoring_is_one_pass_where_training_is_three() -> None:
    """On a device without other limits: a reference pass costs a third of training without the proximal pass."""
    k = kind("compute", tflops=100, hbm=1e18, memory=1e15, link=1e18, launch_s=0.0)
    p = problem(
        cluster(("compute", "a"), ("bandwidth", "b"), kinds=(k, BANDWIDTH)),
        workload=workload(reference_model=True),
        capabilities=Capabilities(task_groups=2),
    )
    found = CostModel(p).evaluate(Plan(placements=(group(on="d0"), replace(ROLL, devices=("d1",)))))
    assert found is not None
    t = found.prediction
    assert t.score_s == pytest.approx((t.train_s - t.score_s) / 3, rel=0.01)


def test_models_of_a_group_lie_side_by_side_and_share_working_memory() -> None:
    ctx = context_of(problem(FLEET, workload=PPO))

    def states(task: Task, *beside: Task) -> float:
        return task_state_bytes(ctx, task, beside, layers=24, tp=1, dp=1, first=True, last=True)

    assert states("reference") == SMALL.params * 2
    assert states("actor_training") == SMALL.params * 16
    assert states("critic_values", "critic_training") == 0.0
    assert states("critic_values") == pytest.approx(SMALL.params * 2, rel=0.01)
    cost = CostModel(problem(FLEET, workload=PPO))
    both = cost.evaluate(Plan(placements=(group(on="d0"), ROLL)))
    assert both is not None
    assert both.trainer.resident_bytes == (
        pytest.approx(states("reward") + states("reference") + states("critic_training") + states("actor_training")),
    )


@pytest.mark.parametrize(("memory", "fits"), [(16e9, False), (80e9, True)])
def test_what_fits_alone_need_not_fit_together(memory: float, fits: bool) -> None:
    small = kind("compute", memory=memory)
    p = problem(
        cluster(*[("compute", "a")] * 3, ("bandwidth", "b"), kinds=(small, BANDWIDTH)),
        workload=replace(PPO, prompts_per_step=1, responses_per_prompt=2),
        capabilities=Capabilities(task_groups=3),
    )
    together = Plan(placements=(group(on="d0"), ROLL))
    apart = Plan(
        placements=(
            group("actor_training", on="d0"),
            group("critic_values", "critic_training", on="d1"),
            group("reward", "reference", on="d2", role="score"),
            ROLL,
        )
    )
    assert (violations(together, p) == ()) == fits
    assert (CostModel(p).evaluate(together) is not None) == fits
    assert violations(apart, p) == ()
    assert CostModel(p).evaluate(apart) is not None


def test_a_smaller_critic_lies_along_the_same_stages() -> None:
    assert layers_of(replace(SMALL, layers=12), (16, 8)) == (8, 4)
    assert layers_of(replace(SMALL, layers=2), (23, 1)) == (1, 1)
    assert layers_of(replace(SMALL, layers=1), (12, 12)) is None
    tiny = replace(SMALL, layers=2, name="critic")
    p = problem(FLEET, workload=workload(algorithm="ppo"), critic_model=tiny)
    plan = Plan(placements=(group(on="d0"), ROLL))
    small, whole = CostModel(p).evaluate(plan), CostModel(replace(p, critic_model=None)).evaluate(plan)
    assert violations(plan, p) == ()
    assert small is not None
    assert whole is not None
    assert small.prediction.train_s < whole.prediction.train_s


TOGETHER = Plan(placements=(group(on="d0"), ROLL))


@pytest.mark.parametrize(
    ("plan", "word"),
    [
        (Plan(placements=(group("actor_training", on="d0"), ROLL)), "task reward must be run by one placement"),
        (Plan(placements=(group(*ALL, "proximal", on="d0"), ROLL)), "task proximal is not part"),
        (Plan(placements=(group("reward", on="d1", role="score"), ROLL)), "exactly one trainer"),
        (Plan(placements=(group(on="d0"), group("reward", on="d1"), ROLL)), "its tasks make it score"),
        (Plan(placements=(group(on="d0"), group("reward", on="d1", role="score"), ROLL)), "2 groups of tasks"),
        (Plan(placements=(group(on="d0"), replace(ROLL, kind="compute", devices=("d0",)))), "used by 2"),
    ],
)
def test_the_judge_knows_the_workflow(plan: Plan, word: str) -> None:
    p = problem(FLEET, workload=PPO)
    assert violations(TOGETHER, p) == ()
    assert any(word in v for v in violations(plan, p))


def test_generation_may_share_devices_only_where_they_take_turns() -> None:
    shared = Plan(placements=(group(on="d0"), replace(ROLL, kind="compute", devices=("d0",))))
    may = Capabilities(colocate=True)

    def judged(mode: str, caps: Capabilities) -> tuple[str, ...]:
        return violations(shared, problem(FLEET, workload=workload(mode=mode), capabilities=caps))

    assert judged("sync", may) == ()
    assert judged("sync", Capabilities()) != ()
    assert judged("async", may) != ()


def test_a_shared_device_has_less_room_for_kv() -> None:
    many = workload(mode="sync", prompts_per_step=1024)
    card = kind("compute", memory=16e9)
    p = problem(cluster(("compute", "a"), kinds=(card,)), workload=many, capabilities=Capabilities(colocate=True))
    cost = CostModel(p)
    found = cost.evaluate(Plan(placements=(group(on="d0"), replace(ROLL, kind="compute", devices=("d0",)))))
    assert found is not None
    shape = ReplicaShape(kind="compute", tp=1)
    [held] = found.trainer.resident_bytes
    free, beside = cost.running_limit(shape), cost.running_limit(shape, held)
    mean = cost.moments.context * SMALL.kv_bytes_per_token
    assert free == 1024  # what the engine takes at most
    assert 0 < beside < free
    # The lost room is the models' bytes, up to the margin for fluctuation.
    room = 0.9 * 16e9 - cost.context.a.overhead(16e9) - SMALL.params * 2 - SMALL.weight_bytes - held
    assert beside == pytest.approx(room / mean, rel=0.1)
    assert (found.plan.rollouts[0].max_running or 0) <= beside
    over = Plan(placements=(found.plan.placements[0], replace(found.plan.rollouts[0], max_running=beside + 1)))
    assert any("memory allow" in v for v in violations(over, p))
    assert cost.evaluate(over) is None


def oracle(p: Problem) -> Feasible:
    found = solve(p, scheduler="exhaustive", budget=Budget(evaluations=10**9))
    assert isinstance(found, Feasible)
    assert violations(found.plan, p) == ()
    return found


def test_brute_force_shares_devices_in_sync_mode_and_not_in_async() -> None:
    p = problem(
        cluster(*[("compute", "a")] * 3, kinds=(COMPUTE,)),
        workload=workload(mode="sync"),
        capabilities=Capabilities(colocate=True),
    )
    shared, apart = oracle(p), oracle(replace(p, capabilities=Capabilities()))
    assert shared.prediction.step_s < apart.prediction.step_s
    train = shared.plan.train
    assert train is not None
    assert {d for r in shared.plan.rollouts for d in r.devices} & set(train.devices)
    waiting = replace(p, workload=workload())
    assert oracle(waiting).prediction == oracle(replace(waiting, capabilities=Capabilities())).prediction


def test_more_groups_never_hurt() -> None:
    p = problem(cluster(*[("compute", "a")] * 3, ("bandwidth", "b"), kinds=(COMPUTE, BANDWIDTH)), workload=PPO)
    steps = [
        oracle(replace(p, capabilities=Capabilities(task_groups=n, train_max_kinds=1))).prediction.step_s
        for n in (1, 2)
    ]
    assert steps[1] <= steps[0]
