"""A plan as the targets see one: one trainer grid dp x tp x pp and engines that are all alike.

No target takes a pipeline whose stages differ or engines of several sizes, so the nearest uniform shape is found
here, once for all of them, and every difference becomes a note. The rules are plain on purpose: a reader of the
notes must be able to redo them by hand.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from planner.cluster import Cluster
from planner.cost.decode import ReplicaShape
from planner.cost.memory import tp_divides
from planner.cost.model import CostModel
from planner.cost.network import spread_of
from planner.cost.ranks import MixedShape
from planner.cost.training import StageShape, TrainerCost, TrainerShape, split_layers
from planner.errors import InvalidInput
from planner.plan import Placement, Plan
from planner.problem import Problem
from planner.record import record, replace
from planner.solution import Feasible

_EVEN_SHARE = 1.05  # shares closer than this come from rounding, not from a wish


@record
class Abilities:
    """Which shapes a target can run. `engine_pp`: pipelines inside an engine; `always_shards`: FSDP is all it has."""

    name: str
    trainer_tp: bool = True
    trainer_pp: bool = True
    engine_pp: bool = True
    always_shards: bool = False


@record
class Blocks:
    """Devices as `groups` blocks of `per_group` on one node each: the largest blocks that leave no device over."""

    groups: int
    per_group: int

    @property
    def devices(self) -> int:
        """All of them."""
        return self.groups * self.per_group


@record
class TrainerGrid:
    """One uniform trainer; dp * tp * pp == blocks.devices."""

    dp: int
    tp: int
    pp: int
    blocks: Blocks
    layers: tuple[int, ...]  # of each pipeline stage; () for one stage
    sharded: bool  # weights, gradients and optimiser states split over the dp ranks (FSDP, ZeRO stage 3)
    recompute: bool
    micro_batch_tokens: int  # most tokens of a micro-batch and DP rank; never below the longest sequence


@record
class EnginePool:
    """Rollout engines that are all alike; engines * tp * pp == blocks.devices."""

    engines: int
    tp: int
    pp: int
    blocks: Blocks
    max_running: int | None  # samples one engine decodes at once
    memory_share: float  # of a device's memory that an engine may take


@record
class Uniform:
    """The plan without its differences, and the differences as notes."""

    train: TrainerGrid
    rollout: EnginePool
    nodes: tuple[str, ...]  # of the devices used
    devices_per_node: int  # most devices used of one node
    longest_tokens: int  # prompt and response
    running_samples: int  # decoded at once over all engines, never more than (eta + 1) batches
    notes: tuple[str, ...]


def uniform(solved: Feasible | Plan, problem: Problem, able: Abilities) -> Uniform:
    """The nearest uniform shape of a plan. Raises InvalidInput where the plan names no trainer or no replica, or has
    placements that share devices, or a trainer whose DP ranks are not alike."""
    plan = solved.plan if isinstance(solved, Feasible) else solved
    train = _checked(plan)
    cost = CostModel(problem)
    grid, about_grid = _trainer_grid(train, cost, able)
    pool, about_pool = _engine_pool(plan.rollouts, cost, able)
    used = [d for p in plan.placements for d in p.devices]
    counts = Counter(problem.cluster.device(d).node for d in used)
    w = problem.workload
    outstanding = ((w.eta if w.mode == "async" else 0) + 1) * w.samples_per_step
    at_once = [p.max_running for p in plan.rollouts if p.max_running is not None]
    running = min(outstanding, sum(at_once)) if len(at_once) == len(plan.rollouts) else outstanding
    notes = (*about_grid, *about_pool, *_about_places(plan, train, problem, able))
    return Uniform(
        train=grid,
        rollout=pool,
        nodes=tuple(counts),
        devices_per_node=max(counts.values()),
        longest_tokens=w.prompt.max_tokens + w.response.max_tokens,
        running_samples=running,
        notes=notes,
    )


def blocks_of(devices: Sequence[str], cluster: Cluster) -> Blocks:
    """The largest equal blocks, each on one node, that hold these devices exactly."""
    per_node = Counter(cluster.device(d).node for d in devices)
    size = math.gcd(*per_node.values())
    return Blocks(groups=len(devices) // size, per_group=size)


def _checked(plan: Plan) -> Placement:
    train = plan.train
    roles = Counter(str(p.role) for p in plan.placements)
    if train is None or not train.stages or roles["train"] > 1:
        raise InvalidInput("a plan to export needs one trainer, with stages", where="plan", got=dict(roles))
    for s in train.stages:
        if s.token_shares or "+" in s.kind:
            raise InvalidInput(
                "the trainer's DP ranks take unequal shares of the tokens or are of two kinds, which no target can be told",
                where="plan.train",
                got=f"{s.dp} DP ranks on {s.kind}, shares {min(s.token_shares, default=1 / s.dp):.3g}"
                f" to {max(s.token_shares, default=1 / s.dp):.3g}",
                expected="DP ranks of one kind with equal shares",
                hint="plan with planner.mixed_ranks = false (Capabilities.train_mixed_dp)",
            )
    if set(roles) - {"train", "rollout"}:
        raise InvalidInput(
            "a placement has a role that no exporter maps", where="plan", got=dict(roles), expected="train, rollout"
        )
    if not plan.rollouts:
        raise InvalidInput("a plan to export needs rollout replicas", where="plan", got=len(plan.placements))
    shared = [d for d, n in Counter(d for p in plan.placements for d in p.devices).items() if n > 1]
    if shared:
        raise InvalidInput(
            "placements share devices, which no exporter maps yet", where="plan", got=", ".join(shared[:8])
        )
    return train


def _trainer_grid(train: Placement, cost: CostModel, able: Abilities) -> tuple[TrainerGrid, list[str]]:
    stages, total, model = train.stages, len(train.devices), cost.problem.model
    blocks = blocks_of(train.devices, cost.problem.cluster)
    tp = math.gcd(*(s.tp for s in stages)) if able.trainer_tp else 1
    deep = able.trainer_pp and total % (len(stages) * tp) == 0
    pp = len(stages) if deep else 1
    dp = total // (pp * tp)
    same = len({(s.dp, s.tp) for s in stages}) == 1
    as_planned = same and (pp, tp) == (len(stages), stages[0].tp)
    notes = list(_about_stages(train, able, tp, pp))
    shape = cost.trainer_shape(train) if as_planned else _on_smallest(train, cost, pp=pp, tp=tp, dp=dp)
    sharded, found = _memory(shape, cost, able)
    if sharded and cost.problem.capabilities.trainer != "fsdp":
        why = "over all ranks" if able.always_shards else "here, because whole ones would not fit"
        notes.append(f"The plan's trainer keeps whole states on every dp rank; {able.name} shards them {why}.")
    if dp > cost.problem.workload.samples_per_step:
        notes.append(
            f"The trainer has dp{dp} here, more ranks than the {cost.problem.workload.samples_per_step} samples of a step."
        )
    elif found is None:
        notes.append(
            f"The trainer's dp{dp} x tp{tp} x pp{pp} is not predicted to fit the smallest of its devices without"
            f" offloading."
        )
    if not as_planned:
        notes.append("The predicted step time is that of the plan, not of this uniform trainer.")
    rounds = found.micro_batches if found else cost.problem.workload.samples_per_step
    return TrainerGrid(
        dp=dp,
        tp=tp,
        pp=pp,
        blocks=blocks,
        layers=tuple(s.layers for s in stages) if as_planned and pp > 1 else even_layers(model.layers, pp),
        sharded=sharded,
        recompute=found.recompute if found else True,
        micro_batch_tokens=math.ceil(max(cost.moments.longest, cost.context.batch_tokens / (rounds * dp))),
    ), notes


def _memory(shape: TrainerShape | MixedShape, cost: CostModel, able: Abilities) -> tuple[bool, TrainerCost | None]:
    """Whether the trainer must shard its states, and what it then costs; None when it fits in neither way."""
    planned = cost.problem.capabilities.trainer == "fsdp"
    if not (planned or able.always_shards):
        found = cost.trainer(shape)
        if found is not None:
            return False, found
    caps = replace(cost.problem.capabilities, trainer="fsdp")
    sharding = CostModel(replace(cost.problem, capabilities=caps))
    found = sharding.trainer(shape)
    return planned or able.always_shards or found is not None, found


def even_layers(layers: int, pp: int) -> tuple[int, ...]:
    """Layers a stage when all get as near as possible the same number; () for one stage."""
    return split_layers(layers, [1.0] * pp) or () if pp > 1 else ()


def _on_smallest(train: Placement, cost: CostModel, *, pp: int, tp: int, dp: int) -> TrainerShape:
    """A uniform trainer as if all its devices were of the kind with least memory: what must fit."""
    cluster = cost.problem.cluster
    kind = min((s.kind for s in train.stages), key=lambda k: cluster.kinds[k].memory_bytes)
    spread = spread_of(cluster, cost.places_of(train.devices))
    layers = even_layers(cost.problem.model.layers, pp) or (cost.problem.model.layers,)
    stages = tuple(StageShape(kind=kind, dp=dp, tp=tp, layers=n, spread=spread) for n in layers)
    return TrainerShape(stages=stages, links=(cluster.cross_kind.bulk(),) * (len(stages) - 1))


def _about_stages(train: Placement, able: Abilities, tp: int, pp: int) -> Iterator[str]:
    stages, name = train.stages, able.name
    kinds = list(dict.fromkeys(s.kind for s in stages))
    if len(kinds) > 1:
        yield (
            f"The trainer's pipeline mixes {' and '.join(kinds)}; {name} does not tie a stage to a kind of device, so"
            f" order the ranks by hand or accept any order."
        )
    shapes = [f"dp{s.dp} x tp{s.tp} on {s.kind}" for s in stages]
    if len({(s.dp, s.tp) for s in stages}) > 1:
        yield f"The plan's stages differ ({'; '.join(shapes)}); {name} runs one dp and tp for all of them."
    if pp != len(stages):
        why = "has no pipeline parallelism" if not able.trainer_pp else "needs stages of equal size"
        yield f"The plan's trainer has {len(stages)} pipeline stages; {name} {why}, so its devices join the dp groups."
    if not able.trainer_tp and any(s.tp > 1 for s in stages):
        yield f"The plan's trainer has tp {max(s.tp for s in stages)}; {name} trains without tensor parallelism."


def _engine_pool(replicas: Sequence[Placement], cost: CostModel, able: Abilities) -> tuple[EnginePool, list[str]]:
    devices = [d for p in replicas for d in p.devices]
    blocks = blocks_of(devices, cost.problem.cluster)
    kinds = list(dict.fromkeys(p.kind for p in replicas))
    planned = _by_output(replicas)
    fits = {s: _fits(cost, kinds, *s) for s in planned}
    runnable = [s for s in planned if _tiles(s, blocks, able)]
    chosen = next((s for s in runnable if fits[s]), None) or _largest_common(replicas, cost, blocks)
    tp, pp = chosen
    notes = []
    if len(planned) > 1 or chosen not in planned:
        shapes = ", ".join(f"{_count(replicas, s)} x tp{s[0]} pp{s[1]}" for s in planned)
        notes.append(
            f"The plan's engines are {shapes}; {able.name} runs engines of one size, here tp{tp} pp{pp}, the planned"
            f" size that yields most where it fits everywhere."
        )
    if any(p.pp > 1 for p in replicas) and not able.engine_pp:
        notes.append(f"The plan has rollout engines with pipeline stages; {able.name} runs engines with tp alone.")
    if not _fits(cost, kinds, tp, pp):
        notes.append(f"An engine of tp{tp} pp{pp} is not predicted to fit every kind the plan rolls out on.")
    running = [p.max_running for p in replicas if p.max_running is not None]
    if len(set(running)) > 1:
        notes.append(
            f"The plan's engines decode {min(running)} to {max(running)} samples at once;"
            f" {able.name} takes one limit for all, here the highest."
        )
    return EnginePool(
        engines=len(devices) // (tp * pp),
        tp=tp,
        pp=pp,
        blocks=blocks,
        max_running=max(running) if len(running) == len(replicas) else None,
        memory_share=cost.context.a.rollout_memory_share,
    ), notes


def _by_output(replicas: Sequence[Placement]) -> dict[tuple[int, int], float]:
    """Sizes (tp, pp) with their predicted tokens/s, or devices where a rate is not known; the largest first."""
    known = all(p.rate_tokens_per_s is not None for p in replicas)
    yields: dict[tuple[int, int], float] = {}
    for p in replicas:
        more = (p.rate_tokens_per_s or 0.0) if known else len(p.devices)
        yields[p.tp, p.pp] = yields.get((p.tp, p.pp), 0.0) + more
    return dict(sorted(yields.items(), key=lambda item: (-item[1], item[0])))


def _count(replicas: Sequence[Placement], shape: tuple[int, int]) -> int:
    return sum((p.tp, p.pp) == shape for p in replicas)


def _tiles(shape: tuple[int, int], blocks: Blocks, able: Abilities) -> bool:
    """Whether engines of that shape use the devices up, each TP group inside one node."""
    tp, pp = shape
    return (pp == 1 or able.engine_pp) and blocks.per_group % tp == 0 and blocks.devices % (tp * pp) == 0


def _fits(cost: CostModel, kinds: Sequence[str], tp: int, pp: int) -> bool:
    return all(cost.running_limit(ReplicaShape(kind=k, tp=tp, pp=pp)) > 0 for k in kinds)


def _largest_common(replicas: Sequence[Placement], cost: CostModel, blocks: Blocks) -> tuple[int, int]:
    """The largest TP that every node's rollout devices are a multiple of, no larger than the largest engine planned;
    preferably one that fits."""
    largest = max(p.tp * p.pp for p in replicas)
    model, kinds = cost.problem.model, list(dict.fromkeys(p.kind for p in replicas))
    sizes = [n for n in range(min(largest, blocks.per_group), 0, -1) if blocks.per_group % n == 0]
    sizes = [n for n in sizes if tp_divides(model, n)] or [1]
    fitting = [n for n in sizes if _fits(cost, kinds, n, 1)]
    return (fitting or sizes)[0], 1


def _about_places(plan: Plan, train: Placement, problem: Problem, able: Abilities) -> Iterator[str]:
    cluster, name = problem.cluster, able.name
    roles = {"train": train.devices, "rollout": tuple(d for p in plan.rollouts for d in p.devices)}
    kinds = {role: sorted({cluster.device(d).kind for d in ids}) for role, ids in roles.items()}
    if len({k for found in kinds.values() for k in found}) > 1:
        yield (
            f"{name} does not choose devices by kind: start it so that training gets the devices of"
            f" {_nodes(train.devices, cluster)} ({', '.join(kinds['train'])}) and rollout those of"
            f" {_nodes(roles['rollout'], cluster)} ({', '.join(kinds['rollout'])})."
        )
    idle = len(cluster.devices) - sum(len(ids) for ids in roles.values())
    if idle:
        yield f"{idle} devices of the cluster are idle in the plan: keep them from {name}, which takes any that are free."
    per_device = [p.share / len(p.devices) for p in plan.rollouts if p.share is not None]
    if per_device and max(per_device) > _EVEN_SHARE * min(per_device):
        how = (
            f"{max(per_device) / min(per_device):.2f} times as many a device at most"
            if min(per_device)
            else "some none"
        )
        yield f"The plan gives its engines unequal shares of the samples ({how}); {name} routes by its own rule."
    if problem.workload.mode == "async" and problem.workload.update_mode != "pause":
        yield f"The plan updates weights {problem.workload.update_mode}; {name} pauses all its engines for an update."


def _nodes(devices: Sequence[str], cluster: Cluster, most: int = 8) -> str:
    names = list(dict.fromkeys(cluster.device(d).node for d in devices))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more nodes" if len(names) > most else "")
