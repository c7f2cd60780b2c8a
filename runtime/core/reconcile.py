"""next_steps: the first safe batch of a path from what stands to what should stand. Derived each tick, never stored.

Drain first: a unit leaves its devices (drain or quiesce, then stop) before another is started there. No device is ever
held by two bodies (a dead body holds its devices until it is gone). The path is searched so that a replica serves
throughout, as far as any order allows it.
"""

from collections.abc import Iterable, Sequence

from planner.record import record
from runtime.core.action import (
    DrainReplica,
    QuiesceTrainer,
    StartReplica,
    StartTrainer,
    Step,
    StopReplica,
    StopTrainer,
    describe,
)
from runtime.core.actual import Body
from runtime.core.order import Mover, find_order
from runtime.core.state import ClusterState
from runtime.core.target import Wish, backoff_s, token_shares, wishes

TRAINER = "t0"


@record
class Steps:
    """What to begin now, what is under way and what comes after. `now` may be empty: then something is waited for."""

    now: tuple[Step, ...]
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    waived: str = ""  # why no replica will serve for a while


@record
class Blocked:
    """Nothing can be done, and nothing under way will change that."""

    reason: str
    options: tuple[str, ...] = ()


@record
class Converged:
    """Reality is as wished: no action."""


Next = Steps | Blocked | Converged


def next_steps(actual: Sequence[Body], state: ClusterState, now_s: float, *, most_starts: int = 8) -> Next:
    """The first safe batch towards the plan in force. Pure and idempotent: the same input gives the same steps, and a
    state that is as wished gives none. `now_s` (unix seconds) only counts for back-off after failures."""
    wanted = wishes(state)
    kept = _match(actual, wanted)
    leaving = [b for b in actual if id(b) not in kept]
    met = {id(w) for w in kept.values()}
    open_wishes = [w for w in wanted if id(w) not in met]
    if any(b.role == "train" and b.phase == "serving" for b in leaving) and not _can_move(state, wanted):
        leaving = [b for b in leaving if not (b.role == "train" and b.phase == "serving")]
    going = {id(b) for b in leaving}
    stays = [b for b in actual if id(b) not in going]

    steps = [*_clear(leaving, state)]
    starts, bars = _starts(actual, open_wishes, state, now_s, most_starts)
    again = [_start(b.unit, b.epoch, b.role, b.devices, state) for b in stays if b.phase == "ordered"]
    cleared = {s.id for s in steps}
    rest = [b for b in leaving if _stop(b).id not in cleared]
    leaves, later, waived = _leave(rest, stays, open_wishes, actual, may_waive=state.need is None)
    now = (*steps, *again, *starts, *leaves)
    running = tuple(_under_way(actual, going))
    if now or running:
        return Steps(now=now, running=running, waiting=(*later, *bars), waived=waived)
    if not leaving and not open_wishes:
        return Converged()
    if state.need is not None or (bars and all("more s after" in b for b in bars)):
        return Steps(now=(), waiting=(*later, *bars))
    return _blocked(leaving, bars, later)


def _match(actual: Sequence[Body], wanted: Sequence[Wish]) -> dict[int, Wish]:
    """Bodies that are what some wish wants, by identity of the body."""
    fitting: dict[tuple[str, tuple[str, ...]], Body] = {}
    for b in actual:
        if not b.leaving and b.phase in ("ordered", "starting", "serving", "unknown"):
            fitting.setdefault((b.role, b.devices), b)
    found = ((fitting.get((w.role, w.devices)), w) for w in wanted)
    return {id(b): w for b, w in found if b is not None}


def _can_move(state: ClusterState, wanted: Sequence[Wish]) -> bool:
    """Whether the trainer has a place to go to, or is not wanted anywhere."""
    goal = next((w for w in wanted if w.role == "train"), None)
    return goal is None or not any(state.excluded(d) for d in goal.devices)


def _start(unit: str, epoch: int, role: str, devices: tuple[str, ...], state: ClusterState) -> Step:
    if role == "train":
        return StartTrainer(trainer=unit, epoch=epoch, devices=devices, shares=token_shares(state, devices))
    return StartReplica(replica=unit, epoch=epoch, devices=devices)


def _stop(b: Body) -> Step:
    if b.role == "train":
        return StopTrainer(trainer=b.unit, epoch=b.epoch)
    return StopReplica(replica=b.unit, epoch=b.epoch)


def _let_go(b: Body) -> Step:
    if b.role == "train":
        return QuiesceTrainer(trainer=b.unit, epoch=b.epoch)
    return DrainReplica(replica=b.unit, epoch=b.epoch)


def _clear(leaving: Iterable[Body], state: ClusterState) -> Iterable[Step]:
    """Stops that can do no harm: the dead, the empty, those that never served and those whose device is gone."""
    for b in leaving:
        gone = any(d not in state.devices or state.devices[d].lost for d in b.devices)
        empty = b.phase == "drained" and b.leased == 0
        if b.phase in ("dead", "ordered", "starting") or empty or gone or _stop_ordered(b, state):
            yield _stop(b)
        elif b.phase == "serving" and b.leaving:
            yield _let_go(b)  # the order was lost on its way


def _stop_ordered(b: Body, state: ClusterState) -> bool:
    unit = state.units.get(b.unit)
    return unit is not None and unit.epoch == b.epoch and unit.ordered("stop")


def _starts(
    actual: Sequence[Body], open_wishes: Sequence[Wish], state: ClusterState, now_s: float, most: int
) -> tuple[list[Step], tuple[str, ...]]:
    """Starts on devices nobody holds, and in words what bars the others."""
    held = {d for b in actual for d in b.devices}
    a_trainer_stands = any(b.role == "train" for b in actual)
    coming = sum(1 for b in actual if b.phase in ("ordered", "starting"))
    taken = {*state.names.values(), *state.units}
    steps: list[Step] = []
    bars: list[str] = []
    for w in open_wishes:
        where = f"{'trainer' if w.role == 'train' else 'replica'} on {', '.join(state.display(d) for d in w.devices)}"
        barred = next((state.excluded(d) for d in w.devices if state.excluded(d)), "")
        wait_s = max(backoff_s(state, d, now_s) for d in w.devices)
        if barred:
            bars.append(f"{where}: {barred}")
        elif held.intersection(w.devices) or (w.role == "train" and a_trainer_stands):
            bars.append(f"{where}: waits for its place")
        elif wait_s > 0:
            failures = max(state.devices[d].failures for d in w.devices)
            bars.append(f"{where}: {wait_s:.0f} more s after {failures} failures")
        elif coming >= most:
            bars.append(f"{where}: waits for {coming} others that start")
        else:
            unit = _unit_for(w, state, taken)
            taken.add(unit)
            known = state.units.get(unit)
            steps.append(_start(unit, 1 if known is None else known.epoch + 1, w.role, w.devices, state))
            coming += 1
    return steps, tuple(bars)


def _unit_for(w: Wish, state: ClusterState, taken: set[str]) -> str:
    """A replica's name belongs to its set of devices for the whole run."""
    if w.role == "train":
        return next((u.id for u in state.units.values() if u.role == "train"), TRAINER)
    if w.devices in state.names:
        return state.names[w.devices]
    n = 0
    while f"r{n}" in taken:
        n += 1
    return f"r{n}"


def _leave(
    leaving: Sequence[Body],
    stays: Sequence[Body],
    open_wishes: Sequence[Wish],
    actual: Sequence[Body],
    *,
    may_waive: bool,
) -> tuple[list[Step], tuple[str, ...], str]:
    """The leaves that are safe now, those that come later in words, and why the floor cannot be kept.

    `may_waive`: without an order that keeps the floor, leave all the same; not while a new plan is on its way."""
    going = [b for b in leaving if b.phase == "serving" and not b.leaving]
    if not going:
        return [], (), ""
    train_goal = {d for w in open_wishes if w.role == "train" for d in w.devices}
    going.sort(key=lambda b: (b.role == "train", not train_goal.intersection(b.devices), b.unit))
    by_unit = {b.unit: b for b in going}
    movers = [Mover(unit=b.unit, devices=b.devices, serves=b.role == "rollout") for b in going]
    serving = sum(1 for b in stays if b.role == "rollout" and b.phase == "serving")
    coming = sum(1 for b in stays if b.role == "rollout" and b.phase in ("ordered", "starting"))
    here = serving + sum(1 for m in movers if m.serves)
    floor, waived = 1, ""
    order = find_order(movers, open_wishes, here + coming, floor)
    if order is None and not may_waive:
        return [], tuple(describe(_let_go(b)) for b in going), ""
    if order is None:
        floor, order = 0, tuple(movers)
        waived = "no order of steps keeps a serving replica throughout"
    steps: list[Step] = []
    for i, m in enumerate(order):
        if m.serves and here - 1 < floor:
            break
        if not m.serves and not _goal_is_ready(train_goal, actual, order[i:]):
            break
        steps.append(_let_go(by_unit[m.unit]))
        here -= 1 if m.serves else 0
    later = tuple(describe(_let_go(by_unit[m.unit])) for m in order[len(steps) :])
    return steps, later, waived if any(isinstance(s, DrainReplica) for s in steps) and here == 0 else ""


def _goal_is_ready(goal: set[str], actual: Sequence[Body], from_here: Sequence[Mover]) -> bool:
    """The trainer leaves only when its new place is free, or is freed after it in the order."""
    after = {m.unit for m in from_here}
    return not any(goal.intersection(b.devices) and b.unit not in after for b in actual)


def _under_way(actual: Sequence[Body], going: set[int]) -> Iterable[str]:
    for b in actual:
        if b.phase in ("ordered", "starting"):
            yield f"{b.unit} starts"
        elif b.phase == "draining" or (b.leaving and b.phase == "serving"):
            yield f"{b.unit} drains" + (f", holds {b.leased} samples" if b.leased else "")
        elif b.phase == "drained" and b.leased:
            yield f"{b.unit} gives back {b.leased} samples"
        elif b.phase == "unknown":
            yield f"{b.unit} does not answer; waiting until it is known whether it lives"
        elif b.phase in ("dead", "drained") and id(b) in going:
            yield f"{b.unit} is cleared away"


def _blocked(leaving: Sequence[Body], bars: tuple[str, ...], later: tuple[str, ...]) -> Blocked:
    reasons = (*bars, *later, *(f"{b.unit} cannot leave ({b.phase})" for b in leaving if not bars and not later))
    return Blocked(
        reason="; ".join(reasons) or "no safe step",
        options=("uncordon or unpin a device", "hexctl replan", "add a device"),
    )
