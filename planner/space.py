"""The plan space, as data: which devices may take which role, and the shapes replicas and trainers may have.

Rollout replicas are of one device kind, TP inside a machine, PP over machines only where memory asks. The trainer is a
pipeline of at most two kind-blocks; every block has its own TP and DP and one or more stages. TP degrees are powers of
two that divide heads and MLP. Where the trainer can do it (`Capabilities.train_mixed_dp`) it may instead be one stage whose
DP ranks are of two kinds, all of one TP degree, each with its share of the tokens.
"""

from collections.abc import Mapping, Sequence

from planner.cluster import Device
from planner.cost.decode import ReplicaShape
from planner.cost.memory import tp_divides
from planner.cost.model import CostModel
from planner.cost.network import Place
from planner.override import Override
from planner.problem import Problem
from planner.record import record

TP_DEGREES = (1, 2, 4, 8)


@record
class DeviceClass:
    """Interchangeable devices of one kind in one machine, by what overrides let them do. The devices of a frozen placement
    are a class of their own."""

    place: Place
    free: tuple[str, ...]
    must_train: tuple[str, ...] = ()
    must_roll: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Devices of the class, whatever their role."""
        return len(self.free) + len(self.must_train) + len(self.must_roll)


def role_limits(overrides: tuple[Override, ...]) -> Mapping[str, str]:
    """What each overridden device must do: "train", "rollout" or "idle". The last pin or keep counts, a freeze before them;
    a cordon always wins. Of a keep or freeze only a resolved one says a role (`planner.resolve`)."""
    out: dict[str, str] = {}
    for kinds in (("pin", "keep"), ("freeze",)):
        for o in overrides:
            if o.kind in kinds and o.role is not None:
                out[o.device] = o.role
    for o in overrides:
        if o.kind in ("cordon", "drain"):
            out[o.device] = "idle"
    return out


def device_classes(problem: Problem) -> tuple[DeviceClass, ...]:
    """The usable devices by (machine, kind): kind by kind, larger classes first, machines that look alike together.

    The order depends on names of kinds and regions only, so that relabelled problems get the same plan.
    """
    limits = role_limits(problem.overrides)
    frozen = _frozen(problem)
    found: dict[tuple[Place, int], dict[str, list[Device]]] = {}
    machines: dict[str, list[tuple[str, str]]] = {}
    for d in problem.cluster.devices:
        role = limits.get(d.id, "free")
        if role != "idle":
            place = Place(node=d.node, kind=d.kind, region=d.region)
            found.setdefault((place, frozen.get(d.id, -1)), {}).setdefault(role, []).append(d)
            machines.setdefault(d.node, []).append((d.kind, role))
    classes = [
        DeviceClass(
            place=place,
            free=tuple(d.id for d in roles.get("free", ())),
            must_train=tuple(d.id for d in roles.get("train", ())),
            must_roll=tuple(d.id for d in roles.get("rollout", ())),
        )
        for (place, _), roles in found.items()
    ]
    return tuple(sorted(classes, key=lambda c: (c.place.kind, c.place.region, -c.size, sorted(machines[c.place.node]))))


def _frozen(problem: Problem) -> Mapping[str, int]:
    """Each device under a freeze with the number of its placement in the plan in force."""
    held = {o.device for o in problem.overrides if o.kind == "freeze"}
    force = problem.in_force
    if not held or force is None:
        return {}
    return {d: i for i, p in enumerate(force.placements) for d in p.devices if d in held}


def tp_degrees(problem: Problem, cap: int) -> tuple[int, ...]:
    """TP degrees that the model and a capability allow."""
    return tuple(t for t in TP_DEGREES if t <= cap and tp_divides(problem.model, t))


def replica_shapes(cost: CostModel, classes: Sequence[DeviceClass], kind: str) -> tuple[ReplicaShape, ...]:
    """Rollout shapes of one kind that fit in memory. PP > 1 only where no TP degree inside a machine fits alone."""
    caps = cost.problem.capabilities
    sizes = [c.size for c in classes if c.place.kind == kind]
    degrees = [t for t in tp_degrees(cost.problem, caps.rollout_max_tp) if t <= max(sizes, default=0)]
    single = [ReplicaShape(kind=kind, tp=t) for t in degrees]
    found = [s for s in single if cost.running_limit(s) > 0]
    if found:
        return tuple(found)
    pipelines = [
        ReplicaShape(kind=kind, tp=t, pp=pp)
        for t in degrees
        for pp in range(2, caps.rollout_max_pp + 1)
        if t * pp <= sum(sizes)
    ]
    return tuple(s for s in pipelines if cost.running_limit(s) > 0)


@record
class BlockShape:
    """Part of a trainer: `pp` stages of one kind, each of `dp` groups of `tp` devices.

    Two blocks of one stage each and one TP degree may be a single stage with DP ranks of two kinds: then the second joins.
    """

    kind: str
    tp: int
    dp: int
    pp: int
    joins: bool = False  # its DP ranks are of the stage of the block before it

    @property
    def devices(self) -> int:
        """Devices the block takes."""
        return self.tp * self.dp * self.pp


def is_mixed(blocks: Sequence[BlockShape]) -> bool:
    """Whether these blocks are the DP ranks of a single stage."""
    return any(b.joins for b in blocks)


def block_shapes(problem: Problem, kind: str, node_sizes: tuple[int, ...], devices: int) -> tuple[BlockShape, ...]:
    """All blocks of one kind on machines of those sizes, of at most `devices` devices."""
    caps = problem.capabilities
    limit = min(devices, caps.train_max_devices or devices)
    out: list[BlockShape] = []
    for tp in tp_degrees(problem, caps.train_max_tp):
        chunks = sum(n // tp for n in node_sizes)
        for pp in range(1, min(caps.train_max_pp, problem.model.layers) + 1):
            for dp in range(1, min(chunks, limit // tp) // pp + 1):
                if dp <= problem.workload.samples_per_step:
                    out.append(BlockShape(kind=kind, tp=tp, dp=dp, pp=pp))
    return tuple(out)
