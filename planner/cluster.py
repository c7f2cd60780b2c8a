"""The cluster graph G_D: device kinds, devices and the links between them."""

import dataclasses
import math
from collections.abc import Iterable, Mapping

from planner.errors import InvalidInput
from planner.record import record, replace

# Over host memory, as NCCL takes no card twice: 269 MB of weights came to the other part in 0.11 s while it generated
# (docs/gpu-runs.md), 0.45 of this, which is what weights sent straight reach of any link (`Assumptions.direct_efficiency`).
PART_LINK_BYTES_PER_S = 5.4e9


def _positive(owner: str, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not value > 0:
            raise InvalidInput(f"{owner}.{name} must be positive", got=value, expected="> 0")


@record
class DeviceKind:
    """What one model of accelerator can do. Figures are datasheet peaks (dense bf16); efficiency is the cost model's."""

    name: str
    peak_flops: float  # FLOP/s, dense bf16
    hbm_bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float  # one way, to a peer of the same node (NVLink or PCIe)
    price_usd_per_h: float | None = None  # None: no price configured; never 0 for "unknown"
    launch_s: float = 2.0e-5  # floor of one decode step a layer's kernels cost (launch overhead)
    train_efficiency: float = 1.0  # measured over modelled training rate; 1: not calibrated
    rollout_efficiency: float = 1.0  # measured over modelled generation rate; 1: not calibrated
    decode_floor_s: float = (
        0.0  # what a layer of a decode step costs on top of its kernels, as they are at efficiency 1
    )
    prefill_efficiency: float = (
        1.0  # of prefill beside what `rollout_efficiency` says of whole steps; 1: not calibrated
    )
    recompute_efficiency: float = 1.0  # of prefixes computed anew after an update, beside those two; 1: not calibrated
    prefill_sample_s: float = 0.0  # what a sample that begins costs those who decode beyond its tokens' prefill
    recompute_sample_s: float = 0.0  # what one whose prefix is computed anew costs beyond that
    slots_used: float = 1.0  # share of a replica's samples that decode: the others wait to be let in together
    swap_s: float | None = None  # for which new weights stop a replica, their way over links apart; None: not measured
    train_floor_s: float = 0.0  # what a layer of one micro-batch costs a training step on top of its kernels
    train_fixed_s: float = 0.0  # what a training step costs whatever its batch
    checkpoint_s: float = 0.0  # of that, what checkpoints come to, in the mean over steps
    source: str = ""  # where the figures come from
    paced: bool = False  # real work on a CPU at a declared speed
    slow_of: str = ""  # the kind whose devices these are, where they run slower than others of it
    part_of: str = ""  # the kind of the cards that these devices take turns on
    card_share: float = 1.0  # of such a card's speed that kernels get; it is in peak_flops and hbm_bytes_per_s

    @property
    def measured_as(self) -> str:
        """The kind whose measured rates hold for this one: itself, or that of which it is slow."""
        return self.slow_of or self.name

    @property
    def base(self) -> str:
        """The kind of card: its curves, kernels and links hold for parts of it and for slow ones."""
        return self.part_of or self.measured_as

    def at(self, share: float, name: str) -> "DeviceKind":
        """The same at a share of its speed, under a name of its own: figures, curves, tables and links stay those of the kind."""
        return replace(
            self,
            name=name,
            train_efficiency=self.train_efficiency * share,
            rollout_efficiency=self.rollout_efficiency * share,
            slow_of=self.measured_as,
        )

    def in_parts(self, parts: int) -> "DeviceKind":
        """What one of `parts` users of a card has that take turns on it: an equal part of its memory and its price, and of its speed
        what is sure while all have work for it. What the host does takes no longer for that: floors and launches stay as they are.
        Parts of one card reach each other over the host's memory.
        """
        price = self.price_usd_per_h
        return replace(
            self.sharing(1 / parts),
            link_bytes_per_s=min(self.link_bytes_per_s, PART_LINK_BYTES_PER_S),
            name=part_name(self.name, parts),
            part_of=self.name,
            memory_bytes=self.memory_bytes / parts,
            price_usd_per_h=None if price is None else price / parts,
        )

    def sharing(self, share: float) -> "DeviceKind":
        """The same with so much of the card for its kernels."""
        return replace(
            self,
            peak_flops=self.peak_flops * share,
            hbm_bytes_per_s=self.hbm_bytes_per_s * share,
            card_share=self.card_share * share,
        )

    def undivided(self) -> "DeviceKind":
        """The same with the whole card for its kernels."""
        return self if self.card_share == 1 else replace(self.sharing(1 / self.card_share), card_share=1.0)

    def __post_init__(self) -> None:
        _positive(
            f"kind {self.name!r}",
            peak_flops=self.peak_flops,
            hbm_bytes_per_s=self.hbm_bytes_per_s,
            memory_bytes=self.memory_bytes,
            link_bytes_per_s=self.link_bytes_per_s,
            train_efficiency=self.train_efficiency,
            rollout_efficiency=self.rollout_efficiency,
            prefill_efficiency=self.prefill_efficiency,
            recompute_efficiency=self.recompute_efficiency,
            slots_used=self.slots_used,
            card_share=self.card_share,
        )
        _positive(f"kind {self.name!r}", swap_s=self.swap_s)
        if self.price_usd_per_h is not None and self.price_usd_per_h < 0:
            raise InvalidInput(
                f"kind {self.name!r}.price_usd_per_h is negative", got=self.price_usd_per_h, expected=">= 0"
            )
        if self.slots_used > 1:
            raise InvalidInput(f"kind {self.name!r}.slots_used is above 1", got=self.slots_used, expected="at most 1")
        for field in (
            "launch_s", "decode_floor_s", "prefill_sample_s", "recompute_sample_s", "train_floor_s", "train_fixed_s", "checkpoint_s",
        ):  # fmt: skip
            if getattr(self, field) < 0:
                raise InvalidInput(f"kind {self.name!r}.{field} is negative", got=getattr(self, field), expected=">= 0")


def part_name(kind: str, parts: int) -> str:
    """The kind of the devices that cards of a kind are in so many parts."""
    return kind if parts == 1 else f"{kind} 1/{parts}"


def whole_of(name: str) -> tuple[str, int]:
    """(kind of the cards, parts) of a kind: what `part_name` was made of."""
    kind, slash, parts = name.rpartition(" 1/")
    return (kind, int(parts)) if slash and parts.isdigit() else (name, 1)


@record
class Device:
    """One accelerator. `id` is its identity for ever (a GPU's UUID); `index` is for display only."""

    id: str
    kind: str
    node: str
    region: str = "local"
    index: int = 0


@record
class Link:
    """A link class. Bandwidth and latency are one way; a round trip (what `ping` prints) is twice the latency.

    Over long distances one TCP stream reaches less than the link carries, so a transfer may use `streams` of them at
    `bytes_per_s` each. All that the cost model sends (weights, gradients, activations of a micro-batch) is bulk and uses
    every stream: `bulk()`. A message so small that splitting it would not help costs its latency, which is the same
    with any number of streams.
    """

    latency_s: float
    bytes_per_s: float  # of one stream
    streams: int = 1
    egress_usd_per_gb: float = 0.0  # what the provider bills for a decimal gigabyte that leaves over it

    def __post_init__(self) -> None:
        rates = math.isfinite(self.latency_s) and math.isfinite(self.bytes_per_s)
        if not rates or self.latency_s < 0 or not self.bytes_per_s > 0:
            raise InvalidInput("link needs latency_s >= 0 and bytes_per_s > 0", got=(self.latency_s, self.bytes_per_s))
        if self.streams < 1:
            raise InvalidInput("link.streams must be at least 1", got=self.streams, expected=">= 1")
        if not (math.isfinite(self.egress_usd_per_gb) and self.egress_usd_per_gb >= 0):
            raise InvalidInput("link.egress_usd_per_gb is negative", got=self.egress_usd_per_gb, expected=">= 0")

    def bulk(self) -> "Link":
        """The link as a bulk transfer sees it: one stream that is as fast as all of them together."""
        if self.streams == 1:
            return self
        return Link(
            latency_s=self.latency_s,
            bytes_per_s=self.bytes_per_s * self.streams,
            egress_usd_per_gb=self.egress_usd_per_gb,
        )


@record
class Cluster:
    """Devices and the rule for the link between any two of them.

    The link between devices a and b is, first match wins: same node -> the kind's own `link_bytes_per_s` (the slower
    of the two kinds); same region and same kind -> `same_kind`; same region -> `cross_kind`; else the entry of
    `regions` for the (sorted) pair, else `cross_region`. A pair of regions has one link for both directions. Slow devices of a
    kind and parts of its cards are of that kind here.
    """

    kinds: Mapping[str, DeviceKind]
    devices: tuple[Device, ...]
    same_kind: Link
    cross_kind: Link
    cross_region: Link = Link(latency_s=0.03, bytes_per_s=6.25e8)
    regions: Mapping[tuple[str, str], Link] = dataclasses.field(default_factory=dict)
    intra_node_latency_s: float = 1.0e-5
    host_memory_bytes: Mapping[str, float] = dataclasses.field(default_factory=dict)  # by node; absent: not checked

    def __post_init__(self) -> None:
        if not (math.isfinite(self.intra_node_latency_s) and self.intra_node_latency_s >= 0):
            raise InvalidInput(
                "cluster.intra_node_latency_s is negative", got=self.intra_node_latency_s, expected=">= 0"
            )
        for node, size in self.host_memory_bytes.items():
            _positive("cluster.host_memory_bytes", **{node: size})
        for pair in self.regions:
            if not pair[0] < pair[1]:
                raise InvalidInput(
                    "regions are linked as sorted pairs of two", where="cluster.regions", got=pair, expected="a < b"
                )
        seen: set[str] = set()
        for d in self.devices:
            if d.id in seen:
                raise InvalidInput("device id is not unique", where="cluster.devices", got=d.id)
            seen.add(d.id)
            if d.kind not in self.kinds:
                raise InvalidInput(
                    f"device {d.id!r} is of an unknown kind",
                    where="cluster.devices",
                    got=d.kind,
                    expected=", ".join(sorted(self.kinds)) or "a declared kind",
                )

    def device(self, device_id: str) -> Device:
        """The device of that id; InvalidInput where there is none."""
        for d in self.devices:
            if d.id == device_id:
                return d
        raise InvalidInput("no such device", got=device_id, expected=", ".join(d.id for d in self.devices))

    def kind_of(self, device_id: str) -> DeviceKind:
        """The kind of the device of that id."""
        return self.kinds[self.device(device_id).kind]

    def link(self, a: Device, b: Device) -> Link:
        """The link between two different devices."""
        if a.node == b.node:
            rate = min(self.kinds[a.kind].link_bytes_per_s, self.kinds[b.kind].link_bytes_per_s)
            return Link(latency_s=self.intra_node_latency_s, bytes_per_s=rate)
        if a.region == b.region:
            return self.inside_region(a.kind, b.kind)
        pair = (a.region, b.region) if a.region <= b.region else (b.region, a.region)
        return self.regions.get(pair, self.cross_region)

    def inside_region(self, a: str, b: str) -> Link:
        """The link between machines of two kinds in one region."""
        return self.same_kind if self.kinds[a].base == self.kinds[b].base else self.cross_kind


def fleet_usd_per_h(kinds: Mapping[str, DeviceKind], names: Iterable[str]) -> float | None:
    """What devices of the kinds named cost together an hour; None unless every one has a price (unknown is never 0)."""
    prices = [kinds[name].price_usd_per_h if name in kinds else None for name in names]
    known = [p for p in prices if p is not None]
    return sum(known) if known and len(known) == len(prices) else None
