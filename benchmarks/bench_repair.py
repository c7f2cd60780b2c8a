"""Milliseconds from a loss to a valid plan: 1,024 GPUs of five kinds in machines of eight, under a plan made by hand."""

from benchmarks.timing import median_ms
from planner.catalogue import CATALOGUE
from planner.cluster import Cluster, Device, Link
from planner.judge import violations
from planner.model import ModelSpec
from planner.plan import Placement, Plan, Stage
from planner.problem import Problem
from planner.record import replace
from planner.repair import repair
from planner.solution import Repaired
from planner.workload import Lengths, Workload

MACHINES = {"H100": 32, "H20": 32, "A100-80": 24, "L40S": 24, "H200": 16}
# Shape of Qwen2.5-7B (config.json of the model).
MODEL = ModelSpec(
    name="7b", hidden=3584, intermediate=18944, layers=28, heads=28, kv_heads=4, head_dim=128, vocab=152064, qkv_bias=True
)  # fmt: skip
WORKLOAD = Workload(
    prompts_per_step=512,
    responses_per_prompt=16,
    prompt=Lengths(mean_tokens=256, max_tokens=1024),
    response=Lengths(mean_tokens=4000, cv=0.8, max_tokens=16384),
)


def fleet_and_plan() -> tuple[Problem, Plan]:
    """A trainer of TP 4 x DP 16 x PP 4 on all H100, replicas of two devices everywhere else."""
    devices = tuple(
        Device(id=f"{kind}-{n}/{i}", kind=kind, node=f"{kind}-{n}", index=i)
        for kind, count in MACHINES.items()
        for n in range(count)
        for i in range(8)
    )
    cluster = Cluster(
        kinds={k: CATALOGUE[k] for k in MACHINES},
        devices=devices,
        same_kind=Link(latency_s=1e-5, bytes_per_s=5e10),
        cross_kind=Link(latency_s=1e-5, bytes_per_s=1.25e10),
    )
    mine = [d.id for d in devices if d.kind == "H100"]
    stages = tuple(
        Stage(devices=tuple(mine[i * 64 : (i + 1) * 64]), kind="H100", dp=16, tp=4, layers=7) for i in range(4)
    )
    train = Placement(role="train", kind="H100", devices=tuple(mine), tp=4, dp=16, pp=4, stages=stages)
    others = [d for d in devices if d.kind != "H100"]
    rollouts = tuple(
        Placement(role="rollout", kind=a.kind, devices=(a.id, b.id), tp=2)
        for a, b in zip(others[::2], others[1::2], strict=True)
    )
    return Problem(cluster=cluster, model=MODEL, workload=WORKLOAD), Plan(placements=(train, *rollouts))


def run() -> dict[str, float]:
    """One GPU of a replica, one of the trainer, a machine of each, and all machines of the trainer."""
    problem, plan = fleet_and_plan()
    assert violations(plan, problem) == ()
    figures: dict[str, float] = {}
    losses = {
        "replica_gpu": {"H20-0/3"},
        "trainer_gpu": {"H100-0/0"},
        "replica_node": {f"H20-0/{i}" for i in range(8)},
        "trainer_node": {f"H100-0/{i}" for i in range(8)},
        "whole_trainer": {d.id for d in problem.cluster.devices if d.kind == "H100"},
    }
    for name, gone in losses.items():
        left = tuple(d for d in problem.cluster.devices if d.id not in gone)
        after = replace(problem, cluster=replace(problem.cluster, devices=left))
        found = repair(after, plan)
        assert isinstance(found, Repaired), name
        assert violations(found.plan, after) == ()
        figures[f"1024.{name}.ms"] = median_ms(lambda after=after: repair(after, plan), repeats=5, warm_up=1)  # type: ignore[misc]
        figures[f"1024.{name}.changed_devices"] = float(len(found.changed))
    return figures
