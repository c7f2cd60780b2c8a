"""Host memory: what a plan's processes hold in the RAM of each machine.

Counted: the processes of replicas and of the trainer, one generation of weights on its way into each replica, and what each
group of tasks loads or writes: a checkpoint (parameters and optimiser, gradients apart) or a generation, whichever is more, as
one is written after the other. A trainer that writes checkpoints beside its training (`Workload.checkpoint_every` > 1) holds a copy
of masters and moments from the first one on: that and a generation count where they are more than what was loaded before there was
a copy. Engines do not sleep and optimisers are not offloaded in this model, so neither is counted.
Paced devices and CPUs are left out: their models lie in that same memory and are real.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from planner.cluster import Cluster
from planner.cost.context import Context
from planner.cost.memory import layers_of, stage_params, state_bytes_per_param
from planner.model import ModelSpec
from planner.plan import Placement, Plan, Task
from planner.record import record
from planner.workflow import TRAINING, tasks_of


@record
class HostUse:
    """Bytes of one machine's RAM."""

    processes: float = 0.0
    weights: float = 0.0  # generations on their way into replicas
    loaded: float = 0.0  # checkpoints and weights of the tasks besides generation

    @property
    def total(self) -> float:
        """All of it."""
        return self.processes + self.weights + self.loaded

    def __add__(self, other: "HostUse") -> "HostUse":
        return HostUse(
            processes=self.processes + other.processes,
            weights=self.weights + other.weights,
            loaded=self.loaded + other.loaded,
        )


def host_use(ctx: Context, plan: Plan) -> Mapping[str, HostUse]:
    """By machine, in the order of the cluster's devices; machines of which nothing is counted are left out."""
    nodes = {d.id: d.node for d in ctx.cluster.devices if _counted(ctx.cluster, d.kind)}
    found: dict[str, HostUse] = defaultdict(HostUse)
    for r in plan.rollouts:
        for node, use in replica_use(ctx, r, nodes).items():
            found[node] += use
    for p, tasks in tasks_of(plan, ctx.workload).items():
        for node, use in _group_use(ctx, p, tasks, nodes).items():
            found[node] += use
    return {n: found[n] for n in dict.fromkeys(nodes.values()) if n in found}


def replica_use(ctx: Context, replica: Placement, nodes: Mapping[str, str]) -> Mapping[str, HostUse]:
    """What one replica holds on each machine: a process a device, one besides, and its part of a generation."""
    a, found = ctx.a, dict[str, HostUse]()
    for d in replica.devices:
        if d in nodes:
            part = HostUse(processes=a.host_engine_bytes, weights=ctx.model.weight_bytes / max(1, len(replica.devices)))
            found[nodes[d]] = found.get(nodes[d], HostUse()) + part
    if found:
        first = next(iter(found))
        found[first] += HostUse(processes=a.host_replica_bytes)
    return found


def _group_use(ctx: Context, p: Placement, tasks: Sequence[Task], nodes: Mapping[str, str]) -> Mapping[str, HostUse]:
    found: dict[str, HostUse] = defaultdict(HostUse)
    for d in p.devices:
        if d in nodes:
            found[nodes[d]] += HostUse(processes=ctx.a.host_trainer_bytes)
    for i, s in enumerate(p.stages):
        here: dict[str, int] = defaultdict(int)
        for d in s.devices:
            if d in nodes:
                here[nodes[d]] += 1
        loaded = sum(_stage_loaded(ctx, p, i, t, tasks) for t in tasks)
        for node, n in here.items():
            # FSDP ranks load their shards; replicated ones the whole stage, which a machine reads once.
            share = n / len(s.devices) if ctx.trainer == "fsdp" else 1.0
            found[node] += HostUse(loaded=loaded * share)
    return found


def _stage_loaded(ctx: Context, p: Placement, i: int, task: Task, beside: Sequence[Task]) -> float:
    """Bytes of a stage of a task's checkpoint (of its weights where it only scores)."""
    if task == "proximal" or (task == "critic_values" and "critic_training" in beside):
        return 0.0  # runs on weights that training holds
    model = ctx.of(task).model
    layers = layers_of(model, [s.layers for s in p.stages])
    if layers is None:
        return 0.0
    params = stage_params(model, layers[i], first=i == 0, last=i == len(p.stages) - 1)
    if task not in TRAINING:
        return params * model.dtype_bytes
    stored = state_bytes_per_param(model) - model.dtype_bytes
    return params * (stored if (ctx.workload.checkpoint_every or 1) == 1 else max(stored, _beside_bytes(model)))


def _beside_bytes(model: ModelSpec) -> float:
    """Of a parameter: the copy that is being written (master and two moments, float32 or wider) and a generation of weights."""
    return 3 * max(4, model.dtype_bytes) + model.dtype_bytes


def _counted(cluster: Cluster, kind: str) -> bool:
    return not cluster.kinds[kind].paced and cluster.kinds[kind].base != "host-cpu"


def usable_bytes(ctx: Context, node: str) -> float | None:
    """Host memory that a plan may take on a machine; None where the cluster does not say how much there is."""
    declared = ctx.cluster.host_memory_bytes.get(node)
    return None if declared is None else declared * ctx.a.host_memory_share


def overfull(ctx: Context, plan: Plan) -> Mapping[str, HostUse]:
    """Machines whose declared host memory does not hold the plan, with what it would take."""
    if not ctx.cluster.host_memory_bytes:
        return {}
    found = host_use(ctx, plan)
    return {n: u for n, u in found.items() if (most := usable_bytes(ctx, n)) is not None and u.total > most}


def within_host_memory(ctx: Context, plan: Plan, kept: Iterable[str] = ()) -> Plan:
    """The plan with so many replicas fewer that the machines' memory holds it, their devices idle; the last ones go first.
    Replicas with a device of `kept` stay, even where the plan then does not fit."""
    full, held = dict(overfull(ctx, plan)), set(kept)
    if not full:
        return plan
    nodes = {d.id: d.node for d in ctx.cluster.devices}
    over = {n: u.total - (usable_bytes(ctx, n) or 0.0) for n, u in full.items()}
    gone: set[tuple[str, ...]] = set()
    for r in reversed(plan.rollouts):
        if held.isdisjoint(r.devices) and any(over.get(nodes[d], 0.0) > 0 for d in r.devices):
            gone.add(r.devices)
            for node, use in replica_use(ctx, r, nodes).items():
                if node in over:
                    over[node] -= use.total
    return Plan(
        placements=tuple(p for p in plan.placements if p.role != "rollout" or p.devices not in gone),
        even_shares=plan.even_shares,
    )
