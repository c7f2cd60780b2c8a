"""Slow devices are planned for by the machine: what slows one (heat, a power cap, another tenant) mostly slows its mates.

They are judged one after the other, as each closes its blocks. So a plan for one that was just found slow waits, no longer than a
gathering of joins does, while a mate is in doubt; and one that was in doubt when its mates were planned for and is judged slow
after all does not wait for the cool-down, which is meant for what changes anew.
"""

from collections.abc import Collection

from runtime.core.state import ClusterState


def mates_in_doubt(state: ClusterState, doubtful: Collection[str]) -> frozenset[str]:
    """Devices in doubt on machines of which another was found slow since slow devices were last planned for."""
    planned = frozenset() if state.drift_planned is None else state.drift_planned.slow
    machines = {d.node for d in state.present if d.speed < 1 and d.id not in planned}
    return frozenset(d.id for d in state.present if d.id in doubtful and d.speed >= 1 and d.node in machines)


def newcomers(state: ClusterState) -> frozenset[str]:
    """Slow devices that were only in doubt when others of their machine were last planned for."""
    last = state.drift_planned
    if last is None:
        return frozenset()
    machines = {d.node for d in state.present if d.id in last.slow}
    late = last.doubtful - last.slow
    return frozenset(d.id for d in state.present if d.speed < 1 and d.id in late and d.node in machines)
