"""Why there is no plan: a smallest set of limits that cannot hold together.

A deletion filter: with all limits in force there is no plan; each in turn is lifted for good if there is still none. What is
left conflicts, and lifting any one of it (the others being lifted already) gives a plan. The test is not a solve: it ends at
the first valid plan, or at a bound that is below the floor.
"""

from collections.abc import Callable, Sequence

from planner.bound import upper_bound
from planner.cluster import Device
from planner.columns import Columns
from planner.cost.context import context_of
from planner.cost.memory import replica_weight_bytes, stage_params, state_bytes_per_param
from planner.cost.model import CostModel
from planner.errors import InvalidInput
from planner.holding import HoldingSearch, around_frozen_trainer
from planner.judge import violations
from planner.mending import Mending
from planner.override import Cap, Override
from planner.plan import Plan
from planner.problem import Budget, Capabilities, Problem
from planner.record import record, replace
from planner.resolve import frozen_placements, resolved, room_of
from planner.schedulers.areal_hex.training import improving_trainers
from planner.schedulers.hex import hex_scheduler
from planner.solution import Conflict
from planner.space import DeviceClass, device_classes, replica_shapes, role_limits, tp_degrees

_FIRST = Budget(evaluations=1, mip_seconds=1.0)
_MORE_DEVICES, _MORE_MEMORY, _MORE_ETA = 8, 1e6, 64  # what "without that limit" means
_SMALL = 64  # devices
_LOOSEST = Capabilities()


@record
class Limit:
    """Something that a plan must respect, and the problem without it."""

    name: str
    detail: str
    lifted: Callable[[Problem], Problem]


def conflicts(cost: CostModel, said: Problem | None = None) -> tuple[Conflict, ...]:
    """The conflicting limits of a problem without a plan. Never empty. `said`: the problem before its overrides were resolved."""
    problem = said or cost.problem
    found = smallest_conflict(problem, limits_of(problem), has_plan)
    classes = device_classes(cost.problem)
    known = {c.limit: c.detail for c in _memory(cost, classes)} if classes else {}
    known |= {c.limit: c.detail for c in (*_devices(problem, classes), *_pins(cost.problem, classes))}
    if not found and "memory" in known:  # not even a million times the memory holds such sequences
        return (Conflict(limit="memory", detail=known["memory"]),)
    if not found:
        usable = sum(c.size for c in classes)
        detail = f"no split of the {usable} usable devices holds both a trainer and a replica"
        return (Conflict(limit="devices", detail=detail),)
    return tuple(Conflict(limit=x.name, detail=known.get(x.name, x.detail)) for x in found)


def floor_conflicts(problem: Problem, floor: Conflict) -> tuple[Conflict, ...]:
    """The floor with the limits that keep the bound below it; the floor alone where lifting them all would not do."""

    def reaches(p: Problem) -> bool:
        bound = upper_bound(CostModel(resolved(p)))
        return bound is not None and bound.tokens_per_s >= (problem.floor_tokens_per_s or 0.0)

    found = smallest_conflict(problem, [_eta(problem), *limits_of(problem)], reaches)
    return (floor, *(Conflict(limit=x.name, detail=x.detail) for x in found))


def smallest_conflict(
    problem: Problem, limits: Sequence[Limit], possible: Callable[[Problem], bool]
) -> tuple[Limit, ...]:
    """Limits of which lifting any one more makes the problem `possible`, the rest being lifted; empty where lifting all
    does not help. In the order people read them: devices, memory, capabilities, caps, overrides."""

    def without(lifted: Sequence[Limit]) -> bool:
        p = problem
        for x in lifted:
            p = x.lifted(p)
        return possible(p)

    if not without(limits):
        return ()
    lifted: list[Limit] = []
    for x in limits:
        if not without([*lifted, x]):
            lifted.append(x)
    order = ["devices", "memory", "host_memory", "capability", "eta", "cap", "override"]
    left = [x for x in limits if x not in lifted]
    return tuple(sorted(left, key=lambda x: order.index(x.name.replace(".", " ").split()[0])))


def has_plan(problem: Problem) -> bool:
    """Whether some plan is valid: one made by hand, else the search of `hex` up to its first plan. On more than `_SMALL`
    devices, and where host memory is declared (of which the search knows nothing until it has a plan), the former alone
    decides: fast, and not a proof.

    False where overrides contradict each other.
    """
    try:
        p = resolved(problem)
    except InvalidInput:
        return False
    cost = CostModel(p)
    if not _may_be_possible(cost):
        return False
    search = HoldingSearch(cost, _FIRST, should_stop=lambda: True)
    first_plan(search, by_hand_only=len(p.cluster.devices) > _SMALL or bool(p.cluster.host_memory_bytes))
    return search.best is not None


def first_plan(search: HoldingSearch, *, by_hand_only: bool) -> None:
    """Offer some plan, if there is one: made by hand, else what `hex` finds until the search is halted."""
    problem = search.problem
    held = Plan(placements=frozen_placements(problem))
    quick = Mending(problem, held).from_scratch()
    if quick is not None and not violations(quick.plan, problem):
        search.offer(quick.plan)
    if search.best is None and not by_hand_only:
        (around_frozen_trainer if held.train is not None else hex_scheduler)(search)


def _may_be_possible(cost: CostModel) -> bool:
    """What is seen without a search: whether caps and pins leave some kind to train and some replica."""
    p, classes = cost.problem, device_classes(cost.problem)
    may_train, may_roll = False, False
    pinned = [c for c in classes if c.must_train]
    caps = p.capabilities
    if len({c.place.kind for c in pinned}) > caps.trainer_kinds and caps.task_groups == 1:
        return False
    for kind in dict.fromkeys(c.place.kind for c in classes):
        mine = [c for c in classes if c.place.kind == kind]
        train, roll = room_of(p, "train", kind), room_of(p, "rollout", kind)
        if sum(len(c.must_train) for c in mine) > train or sum(len(c.must_roll) for c in mine) > roll:
            return False
        may_train |= train > 0 and any(c.size > len(c.must_roll) for c in mine)
        most = min(roll, sum(c.size - len(c.must_train) for c in mine))
        may_roll |= any(s.devices <= most for s in replica_shapes(cost, classes, kind))
    return may_train and may_roll


def limits_of(problem: Problem) -> list[Limit]:
    """All limits that could be to blame, those first that are blamed least."""
    caps = problem.capabilities
    out: list[Limit] = []
    names = ("train_max_tp", "train_max_pp", "train_max_kinds", "rollout_max_pp", "rollout_max_tp", "train_max_devices")
    for name in names:
        value, loosest = getattr(caps, name), getattr(_LOOSEST, name)
        if value is not None and (loosest is None or value < loosest):
            out.append(Limit(name=f"capability.{name}", detail=f"at most {value}", lifted=_without_capability(name)))
    if problem.cluster.kinds:
        out.append(Limit(name="devices", detail=f"the fleet has {len(problem.cluster.devices)}", lifted=_with_devices))
        out.append(Limit(name="memory", detail="of the devices", lifted=_with_memory))
    if problem.cluster.host_memory_bytes:
        out.append(Limit(name="host_memory", detail=_host_detail(problem), lifted=_without_host_memory))
    for c in problem.caps:
        out.append(Limit(name=_cap_name(c), detail="set in problem.caps", lifted=_without_cap(c)))
    for o in problem.overrides:
        out.append(Limit(name=_name(o), detail=_DETAILS[o.kind], lifted=_without_override(o)))
    return out


_DETAILS = {
    "cordon": "keeps the device out of every plan",
    "drain": "keeps the device out of every plan",
    "pin": "fixes the role of the device",
    "keep": "fixes the role of the device as in the plan in force",
    "freeze": "fixes the placement of the device as in the plan in force",
}


def _eta(problem: Problem) -> Limit:
    return Limit(
        name="eta",
        detail=f"no token is older than {problem.workload.eta} steps",
        lifted=lambda p: replace(p, workload=replace(p.workload, eta=max(_MORE_ETA, p.workload.eta))),
    )


def _without_capability(name: str) -> Callable[[Problem], Problem]:
    return lambda p: replace(p, capabilities=replace(p.capabilities, **{name: getattr(_LOOSEST, name)}))


def _without_cap(cap: Cap) -> Callable[[Problem], Problem]:
    return lambda p: replace(p, caps=tuple(c for c in p.caps if c is not cap))


def _without_override(o: Override) -> Callable[[Problem], Problem]:
    return lambda p: replace(p, overrides=tuple(x for x in p.overrides if x is not o))


def _with_devices(p: Problem) -> Problem:
    """One more machine of eight of every kind, with no more host memory than the smallest that says how much it has."""
    regions = {d.kind: d.region for d in p.cluster.devices}
    more = tuple(
        Device(id=f"more {k} {i}", kind=k, node=f"more {k}", region=regions.get(k, "local"))
        for k in sorted(p.cluster.kinds)
        for i in range(_MORE_DEVICES)
    )
    said = p.cluster.host_memory_bytes
    host = {**said, **dict.fromkeys((d.node for d in more), min(said.values()))} if said else said
    return replace(p, cluster=replace(p.cluster, devices=(*p.cluster.devices, *more), host_memory_bytes=host))


def _with_memory(p: Problem) -> Problem:
    kinds = {n: replace(k, memory_bytes=k.memory_bytes * _MORE_MEMORY) for n, k in p.cluster.kinds.items()}
    return replace(p, cluster=replace(p.cluster, kinds=kinds))


def _without_host_memory(p: Problem) -> Problem:
    return replace(p, cluster=replace(p.cluster, host_memory_bytes={}))


def _host_detail(p: Problem) -> str:
    """What the smallest machine has, and what the least parts of a run take of it."""
    ctx = context_of(p)
    node, size = min(p.cluster.host_memory_bytes.items(), key=lambda item: item[1])
    replica = ctx.a.host_engine_bytes + ctx.a.host_replica_bytes + p.model.weight_bytes
    states = stage_params(p.model, p.model.layers, first=True, last=True) * state_bytes_per_param(p.model)
    trainer = ctx.a.host_trainer_bytes + states - p.model.weight_bytes
    return (
        f"machine {node} has {_size(size)}, of which a run may take {_size(size * ctx.a.host_memory_share)}; "
        f"a replica on one device needs {_size(replica)}, a trainer on one machine {_size(trainer)} and more"
    )


def _cap_name(c: Cap) -> str:
    return f"cap {c.role} {c.kind or 'any'} {c.devices}"


def _name(o: Override) -> str:
    return f"override {o.kind} {o.device}" + (f" {o.role}" if o.role else "")


def _devices(problem: Problem, classes: Sequence[DeviceClass]) -> list[Conflict]:
    usable, total = sum(c.size for c in classes), len(problem.cluster.devices)
    if usable >= 2:
        return []
    out = [
        Conflict(
            limit="devices",
            detail=f"a plan needs one device to train and one to roll out, {usable} of {total} "
            f"{'is' if usable == 1 else 'are'} usable",
        )
    ]
    limits = role_limits(problem.overrides)
    ids = {d.id for d in problem.cluster.devices}
    barring = [o for o in problem.overrides if o.device in ids and limits.get(o.device) == "idle"]
    return out + [Conflict(limit=_name(o), detail="keeps the device out of every plan") for o in barring]


def _pins(problem: Problem, classes: Sequence[DeviceClass]) -> list[Conflict]:
    caps = problem.capabilities
    train = [d for c in classes for d in c.must_train]
    roll = [d for c in classes for d in c.must_roll]
    free = [d for c in classes for d in c.free]
    pins = {d: Conflict(limit=f"override pin {d} train", detail="must train") for d in train}
    pins |= {d: Conflict(limit=f"override pin {d} rollout", detail="must roll out") for d in roll}
    if caps.train_max_devices is not None and len(train) > caps.train_max_devices:
        limit = Conflict(
            limit="capability.train_max_devices",
            detail=f"the trainer runs on at most {caps.train_max_devices} device(s), {len(train)} are pinned to it",
        )
        return [limit, *(pins[d] for d in train)]
    kinds = {c.place.kind for c in classes if c.must_train}
    if len(kinds) > caps.trainer_kinds:
        limit = Conflict(
            limit="capability.train_max_kinds",
            detail=f"the trainer spans at most {caps.trainer_kinds} kind(s), pins ask for {', '.join(sorted(kinds))}",
        )
        return [limit, *(pins[d] for d in train)]
    if not problem.cluster.devices:
        return [Conflict(limit="devices", detail="the cluster has no device")]
    if not free and not train:
        return [Conflict(limit="devices", detail="every usable device is pinned to rollout, none may train")] + [
            pins[d] for d in roll
        ]
    if not free and not roll:
        return [Conflict(limit="devices", detail="every usable device is pinned to training, none may roll out")] + [
            pins[d] for d in train
        ]
    return []


def _memory(cost: CostModel, classes: Sequence[DeviceClass]) -> list[Conflict]:
    problem, model = cost.problem, cost.problem.model
    caps = problem.capabilities
    kinds = {c.place.kind: problem.cluster.kinds[c.place.kind] for c in classes}
    fleet = sum(c.size * kinds[c.place.kind].memory_bytes for c in classes)
    states = stage_params(model, model.layers, first=True, last=True) * state_bytes_per_param(model)
    out: list[Conflict] = []
    largest = max(kinds.values(), key=lambda k: k.memory_bytes)
    if not _trainer_fits(cost, classes):
        devices = caps.train_max_devices
        scope = "the fleet" if devices is None else f"{devices} device(s) of at most"
        have = fleet if devices is None else largest.memory_bytes
        out.append(
            Conflict(
                limit="memory",
                detail=f"training {model.name} needs {_size(states)} for parameters, gradients and optimiser, activations "
                f"of a {cost.moments.longest:.0f}-token sequence apart; {scope} {_size(have)}",
            )
        )
        if devices is not None:
            out.append(
                Conflict(
                    limit="capability.train_max_devices", detail=f"the trainer runs on at most {devices} device(s)"
                )
            )
    if not any(replica_shapes(cost, classes, k) for k in kinds):
        tp = max(tp_degrees(problem, caps.rollout_max_tp), default=1)
        need = replica_weight_bytes(model, tp, caps.rollout_max_pp)
        out.append(
            Conflict(
                limit="memory",
                detail=f"a rollout replica of {model.name} needs {_size(need)} of weights on each device at tp {tp} x pp "
                f"{caps.rollout_max_pp}, and KV for {cost.moments.longest:.0f} tokens; the largest device has "
                f"{_size(largest.memory_bytes)}",
            )
        )
        out.append(Conflict(limit="capability.rollout_max_tp", detail=f"at most {caps.rollout_max_tp}"))
    return out


def _trainer_fits(cost: CostModel, classes: Sequence[DeviceClass]) -> bool:
    """Whether some trainer fits on all devices that may train."""
    counts = [c.size - len(c.must_roll) for c in classes]
    return next(improving_trainers(Columns(cost), classes, counts), None) is not None


def _size(n: float) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e8 else f"{n / 1e6:.1f} MB"
