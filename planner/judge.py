"""The judge: is this plan valid for this problem? It shares only the memory model with the searchers."""

from collections import Counter
from collections.abc import Iterator

from planner.cluster import Device
from planner.cost.assumptions import Assumptions
from planner.cost.context import Context, context_of
from planner.cost.memory import running_limit, stage_bytes, stage_fits
from planner.plan import Placement, Plan, Stage
from planner.problem import Capabilities, Problem


def violations(plan: Plan, problem: Problem, assumptions: Assumptions | None = None) -> tuple[str, ...]:
    """Everything that is wrong with `plan`, one sentence each; empty when it is valid."""
    ctx = context_of(problem, assumptions)
    devices = {d.id: d for d in problem.cluster.devices}
    found = list(_devices(plan, devices))
    if found:
        return tuple(found)  # shapes of devices that are not there would only confuse
    found += _overrides(plan, problem)
    trainers = [p for p in plan.placements if p.role == "train"]
    if len(trainers) != 1:
        found.append(f"a plan needs exactly one trainer, it has {len(trainers)}")
    if not plan.rollouts:
        found.append("a plan needs at least one rollout replica, it has none")
    for p in plan.placements:
        found += _replica(p, problem, devices, ctx) if p.role == "rollout" else _trainer(p, problem, devices, ctx)
    return tuple(found)


def _devices(plan: Plan, devices: dict[str, Device]) -> Iterator[str]:
    used = Counter(d for p in plan.placements for d in p.devices)
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
    barred = {o.device for o in problem.overrides if o.kind in ("cordon", "drain")}
    pins = {o.device: o.role for o in problem.overrides if o.kind == "pin"}
    for o in problem.overrides:
        role = plan.role_of(o.device)
        if o.kind in ("cordon", "drain") and role != "idle":
            yield f"device {o.device} is under {o.kind} but the plan has it {role}"
    for device, wanted in pins.items():
        role = plan.role_of(device)
        if wanted is not None and device not in barred and role != wanted:
            yield f"device {device} is pinned to {wanted} but the plan has it {role}"


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


def _replica(p: Placement, problem: Problem, devices: dict[str, Device], ctx: Context) -> Iterator[str]:
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
    limit = running_limit(ctx, p.kind, p.tp, p.pp)
    if limit < 1:
        yield f"{who}: weights and the longest sequence do not fit in memory"
    elif p.max_running is not None and not 1 <= p.max_running <= limit:
        yield f"{who}: {p.max_running} running samples, engine and memory allow {limit}"


def _trainer(p: Placement, problem: Problem, devices: dict[str, Device], ctx: Context) -> Iterator[str]:
    caps, model = problem.capabilities, problem.model
    if not p.stages:
        yield "trainer: it has no stages"
        return
    if caps.train_max_devices is not None and len(p.devices) > caps.train_max_devices:
        yield f"trainer: {len(p.devices)} devices exceed what it can do ({caps.train_max_devices})"
    if len(p.stages) != p.pp or p.stages[0].tp != p.tp or p.stages[0].dp != p.dp:
        yield "trainer: tp, dp and pp of the placement are not those of its stages"
    if sum(s.layers for s in p.stages) != model.layers or any(s.layers < 1 for s in p.stages):
        yield f"trainer: stages of {[s.layers for s in p.stages]} layers are not the model's {model.layers}"
    yield from _blocks(p, caps)
    for i, stage in enumerate(p.stages):
        yield from _stage(stage, f"trainer stage {i}", problem, devices)
    if all(s.dp >= 1 and s.tp >= 1 for s in p.stages):
        yield from _trainer_memory(p, ctx)


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
    if {d.kind for d in mine} != {s.kind}:
        yield f"{who}: devices are not all of kind {s.kind}"
        return
    yield from _tp_inside([mine[j : j + s.tp] for j in range(0, len(mine), s.tp)], who)


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


def _trainer_memory(p: Placement, ctx: Context) -> Iterator[str]:
    """The smallest footprint: one sequence a micro-batch, recomputation on."""
    n = len(p.stages)
    samples, dp_max = ctx.workload.samples_per_step, max(s.dp for s in p.stages)
    rounds = max(1, -(-samples // dp_max))
    for i, s in enumerate(p.stages):
        kind = ctx.cluster.kinds.get(s.kind)
        if kind is None or s.layers < 1:
            continue
        needed = stage_bytes(
            ctx,
            layers=s.layers,
            tp=s.tp,
            dp=s.dp,
            first=i == 0,
            last=i == n - 1,
            in_flight=min(rounds, n - i),
            tokens=max(ctx.m.longest, ctx.batch_tokens / (rounds * s.dp)),
            recompute=True,
        )
        if not stage_fits(ctx, s.kind, needed):
            yield f"trainer stage {i}: needs {needed / 1e9:.1f} GB on each {s.kind} of {kind.memory_bytes / 1e9:.1f} GB"
