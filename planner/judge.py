"""The judge: is this plan valid for this problem? It shares only the memory model with the searchers."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from planner.cluster import Device
from planner.cost.assumptions import Assumptions
from planner.cost.context import Context, context_of
from planner.cost.host import overfull, usable_bytes
from planner.cost.memory import (
    layers_of,
    replica_resident_bytes,
    running_limit,
    stage_fits,
    task_state_bytes,
    task_working_bytes,
)
from planner.plan import Placement, Plan, Stage, Task
from planner.problem import Capabilities, Problem
from planner.resolve import count_capped, same_placement
from planner.workflow import side_tasks, tasks_of

_SHARES_SUM = 1e-6


def violations(plan: Plan, problem: Problem, assumptions: Assumptions | None = None) -> tuple[str, ...]:
    """Everything that is wrong with `plan`, one sentence each; empty when it is valid."""
    ctx = context_of(problem, assumptions)
    devices = {d.id: d for d in problem.cluster.devices}
    found = list(_devices(plan, devices, problem))
    if found:
        return tuple(found)  # shapes of devices that are not there would only confuse
    found += _overrides(plan, problem)
    found += _caps(plan, problem)
    tasks = tasks_of(plan, problem.workload)
    found += _tasks(plan, tasks, problem)
    if not plan.rollouts:
        found.append("a plan needs at least one rollout replica, it has none")
    resident = _resident_bytes(plan, tasks, ctx)
    limit = functools.cache(functools.partial(running_limit, ctx))  # many replicas are alike
    for p in plan.placements:
        if p.role == "rollout":
            beside = max((resident.get(d, 0.0) for d in p.devices), default=0.0)
            found += _replica(p, problem, devices, functools.partial(limit, p.kind, p.tp, p.pp, beside))
        else:
            found += _group(p, tasks[p], problem, devices, ctx)
            found += _group_memory(p, tasks[p], plan, devices, ctx)
    found += _host_memory(plan, ctx)
    return tuple(found)


def _host_memory(plan: Plan, ctx: Context) -> Iterator[str]:
    for node, use in overfull(ctx, plan).items():
        most = usable_bytes(ctx, node) or 0.0
        yield f"machine {node}: needs {use.total / 1e9:.1f} GB of host memory, a run may take {most / 1e9:.1f} GB"


def _tasks(plan: Plan, tasks: Mapping[Placement, tuple[Task, ...]], problem: Problem) -> Iterator[str]:
    trainers = [p for p, mine in tasks.items() if "actor_training" in mine]
    if len(trainers) != 1:
        yield f"a plan needs exactly one trainer, it has {len(trainers)}"
        return
    wanted, done = side_tasks(problem.workload), Counter(t for mine in tasks.values() for t in mine)
    for t in wanted:
        if done[t] != 1:
            yield f"task {t} must be run by one placement, it is run by {done[t]}"
    for t in done:
        if t not in wanted:
            yield f"task {t} is not part of this workflow"
    for p in plan.sides:
        role = "train" if {"actor_training", "critic_training"} & set(tasks[p]) else "score"
        if not tasks[p]:
            yield f"the {p.role} placement on {p.devices[0]} has no task"
        elif p.role != role:
            yield f"the placement on {p.devices[0]} has role {p.role}, its tasks make it {role}"
    most = problem.capabilities.task_groups
    if len(plan.sides) > most:
        yield f"{len(plan.sides)} groups of tasks besides generation exceed what it can do ({most})"


def _devices(plan: Plan, devices: dict[str, Device], problem: Problem) -> Iterator[str]:
    shared = problem.capabilities.colocate and problem.workload.synchronous
    used = Counter(d for p in plan.placements for d in p.devices)
    if shared:  # a replica and a group of other tasks may take turns on a device
        used = Counter(dict.fromkeys(used, 1))
        for some in (plan.rollouts, plan.sides):
            for d, n in Counter(d for p in some for d in p.devices).items():
                used[d] = max(used[d], n)
    for d, n in used.items():
        if d not in devices:
            yield f"device {d} is not in the cluster"
        if n > 1:
            yield f"device {d} is used by {n} placements"
    for p in plan.placements:
        staged = Counter(d for s in p.stages for d in s.devices)
        if p.stages and staged != Counter(p.devices):
            yield f"the stages of the {p.role} placement do not partition its devices"


def _overrides(plan: Plan, problem: Problem) -> Iterator[str]:
    """Checked against the overrides as they were said, by the plan in force."""
    barred = {o.device for o in problem.overrides if o.kind in ("cordon", "drain")}
    force = problem.in_force
    roles: dict[str, tuple[str, str]] = {}  # device: what it must be, and by which word
    for o in problem.overrides:
        role = plan.role_of(o.device)
        if o.kind in ("cordon", "drain") and role != "idle":
            yield f"device {o.device} is under {o.kind} but the plan has it {role}"
        elif o.kind == "pin" and o.role is not None:
            roles[o.device] = (o.role, "pinned to")
        elif o.kind == "keep" and force is not None:
            roles[o.device] = (force.role_of(o.device), "kept as")
    for device, (wanted, word) in roles.items():
        role = plan.role_of(device)
        if device not in barred and role != wanted:
            yield f"device {device} is {word} {wanted} but the plan has it {role}"
    for o in problem.overrides:
        if o.kind == "freeze" and force is not None:
            mine = [p for p in plan.placements if o.device in p.devices]
            then = [p for p in force.placements if o.device in p.devices]
            if len(mine) != len(then) or not all(any(same_placement(p, q) for q in then) for p in mine):
                yield f"device {o.device} is frozen but the plan changes its placement"


def _caps(plan: Plan, problem: Problem) -> Iterator[str]:
    kinds = {d.id: d.kind for d in problem.cluster.devices} if problem.caps else {}
    for c in problem.caps:
        n = count_capped(plan, c, kinds)
        if n > c.devices:
            yield f"{n} {c.kind or 'devices'} have role {c.role}, the cap is {c.devices}"


def _split(problem: Problem, tp: int, who: str) -> Iterator[str]:
    m = problem.model
    if m.heads % tp or m.intermediate % tp or (m.kv_heads % tp and tp % m.kv_heads):
        yield f"{who}: tp {tp} does not divide {m.heads} heads, {m.kv_heads} KV heads and an MLP of {m.intermediate}"


def _tp_inside(groups: list[list[Device]], who: str) -> Iterator[str]:
    for group in groups:
        if len({d.node for d in group}) > 1:
            yield f"{who}: the TP group {', '.join(d.id for d in group)} spans machines"
        if len({d.kind for d in group}) > 1:
            yield f"{who}: the TP group {', '.join(d.id for d in group)} mixes device kinds"


def _replica(p: Placement, problem: Problem, devices: dict[str, Device], running: Callable[[], int]) -> Iterator[str]:
    caps, who = problem.capabilities, f"replica on {p.devices[0]}"
    if p.stages:
        yield f"{who}: a replica has no training stages"
    if p.tp < 1 or p.pp < 1 or p.dp != 1 or len(p.devices) != p.tp * p.pp:
        yield f"{who}: {len(p.devices)} devices are not tp {p.tp} x pp {p.pp} x dp {p.dp}"
        return
    if p.tp > caps.rollout_max_tp:
        yield f"{who}: tp {p.tp} exceeds what the engine can do ({caps.rollout_max_tp})"
    if p.pp > caps.rollout_max_pp:
        yield f"{who}: pp {p.pp} exceeds what the engine can do ({caps.rollout_max_pp})"
    yield from _split(problem, p.tp, who)
    mine = [devices[d] for d in p.devices]
    if {d.kind for d in mine} != {p.kind}:
        yield f"{who}: devices are not all of kind {p.kind}"
        return
    yield from _tp_inside([mine[i : i + p.tp] for i in range(0, len(mine), p.tp)], who)
    if p.pp > problem.model.layers:
        yield f"{who}: {p.pp} stages for {problem.model.layers} layers"
        return
    limit = running()
    if limit < 1:
        yield f"{who}: weights and the longest sequence do not fit in memory"
    elif p.max_running is not None and not 1 <= p.max_running <= limit:
        yield f"{who}: {p.max_running} running samples, engine and memory allow {limit}"


def _group(
    p: Placement, tasks: tuple[Task, ...], problem: Problem, devices: dict[str, Device], ctx: Context
) -> Iterator[str]:
    caps = problem.capabilities
    # The layers of a plan are those of the actor where the group trains it, else of its first task.
    model = ctx.of("actor_training" if "actor_training" in tasks or not tasks else tasks[0]).model
    if not p.stages:
        yield "trainer: it has no stages"
        return
    if caps.train_max_devices is not None and len(p.devices) > caps.train_max_devices:
        yield f"trainer: {len(p.devices)} devices exceed what it can do ({caps.train_max_devices})"
    if len(p.stages) != p.pp or p.stages[0].tp != p.tp or p.stages[0].dp != p.dp:
        yield "trainer: tp, dp and pp of the placement are not those of its stages"
    if sum(s.layers for s in p.stages) != model.layers or any(s.layers < 1 for s in p.stages):
        yield f"trainer: stages of {[s.layers for s in p.stages]} layers are not the model's {model.layers}"
    unlike = [s for s in p.stages if s.token_shares or {devices[d].kind for d in s.devices} != {s.kind}]
    if unlike and len(p.stages) > 1 and caps.train_mixed_dp:
        yield f"trainer: DP ranks that are not alike need a trainer of one stage, it has {len(p.stages)}"
    yield from _blocks(p, caps)
    for i, stage in enumerate(p.stages):
        yield from _stage(stage, f"trainer stage {i}", problem, devices)


def _stage(s: Stage, who: str, problem: Problem, devices: dict[str, Device]) -> Iterator[str]:
    caps, samples = problem.capabilities, problem.workload.samples_per_step
    if s.dp < 1 or s.tp < 1 or len(s.devices) != s.dp * s.tp:
        yield f"{who}: {len(s.devices)} devices are not dp {s.dp} x tp {s.tp}"
        return
    if s.tp > caps.train_max_tp:
        yield f"{who}: tp {s.tp} exceeds what the trainer can do ({caps.train_max_tp})"
    if s.dp > samples:
        yield f"{who}: dp {s.dp} exceeds the {samples} samples of a step"
    yield from _split(problem, s.tp, who)
    mine = [devices[d] for d in s.devices]
    yield from _shares(s, who, caps)
    kinds = tuple(dict.fromkeys(d.kind for d in mine))
    if kinds != (s.kind,) and not (caps.train_mixed_dp and len(kinds) == 2 and s.kind == "+".join(kinds)):
        yield f"{who}: devices are not all of kind {s.kind}"
        return
    yield from _tp_inside([mine[j : j + s.tp] for j in range(0, len(mine), s.tp)], who)


def _shares(s: Stage, who: str, caps: Capabilities) -> Iterator[str]:
    shares = s.token_shares
    if not shares:
        return
    if not caps.train_mixed_dp:
        yield f"{who}: the trainer gives all DP ranks equal shares of the tokens"
    if len(shares) != s.dp:
        yield f"{who}: {len(shares)} token shares for {s.dp} DP ranks"
    if not all(x > 0 for x in shares):
        yield f"{who}: a DP rank has no share of the tokens"
    if not abs(math.fsum(shares) - 1) <= _SHARES_SUM:
        yield f"{who}: the token shares sum to {math.fsum(shares):.6g}, not to 1"


def _blocks(p: Placement, caps: Capabilities) -> Iterator[str]:
    blocks: list[tuple[str, int]] = []  # kind and length of each run of stages
    for s in p.stages:
        if blocks and blocks[-1][0] == s.kind:
            blocks[-1] = (s.kind, blocks[-1][1] + 1)
        else:
            blocks.append((s.kind, 1))
    if len(blocks) > caps.train_max_kinds:
        yield f"trainer: {len(blocks)} kind blocks exceed what it can do ({caps.train_max_kinds})"
    for kind, stages in blocks:
        if stages > caps.train_max_pp:
            yield f"trainer: {stages} stages of {kind} exceed what it can do ({caps.train_max_pp})"


def _resident_bytes(plan: Plan, tasks: Mapping[Placement, tuple[Task, ...]], ctx: Context) -> dict[str, float]:
    """What the models of tasks other than generation hold on each device all the time."""
    out: dict[str, float] = {}
    for p, mine in tasks.items():
        for i, s in enumerate(p.stages):
            held = _stage_resident_bytes(p, i, mine, ctx)
            out.update(dict.fromkeys(s.devices, held if held is not None else 0.0))
    return out


def _stage_resident_bytes(p: Placement, i: int, tasks: tuple[Task, ...], ctx: Context) -> float | None:
    s, total = p.stages[i], 0.0
    for t in tasks:
        layers = _layers(p, t, ctx)
        if layers is None or s.dp < 1 or s.tp < 1 or layers[i] < 1:
            return None
        total += task_state_bytes(
            ctx, t, tasks, layers=layers[i], tp=s.tp, dp=s.dp, first=i == 0, last=i == len(p.stages) - 1
        )
    return total


def _layers(p: Placement, task: Task, ctx: Context) -> tuple[int, ...] | None:
    stages = [s.layers for s in p.stages]
    return layers_of(ctx.of(task).model, stages) if stages and min(stages) >= 1 else None


def _group_memory(
    p: Placement, tasks: tuple[Task, ...], plan: Plan, devices: Mapping[str, Device], ctx: Context
) -> Iterator[str]:
    """The smallest footprint: models side by side, the hungriest task at work on one sequence a micro-batch, recomputing."""
    if any(
        s.dp < 1 or s.tp < 1 or len(s.devices) != s.dp * s.tp or len(s.token_shares) not in (0, s.dp) for s in p.stages
    ):
        return
    held = functools.cache(functools.partial(replica_resident_bytes, ctx))
    beside = {d: held(r.tp, r.pp) for r in plan.rollouts for d in r.devices}
    n = len(p.stages)
    # Of a micro-batch the fullest rank of the stage with most ranks takes one sequence.
    most = min((max(s.token_shares, default=1 / s.dp) for s in p.stages), default=1.0)
    rounds = max(1, math.ceil(ctx.workload.samples_per_step * most - _SHARES_SUM))
    for i, s in enumerate(p.stages):
        resident = _stage_resident_bytes(p, i, tasks, ctx)
        if resident is None:
            if any(layers_of(ctx.of(t).model, [1] * n) is None for t in tasks):
                yield f"trainer stage {i}: a model of its tasks has fewer layers than the {n} stages"
            continue
        for kind, (share, mine) in _by_kind(s, devices).items():
            working = 0.0
            for t in tasks:
                layers = _layers(p, t, ctx)
                assert layers is not None
                working = max(
                    working,
                    task_working_bytes(
                        ctx,
                        t,
                        layers=layers[i],
                        tp=s.tp,
                        last=i == n - 1,
                        in_flight=min(rounds, n - i),
                        tokens=max(ctx.m.longest, ctx.batch_tokens * share / rounds),
                        recompute=True,
                    ),
                )
            needed = resident + max((beside[d] for d in mine if d in beside), default=0.0) + working
            if not stage_fits(ctx, kind, needed):
                memory = ctx.kind(kind).memory_bytes
                yield f"trainer stage {i}: needs {needed / 1e9:.1f} GB on each {kind} of {memory / 1e9:.1f} GB"


def _by_kind(s: Stage, devices: Mapping[str, Device]) -> dict[str, tuple[float, list[str]]]:
    """By kind of the stage's devices: the largest share of the tokens that one of its DP ranks takes, and the devices."""
    found: dict[str, tuple[float, list[str]]] = {}
    for i, d in enumerate(s.devices):
        share = s.token_shares[i // s.tp] if s.token_shares else 1 / s.dp
        most, mine = found.setdefault(devices[d].kind, (share, []))
        mine.append(d)
        found[devices[d].kind] = (max(most, share), mine)
    return found
