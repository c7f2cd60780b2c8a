"""The RL step as a graph of tasks, and which placement of a plan runs which.

The seven tasks: `generation` samples responses; `reward` scores them with a model (rule rewards run on CPUs and are no
task of a GPU); `reference` and `critic_values` are forward passes over the samples; `critic_training` and `actor_training`
change weights; `proximal` is the forward pass of the decoupled objective (log-probabilities of the current policy), a part
of actor training. GRPO has no critic. A *group* is a set of tasks on the same devices: its models lie there together and
its tasks run one after the other. `Phi` composes the times of groups that run at once.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from planner.plan import Placement, Plan, Task
from planner.workload import Workload

Phase = Literal["generate", "score", "train"]

TASKS: tuple[Task, ...] = get_args(Task)
SCORING: tuple[Task, ...] = ("reward", "reference", "critic_values")
TRAINING: tuple[Task, ...] = ("critic_training", "actor_training")


def side_tasks(workload: Workload) -> tuple[Task, ...]:
    """All tasks of a step but generation and `proximal` (which is part of actor training), in the order they run."""
    ppo = workload.algorithm == "ppo"
    wanted: tuple[tuple[Task, bool], ...] = (
        ("reward", workload.reward == "model"),
        ("reference", workload.reference_model),
        ("critic_values", ppo),
        ("critic_training", ppo),
        ("actor_training", True),
    )
    return tuple(t for t, is_run in wanted if is_run)


def dependencies(workload: Workload) -> Mapping[Task, tuple[Task, ...]]:
    """The task graph of one step: what each task waits for. In async mode the next step's generation waits for nothing of
    this graph but, at last, for the staleness bound."""
    side = side_tasks(workload)
    scoring = tuple(t for t in side if t in SCORING)
    graph: dict[Task, tuple[Task, ...]] = {"generation": ()}
    graph.update(dict.fromkeys(scoring, ("generation",)))
    if workload.proximal_forward:
        graph["proximal"] = ("generation",)
    for t in side:
        if t in TRAINING:
            own: tuple[Task, ...] = ("proximal",) if t == "actor_training" and workload.proximal_forward else ()
            graph[t] = (*(scoring or ("generation",)), *own)
    return graph


def phase_of(task: Task) -> Phase:
    """In which of the three phases of a step a task runs."""
    if task == "generation":
        return "generate"
    return "score" if task in SCORING else "train"


def tasks_of(plan: Plan, workload: Workload) -> Mapping[Placement, tuple[Task, ...]]:
    """The tasks of every placement that does not generate. The actor's trainer without a list of its own runs all that no
    other placement names."""
    side = side_tasks(workload)
    named = {t for p in plan.placements if p.role != "rollout" for t in p.tasks}
    return {
        p: p.tasks or (tuple(t for t in side if t not in named) if p is plan.train else ())
        for p in plan.placements
        if p.role != "rollout"
    }


def groupings(tasks: tuple[Task, ...], most: int) -> tuple[tuple[tuple[Task, ...], ...], ...]:
    """All ways to put tasks into at most `most` groups, the group that trains the actor first; 52 ways for the five of PPO
    with a reward model and a reference where `most` allows."""
    ways: list[tuple[tuple[Task, ...], ...]] = [()]
    for t in sorted(tasks, key=lambda t: t != "actor_training"):
        ways = [
            way
            for groups in ways
            for way in (
                *((*groups[:i], (*g, t), *groups[i + 1 :]) for i, g in enumerate(groups)),
                *(((*groups, (t,)),) if len(groups) < most else ()),
            )
        ]
    order = {t: i for i, t in enumerate(TASKS)}
    return tuple(tuple(tuple(sorted(g, key=order.__getitem__)) for g in way) for way in ways)


def phi(apart: Iterable[float]) -> float:
    """Seconds of tasks that run at once: `Phi = max + (1 - w)(sum - max)` with w = 1 between groups on devices of their own.

    Within a group w = 0: its times are added before they come here.
    """
    return max(apart, default=0.0)
