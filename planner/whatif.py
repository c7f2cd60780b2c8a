"""What if: a problem with some changes, and the plans before and after side by side.

A change is `key=value`: `add=8xL40S`, `add=4xH20@eu` (machines of eight, in a region), `remove=node3` (a machine), `remove=node3/gpu0`
(a device), `remove=2xH20` (the last ones of a kind), `eta=8`, `kv=keep|recompute`, `update=rolling|pause|overlapped`,
`price.H20=1.2` (USD an hour).
"""

import re
from collections.abc import Callable, Sequence

from planner.catalogue import CATALOGUE
from planner.cluster import Cluster, Device, DeviceKind
from planner.errors import InvalidInput
from planner.problem import Problem
from planner.record import record, replace
from planner.solution import Feasible, Solution

KEYS = ("add", "remove", "eta", "kv", "update", "price.KIND")
_PER_MACHINE = 8
_MOST = 100_000  # devices that may be added, as many as a configuration may count in one place
_COUNTED = re.compile(r"^(\d+)x([^@]+)(?:@(.+))?$")
_WORDS = {"kv": ("kv_on_update", ("keep", "recompute")), "update": ("update_mode", ("rolling", "pause", "overlapped"))}


@record
class Change:
    """One change, as it was written."""

    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


@record
class Comparison:
    """Solutions of a problem without and with some changes."""

    changes: tuple[Change, ...]
    before: Solution
    after: Solution

    @property
    def gain(self) -> float | None:
        """Tokens/s of the plan after over that before, less 1: predicted by the cost model. None without both plans."""
        if not isinstance(self.before, Feasible) or not isinstance(self.after, Feasible):
            return None
        return self.after.prediction.tokens_per_s / self.before.prediction.tokens_per_s - 1

    @property
    def proven(self) -> tuple[float, float] | None:
        """(least, most) gain of the optimum, given the cost model: the best plan before lies between the plan found and its
        bound, and so does the best plan after."""
        if not isinstance(self.before, Feasible) or not isinstance(self.after, Feasible):
            return None
        a, b = self.before, self.after
        return (
            b.prediction.tokens_per_s / a.bound_tokens_per_s - 1,
            b.bound_tokens_per_s / a.prediction.tokens_per_s - 1,
        )


def parse(text: str) -> tuple[Change, ...]:
    """Changes of a list such as "add=8xL40S,remove=node3"; InvalidInput where one is no KEY=VALUE."""
    out = []
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or not key.strip() or not value.strip():
            raise _nonsense("a change is KEY=VALUE", part.strip(), ", ".join(KEYS))
        out.append(Change(key=key.strip(), value=value.strip()))
    return tuple(out)


def apply(problem: Problem, changes: Sequence[Change]) -> Problem:
    """The problem with the changes, one after the other. InvalidInput for a change that makes no sense."""
    for c in changes:
        if c.key == "add":
            problem = _with_more(problem, c.value)
        elif c.key == "remove":
            problem = without_devices(problem, _meant(problem.cluster, c.value))
        elif c.key == "eta":
            if not c.value.isdigit():
                raise _nonsense("eta is a whole number of steps", c.value, ">= 0")
            problem = replace(problem, workload=replace(problem.workload, eta=int(c.value)))
        elif c.key in _WORDS:
            field, words = _WORDS[c.key]
            if c.value not in words:
                raise _nonsense(f"unknown value of {c.key}", c.value, " or ".join(words))
            problem = replace(problem, workload=replace(problem.workload, **{field: c.value}))
        elif c.key.startswith("price."):
            problem = _priced(problem, c.key.removeprefix("price."), c.value)
        else:
            raise _nonsense("unknown change", str(c), ", ".join(KEYS))
    return problem


def what_if(problem: Problem, changes: Sequence[Change], solve: Callable[[Problem], Solution]) -> Comparison:
    """Solve without and with the changes."""
    other = apply(problem, changes)
    return Comparison(changes=tuple(changes), before=solve(problem), after=solve(other))


def without_devices(problem: Problem, gone: set[str]) -> Problem:
    """The problem without some devices and what overrides say of them."""
    left = tuple(d for d in problem.cluster.devices if d.id not in gone)
    return replace(
        problem,
        cluster=replace(problem.cluster, devices=left),
        overrides=tuple(o for o in problem.overrides if o.device not in gone),
    )


def with_devices(problem: Problem, kind: DeviceKind, count: int, *, region: str | None = None) -> Problem:
    """The problem with new machines of `count` devices of a kind in all, eight a machine at most; without a region, in that
    of the other devices of the kind, else of the first device."""
    cluster = problem.cluster
    if region is None:
        region = next(
            (d.region for d in cluster.devices if d.kind == kind.name),
            cluster.devices[0].region if cluster.devices else "local",
        )
    machines, ids = {d.node for d in cluster.devices}, {d.id for d in cluster.devices}
    more: list[Device] = []
    number = 0
    for i in range(count):
        if i % _PER_MACHINE == 0:
            while f"new{number}" in machines:
                number += 1
            machines.add(f"new{number}")
        node = f"new{number}"
        name = f"{node}/gpu{i % _PER_MACHINE}"
        if name in ids:
            raise _nonsense("a device of that name is there already", name, "another name")
        more.append(Device(id=name, kind=kind.name, node=node, region=region, index=i % _PER_MACHINE))
    kinds = {**cluster.kinds, kind.name: cluster.kinds.get(kind.name, kind)}
    return replace(problem, cluster=replace(cluster, kinds=kinds, devices=(*cluster.devices, *more)))


def _with_more(problem: Problem, value: str) -> Problem:
    found = _COUNTED.match(value)
    if found is None or int(found[1]) < 1:
        raise _nonsense("devices to add are COUNTxKIND", value, 'such as "8xL40S" or "8xL40S@region"')
    if int(found[1]) > _MOST:
        raise _nonsense("more devices than can be planned", value, f"at most {_MOST:,}")
    kinds = {**CATALOGUE, **problem.cluster.kinds}
    if found[2] not in kinds:
        raise _nonsense("no such device kind", found[2], ", ".join(kinds))
    return with_devices(problem, kinds[found[2]], int(found[1]), region=found[3])


def _meant(cluster: Cluster, value: str) -> set[str]:
    """Ids of the devices that `remove` names."""
    gone = {d.id for d in cluster.devices if value in (d.id, d.node)}
    if gone:
        return gone
    found = _COUNTED.match(value)
    machines = ", ".join(sorted({d.node for d in cluster.devices})[:8])
    if found is None:
        raise _nonsense("nothing to remove: no such machine or device", value, machines or "a machine")
    mine = [d.id for d in cluster.devices if d.kind == found[2]]
    count = int(found[1])
    if count < 1 or count > len(mine):
        raise _nonsense("nothing to remove", value, f"1 to {len(mine)} of {found[2]}" if mine else machines)
    return set(mine[-count:])


def _priced(problem: Problem, kind: str, value: str) -> Problem:
    cluster = problem.cluster
    if kind not in cluster.kinds:
        raise _nonsense("price of a kind that is not in the fleet", kind, ", ".join(cluster.kinds))
    try:
        usd = float(value)
    except ValueError:
        usd = -1.0
    if not 0 <= usd < float("inf"):
        raise _nonsense("a price is USD an hour", value, ">= 0")
    kinds = {**cluster.kinds, kind: replace(cluster.kinds[kind], price_usd_per_h=usd)}
    return replace(problem, cluster=replace(cluster, kinds=kinds))


def _nonsense(what: str, got: str, expected: str) -> InvalidInput:
    return InvalidInput(what, where="--what-if", got=got, expected=expected)
