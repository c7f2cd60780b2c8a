"""Weight update: how long new weights take to reach a replica, and whom that stops."""

from planner.cluster import Link
from planner.cost.context import Context


def update_s(ctx: Context, kind_name: str, link: Link) -> float:
    """Seconds from published weights to a replica that runs on them, over its slowest hop.

    A relay tree or pipelined broadcast takes as long as its slowest link, whatever the number of replicas. Plain
    bytes / bandwidth is 4-6 times too fast against published figures, so the efficiency is a calibrated one. `link` comes from
    `planner.cost.network`, where all streams of a link count as one; `planner.cost.routes` says which hop is the slowest.
    """
    kind, a = ctx.kind(kind_name), ctx.a
    local = kind.paced or kind.name == "host-cpu"
    efficiency = 1.0 if local else a.update_efficiency
    size = ctx.model.weight_bytes
    fixed = a.update_fixed_local_s if local else a.update_fixed_s * min(1.0, size / a.update_fixed_bytes)
    return fixed + link.latency_s + size / (link.bytes_per_s * efficiency)
