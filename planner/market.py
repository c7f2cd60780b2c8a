"""What can be rented: instances with their devices, prices and places, and what data costs between regions.

An instance is rented whole: an idle device in it costs as much as a busy one. A mix is a number of instances of each type.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from planner.cluster import Cluster, Device, DeviceKind
from planner.errors import InvalidInput
from planner.problem import Problem
from planner.record import record, replace

Counts = tuple[int, ...]  # instances of each type, in the order of the market


@record
class Instance:
    """One type of instance in one region. Prices are USD an hour for the whole instance."""

    name: str
    kind: str  # of its devices
    gpus: int
    region: str = "local"
    usd_per_h: float  # on demand
    spot_usd_per_h: float | None = None  # None: not offered
    available: int | None = None  # whole instances; None: no limit is known
    node_memory_bytes: float | None = None  # host memory

    def __post_init__(self) -> None:
        where = f"instance {self.name!r}"
        if self.gpus < 1:
            raise InvalidInput(f"{where} needs devices", got=self.gpus, expected="at least 1")
        for price in (self.usd_per_h, self.spot_usd_per_h):
            if price is not None and not 0 <= price < math.inf:
                raise InvalidInput(f"the price of {where} is not one", got=price, expected="USD an hour, 0 or more")
        if self.available is not None and self.available < 0:
            raise InvalidInput(f"{where} is available less than never", got=self.available, expected="0 or more")

    def price(self, spot: bool) -> float:
        """USD an hour: the spot price where `spot` is asked for and offered."""
        return self.spot_usd_per_h if spot and self.spot_usd_per_h is not None else self.usd_per_h


@record
class Egress:
    """The price of a gigabyte (1e9 bytes) that leaves `origin` for `to`."""

    origin: str
    to: str
    usd_per_gb: float

    def __post_init__(self) -> None:
        if not 0 <= self.usd_per_gb < math.inf:
            raise InvalidInput("an egress price is 0 or more", got=self.usd_per_gb, expected="USD a gigabyte")


@record
class Market:
    """Everything on offer."""

    name: str
    instances: tuple[Instance, ...]
    egress: tuple[Egress, ...] = ()
    source: str = ""  # where the prices come from
    as_of: str = ""  # when they held

    def __post_init__(self) -> None:
        if not any(i.available != 0 for i in self.instances):
            raise InvalidInput(f"market {self.name!r} offers nothing", expected="at least one instance")
        for what, keys in (
            ("instance", [(i.name, i.region) for i in self.instances]),
            ("egress price", [(e.origin, e.to) for e in self.egress]),
        ):
            twice = [k for k, n in Counter(keys).items() if n > 1]
            if twice:
                raise InvalidInput(f"an {what} is listed twice", where=f"market {self.name!r}", got=twice[0])

    def title(self, i: int) -> str:
        """The name of a type, with its region where another region has one of that name."""
        it = self.instances[i]
        return it.name if sum(x.name == it.name for x in self.instances) == 1 else f"{it.name}.{it.region}"

    def usd_per_h(self, counts: Sequence[int], *, spot: bool = False) -> float:
        """The price of a mix."""
        return math.fsum(n * i.price(spot) for n, i in zip(counts, self.instances, strict=True))

    def unpriced(self, regions: Sequence[str]) -> tuple[str, str] | None:
        """Two of those regions without an egress price from the first to the second."""
        known = {(e.origin, e.to) for e in self.egress}
        pairs = ((a, b) for a in regions for b in regions if a != b)
        return next((p for p in pairs if p not in known), None)

    def nodes(self, counts: Sequence[int]) -> Iterator[tuple[int, str]]:
        """(type, name) of every machine of a mix; a larger mix has the machines of a smaller one."""
        for i, n in enumerate(counts):
            for j in range(n):
                yield i, f"{self.title(i)}-{j}"

    def devices(self, counts: Sequence[int]) -> tuple[Device, ...]:
        """The devices of a mix, called "<instance>-<number>/gpu<index>"."""
        return tuple(
            Device(id=f"{node}/gpu{g}", kind=it.kind, node=node, region=it.region, index=g)
            for i, node in self.nodes(counts)
            for it in (self.instances[i],)
            for g in range(it.gpus)
        )


def market_of(cluster: Cluster) -> Market:
    """The machines of a fleet as a market: what there is of each type, at the price of its devices.

    InvalidInput for a machine of several kinds, and where a kind has no price.
    """
    nodes: dict[str, list[Device]] = {}
    for d in cluster.devices:
        nodes.setdefault(d.node, []).append(d)
    types: Counter[tuple[str, int, str]] = Counter()
    for node, devices in nodes.items():
        kinds = sorted({d.kind for d in devices})
        if len(kinds) > 1:
            raise InvalidInput("a machine of several kinds has no price as a whole", got=node, expected="one kind")
        if cluster.kinds[kinds[0]].price_usd_per_h is None:
            raise InvalidInput(
                f"kind {kinds[0]!r} has no price", where="fleet.prices", hint="set its USD per hour, or name a --market"
            )
        types[kinds[0], len(devices), devices[0].region] += 1
    return Market(
        name="the fleet",
        instances=tuple(
            Instance(
                name=f"{n}x{kind}",
                kind=kind,
                gpus=n,
                region=region,
                usd_per_h=n * (cluster.kinds[kind].price_usd_per_h or 0.0),
                available=count,
            )
            for (kind, n, region), count in types.items()
        ),
    )


def on_market(problem: Problem, market: Market, kinds: Mapping[str, DeviceKind]) -> Problem:
    """`problem` with nothing rented yet: links and kinds as they are, further kinds of the market from `kinds`.

    InvalidInput for a kind that is in neither, and for overrides, which name devices that are not rented yet.
    """
    if problem.overrides:
        raise InvalidInput("overrides name devices of the fleet, a market has others", got=problem.overrides[0].device)
    known = {**kinds, **problem.cluster.kinds}
    for it in market.instances:
        if it.kind not in known:
            raise InvalidInput(
                f"instance {it.name!r} has devices of an unknown kind",
                where=f"market {market.name!r}",
                got=it.kind,
                expected=", ".join(sorted(known)),
                hint=f"declare [fleet.kinds.{it.kind}] in the configuration with peak_flops, hbm, memory and link",
            )
    mine = {k: known[k] for k in dict.fromkeys(i.kind for i in market.instances)}
    cluster = replace(problem.cluster, kinds={**problem.cluster.kinds, **mine}, devices=())
    return replace(problem, cluster=cluster, objective="throughput", floor_tokens_per_s=None, in_force=None)


def rented(problem: Problem, market: Market, counts: Sequence[int]) -> Problem:
    """A problem of `on_market` with the devices of a mix."""
    cluster: Cluster = dataclasses.replace(problem.cluster, devices=market.devices(counts))
    return replace(problem, cluster=cluster)
