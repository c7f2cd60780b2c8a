"""What the state wants to stand where: the plan in force as far as overrides and losses allow it today."""

from planner.plan import Placement
from planner.record import record
from runtime.core.fleet_event import UnitRole
from runtime.core.state import ClusterState

BACKOFF_FIRST_S = 2.0
BACKOFF_LONGEST_S = 60.0
QUARANTINE_AFTER = 5  # failures without a healthy stretch between


@record
class Wish:
    """One unit that should stand on these devices."""

    role: UnitRole
    devices: tuple[str, ...]


def wishes(state: ClusterState) -> tuple[Wish, ...]:
    """The trainer first, then the replicas, as the plan in force has them; what an override or a loss forbids is left
    out at once. Only the trainer stays where it is until the plan that the override led to is there."""
    if state.plan is None:
        return ()
    kept = [p for p in state.plan.plan.placements if not _forbidden(state, p)]
    ordered = sorted(kept, key=lambda p: (p.role != "train", -(p.rate_tokens_per_s or 0.0), p.devices))
    out = []
    for p in ordered:
        assert p.role != "score", "the runtime's capabilities leave all scoring to the trainer"
        out.append(Wish(role=p.role, devices=p.devices))
    return tuple(out)


def slots_of(state: ClusterState) -> dict[str, int]:
    """How many samples the plan in force has each replica decode at once, by the replica's name; without those of which it does
    not say so."""
    placements = () if state.plan is None else state.plan.plan.rollouts
    named = ((state.names.get(p.devices), p.max_running) for p in placements)
    return {name: running for name, running in named if name is not None and running is not None}


def token_shares(state: ClusterState, devices: tuple[str, ...]) -> tuple[float, ...]:
    """Shares of a batch's tokens that the plan in force gives a trainer's devices, one rank each; () for equal ones."""
    train = None if state.plan is None else state.plan.plan.train
    if train is None or train.devices != devices or len(train.stages) != 1:
        return ()
    stage = train.stages[0]
    if not stage.token_shares or len(stage.token_shares) != len(devices):
        return ()
    by_device = dict(zip(stage.devices, stage.token_shares, strict=True))
    return tuple(by_device[d] for d in devices)


def _forbidden(state: ClusterState, placement: Placement) -> bool:
    if any(_gone(state, d) for d in placement.devices):
        return True
    if placement.role == "train" and state.need is not None:
        return False
    return any(against_override(state, d, placement.role) for d in placement.devices)


def _gone(state: ClusterState, device: str) -> bool:
    known = state.devices.get(device)
    return known is None or bool(known.lost)


def against_override(state: ClusterState, device: str, role: str) -> str:
    """Why an operator's word or a quarantine forbids `role` on the device; "" when it does not."""
    excluded = state.excluded(device)
    if excluded:
        return excluded
    pin = state.override(device, "pin")
    return f"pinned to {pin.role}" if pin is not None and pin.role != role else ""


def backoff_s(state: ClusterState, device: str, now_s: float) -> float:
    """Seconds until a unit may be started on the device again after failures: at once after the first, then doubling."""
    known = state.devices.get(device)
    if known is None or known.failures <= 1:
        return 0.0
    wait_s = min(BACKOFF_LONGEST_S, BACKOFF_FIRST_S * 2.0 ** (known.failures - 2))
    return max(0.0, known.failed_at_s + wait_s - now_s)
