"""What an operator's action would do, and how much consent it needs before a command is sent.

L0 acts at once and says how to undo it; L1 asks, with the impact and Cancel focused; L2 asks for a name to be typed.
"""

from collections.abc import Sequence
from typing import Literal

from hexctl.tui.view import numbers as n
from hexctl.tui.view.plan import changes
from hexctl.tui.view.text import Line, Span, clean, line
from planner.record import record
from runtime.api.wire import CommandName, DeviceRow, Snapshot

Level = Literal[0, 1, 2]
Role = Literal["train", "rollout", "idle"]


@record
class Request:
    """A command to come: everything but its key and author."""

    name: CommandName
    device: str | None = None
    role: Role | None = None
    plan_rev: int | None = None
    force: bool = False


@record
class Ask:
    """An action weighed: what to send, what it does, how to confirm it, what takes it back."""

    level: Level
    title: str
    verb: str  # on the button
    impact: tuple[Line, ...]
    requests: tuple[Request, ...]
    undo: tuple[Request, ...] = ()
    type_to_confirm: str = ""


@record
class Refusal:
    """The action makes no sense now; the words say why."""

    why: str


def _names(devices: Sequence[DeviceRow]) -> str:
    shown = ", ".join(clean(d.display) for d in devices[:3])
    return shown if len(devices) <= 3 else f"{shown} and {len(devices) - 3} more"


def _serving(s: Snapshot) -> list[DeviceRow]:
    return [
        d for d in s.devices if d.role == "rollout" and not d.cordoned and d.status not in ("LOST", "HUNG", "cordoned")
    ]


def _training(s: Snapshot) -> list[DeviceRow]:
    return [d for d in s.devices if d.role == "train" and d.status not in ("LOST", "HUNG")]


def weigh(name: CommandName, s: Snapshot, targets: Sequence[DeviceRow], role: Role | None = None) -> Ask | Refusal:
    """Weigh an action on devices (`cordon`, `uncordon`, `drain`, `pin`, `unpin`) or on the plan (`replan`, `approve`, `reject`)."""
    if name in ("approve", "reject"):
        return _consent(name, s)
    if name == "replan":
        return _replan()
    if not targets:
        return Refusal(why="no device is under the cursor")
    last = _takes_last(s, targets, name, role)
    requests = tuple(Request(name=name, device=d.id, role=role, force=bool(last)) for d in targets)
    verb = {"cordon": "Cordon", "uncordon": "Uncordon", "drain": "Drain", "pin": "Pin", "unpin": "Unpin"}[name]
    goal = f" to {role}" if role else ""
    level: Level = 2 if last else 1 if name == "drain" else 0
    return Ask(
        level=level,
        title=f"{verb} {_names(targets)}{goal}?",
        verb=verb,
        impact=(*([line(Span(last, "fault"))] if last else []), *_impact(s, targets)),
        requests=requests,
        undo=_undo(name, targets),
        type_to_confirm=(clean(targets[0].display) if len(targets) == 1 else s.run.id) if last else "",
    )


def _takes_last(s: Snapshot, targets: Sequence[DeviceRow], name: CommandName, role: Role | None) -> str:
    """Words when the action would leave no rollout or no trainer, or touches the whole fleet; else ""."""
    if name in ("uncordon", "unpin"):
        return ""
    ids = {d.id for d in targets}
    serving, training = _serving(s), _training(s)
    if serving and role != "rollout" and all(d.id in ids for d in serving):
        return "No device would generate rollouts: the run stands still until one does."
    if training and role != "train" and all(d.id in ids for d in training) and name != "pin" and not _spare(s, ids):
        return "No device would be left to train on: the run stands still until there is one."
    if training and role in ("rollout", "idle") and all(d.id in ids for d in training):
        return "The trainer must find another device; if there is none, the run stands still."
    if len(targets) > 1 and len(targets) == len(s.devices):
        return "This is the whole fleet."
    return ""


def _spare(s: Snapshot, ids: set[str]) -> bool:
    """Whether a healthy device outside `ids` could take the trainer while another one still generates."""
    return len([d for d in s.devices if d.id not in ids and d.status not in ("LOST", "HUNG") and not d.cordoned]) >= 2


def _impact(s: Snapshot, targets: Sequence[DeviceRow]) -> tuple[Line, ...]:
    """What the snapshot itself says: samples that move on, the share of generation that pauses. Nothing is guessed."""
    out: list[Line] = []
    for d in targets[:4]:
        name = clean(d.replica or "")
        if d.role == "rollout" and name:
            count = "its samples" if d.running is None else f"{d.running} sample{'' if d.running == 1 else 's'}"
            out.append(
                line(
                    Span(name, "strong"),
                    Span(f" serves {count} on {clean(d.display)}; they go on elsewhere from their tokens"),
                )
            )
        elif d.role == "train":
            out.append(
                line(
                    Span(name or "the trainer", "strong"),
                    Span(f" trains on {clean(d.display)}: it moves at the next step, through its checkpoint"),
                )
            )
        else:
            out.append(line(Span(clean(d.display), "strong"), Span(" holds no replica")))
    if len(targets) > 4:
        out.append(line(Span(f"… and {len(targets) - 4} more", "dim")))
    total = sum(d.tokens_per_s or 0.0 for d in s.devices if d.role == "rollout")
    gone = sum(d.tokens_per_s or 0.0 for d in targets if d.role == "rollout")
    if total > 0 and gone > 0:
        out.append(
            line(
                Span("generation ", "dim"),
                Span(n.signed_percent(-gone / total), "warn"),
                Span(" until the fleet is re-planned", "dim"),
            )
        )
    return tuple(out)


def _undo(name: CommandName, targets: Sequence[DeviceRow]) -> tuple[Request, ...]:
    if name in ("cordon", "drain"):  # one that was cordoned before stays so
        return tuple(Request(name="uncordon", device=d.id) for d in targets if not d.cordoned)
    if name == "uncordon":
        return tuple(Request(name="cordon", device=d.id) for d in targets)
    out = []
    for d in targets:  # pin and unpin: back to what each device had before
        before: Role | None = next((r for r in ("train", "rollout", "idle") if r == d.pinned), None)
        out.append(Request(name="pin", device=d.id, role=before) if before else Request(name="unpin", device=d.id))
    return tuple(out)


def _replan() -> Ask:
    """An operator's command is its own consent, also where improvements ask for it."""
    return Ask(
        level=1,
        title="Plan again now?",
        verb="Re-plan",
        impact=(
            line(Span("The planner runs on the fleet as it is now; the run goes on meanwhile.")),
            line(Span("The new plan is put in force at once: replicas may move.", "warn")),
        ),
        requests=(Request(name="replan"),),
    )


def _consent(name: CommandName, s: Snapshot) -> Ask | Refusal:
    if s.proposal is None:
        return Refusal(why="no proposal is open")
    rev = s.proposal.plan.rev
    request = (Request(name=name, plan_rev=rev),)
    if name == "reject":
        return Ask(level=0, title=f"Reject r{rev}?", verb="Reject", impact=(), requests=request)
    moved = changes(s)
    gain = s.proposal.gain_share
    lines = [line(Span(f"{c.device}  ", "strong"), Span(f"{c.now} → {c.proposed}")) for c in moved[:6]]
    if len(moved) > 6:
        lines.append(line(Span(f"… and {len(moved) - 6} more", "dim")))
    if gain is not None:
        lines.append(line(Span("predicted ", "dim"), Span(f"{gain * 100:+.1f} % tok/s".replace("-", n.MINUS), "good")))
    lines.append(line(Span("Replicas that move are drained first; their samples go on from their tokens.", "dim")))
    return Ask(level=1, title=f"Put plan r{rev} in force?", verb="Approve", impact=tuple(lines), requests=request)
