"""Weight update: how many bytes new weights are and how long they take to reach a replica."""

from planner.cluster import Link
from planner.cost.assumptions import Assumptions
from planner.cost.context import Context
from planner.model import ModelSpec


def delta_bytes(model: ModelSpec, a: Assumptions) -> float:
    """Bytes of the elements that one optimiser step changes, with their positions; never more than all weights.

    The share that changes is known of bf16. In a wider type nearly every weight changes, so there all are sent.
    """
    if model.dtype_bytes != 2:
        return float(model.weight_bytes)
    changed = model.params * a.delta_changed_share
    return min(float(model.weight_bytes), changed * (model.dtype_bytes + a.delta_position_bytes))


def update_bytes(model: ModelSpec, full_every: int, a: Assumptions | None = None) -> float:
    """Bytes of an update in the mean: one in `full_every` is all weights, the others are deltas. A replica that starts takes all
    weights; this is rare and not counted."""
    full = float(model.weight_bytes)
    return full if full_every == 1 else (full + (full_every - 1) * delta_bytes(model, a or Assumptions())) / full_every


def swap_s(ctx: Context, kind_name: str) -> float:
    """Seconds that a replica stops for new weights, whatever their size: as measured on the kind; else of weights that lie in its
    second buffer the time of one copy, of others that of all weights also where few are sent, as every tensor is verified."""
    kind, a = ctx.kind(kind_name), ctx.a
    if kind.swap_s is not None:
        return kind.swap_s
    if _local(ctx, kind_name):
        return a.update_fixed_local_s
    return a.swap_s if ctx.direct else a.update_fixed_s * min(1.0, ctx.model.weight_bytes / a.update_fixed_bytes)


def update_s(ctx: Context, kind_name: str, link: Link) -> float:
    """Seconds from published weights to a replica that runs on them, over its slowest hop, in the mean over updates; the swap is
    a part of it.

    A relay tree or pipelined broadcast takes as long as its slowest link, whatever the number of replicas. Plain
    bytes / bandwidth is 4-6 times too fast against published figures of weights that engines load, twice against our own of
    weights sent straight to them, so the efficiency is a calibrated one. `link` comes from `planner.cost.network`, where all
    streams of a link count as one; `planner.cost.routes` says which hop is the slowest.
    """
    a = ctx.a
    efficiency = 1.0 if _local(ctx, kind_name) else a.direct_efficiency if ctx.direct else a.update_efficiency
    size = update_bytes(ctx.model, ctx.weights_full_every, a)
    return swap_s(ctx, kind_name) + link.latency_s + size / (link.bytes_per_s * efficiency)


def _local(ctx: Context, kind_name: str) -> bool:
    """Whether weights come by a file of the same machine."""
    kind = ctx.kind(kind_name)
    return kind.paced or kind.base == "host-cpu"
