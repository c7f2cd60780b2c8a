"""Why there is no plan: the limits that cannot hold together."""

from collections.abc import Sequence

from planner.columns import Columns
from planner.cost.memory import replica_weight_bytes, stage_params, state_bytes_per_param
from planner.cost.model import CostModel
from planner.override import Override
from planner.problem import Problem
from planner.schedulers.areal_hex.training import improving_trainers
from planner.solution import Conflict
from planner.space import DeviceClass, device_classes, replica_shapes, role_limits, tp_degrees


def conflicts(cost: CostModel) -> tuple[Conflict, ...]:
    """The conflicting limits of a problem without a plan. Never empty."""
    problem = cost.problem
    classes = device_classes(problem)
    found = _devices(problem, classes) or _pins(problem, classes) or _memory(cost, classes)
    if not found:
        found = [
            Conflict(
                limit="devices",
                detail=f"no split of the {sum(c.size for c in classes)} usable devices holds both a trainer and a replica",
            )
        ]
    return tuple(found)


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
    if len(kinds) > min(2, caps.train_max_kinds):
        limit = Conflict(
            limit="capability.train_max_kinds",
            detail=f"the trainer spans at most {min(2, caps.train_max_kinds)} kind(s), pins ask for {', '.join(sorted(kinds))}",
        )
        return [limit, *(pins[d] for d in train)]
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
