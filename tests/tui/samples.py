"""Snapshots and sources for the console's tests; the ordinary run comes from `hexctl.tui.sample`."""

import asyncio
from collections.abc import Callable, Sequence

from hexctl.tui.app import HexApp
from hexctl.tui.measure import wide_snapshot
from hexctl.tui.sample import NOW_S, device, event_rows, plan_in_force, sample_snapshot, small_fleet
from hexctl.tui.theme import load_theme
from planner.record import replace
from runtime.api.wire import Command, CommandResult, EventRow, FlowView, MigrationView, Snapshot
from runtime.errors import RefusedError, UnreachableError

__all__ = ["NOW_S", "FakeSource", "app_on", "bare_snapshot", "device", "event_rows", "hostile_snapshot", "paced_snapshot",
           "plan_in_force", "quiet_snapshot", "sample_snapshot", "small_fleet", "step_history", "wide_snapshot"]  # fmt: skip

HOSTILE = "[bold red]x[/] \x1b[2J\x1b]52;c;aGk=\x07 \u202eback\u200b 漢字 e\u0301 \n\tend"


def bare_snapshot() -> Snapshot:
    """A daemon that has just started: nothing is known of anything."""
    base = sample_snapshot()
    row = device(0, age_s=None)
    return replace(
        base,
        flow=None,
        flow_age_s=None,
        devices=(row,),
        plan=None,
        proposal=None,
        migration=MigrationView(running=(), waiting=()),
        events=(),
        series={},
        resident_bytes=None,
        run=replace(base.run, state="starting", started_at_s=NOW_S),
    )


def paced_snapshot() -> Snapshot:
    """Four paced CPU devices without a price: no utilisation, memory, power or temperature exists."""
    base = sample_snapshot()
    rows = tuple(
        device(
            i,
            id=f"cpu-{name}",
            display=f"n0/cpu{i}",
            kind=name,
            paced=True,
            role="train" if i == 0 else "rollout",
            status="HOST-BOUND" if i == 3 else "ok",
            replica="t0" if i == 0 else f"r{i - 1}",
            version=41,
            digest="ab12cd",
            tokens_per_s=400.0 - 90 * i,
            predicted_tokens_per_s=390.0 - 90 * i,
            running=None if i == 0 else 6,
            slots=None if i == 0 else 8,
        )
        for i, name in enumerate(("fast", "wide", "wide", "old"))
    )
    assert base.flow is not None
    flow = replace(base.flow, usd_per_h=None, usd_per_mtok=None, metrics={"entropy": 0.4, "step_s": 1.42})
    run = replace(base.run, label="paced", simulation_speed=None, consent="auto")
    return replace(
        base, devices=rows, flow=flow, run=run, proposal=None, plan=None, series={**base.series, "usd_per_mtok": ()}
    )


def quiet_snapshot() -> Snapshot:
    """The sample run without a proposal, moves or trouble."""
    return replace(sample_snapshot(), proposal=None, migration=MigrationView(running=(), waiting=()))


def hostile_snapshot() -> Snapshot:
    """Text of every kind that must not reach the terminal as it is: escapes, markup, zero-width and wide characters."""
    base = sample_snapshot()
    rows = tuple(
        replace(
            d,
            display=HOSTILE,
            kind=HOSTILE,
            note=HOSTILE,
            replica=HOSTILE,
            status=HOSTILE if i == 1 else d.status,
            digest=HOSTILE,
        )
        for i, d in enumerate(base.devices)
    )
    assert base.plan is not None
    plan = replace(base.plan, headline=HOSTILE, why=(HOSTILE,), trigger=HOSTILE, scheduler=HOSTILE, bound_scope=HOSTILE)
    flow: FlowView | None = base.flow
    assert flow is not None
    assert base.proposal is not None
    return replace(
        base,
        run=replace(base.run, id=HOSTILE, folder=HOSTILE),
        devices=rows,
        plan=plan,
        proposal=replace(base.proposal, plan=replace(plan, rev=7)),
        flow=replace(flow, wasted_tokens={HOSTILE: 5}, samples_by_state={HOSTILE: 3}, metrics={HOSTILE: 1.0}),
        migration=MigrationView(running=(HOSTILE,), waiting=(HOSTILE,), blocked=HOSTILE),
        events=(EventRow(seq=1, at_s=NOW_S - 1, level="error", kind=HOSTILE, message=HOSTILE, subject=HOSTILE),),
        problems=(HOSTILE,),
        infeasible=HOSTILE,
    )


def step_history(app: HexApp, snapshot: Snapshot, points: int = 14) -> None:
    """Show a past of `points` snapshots and then `snapshot`, so that the little curves have something to draw."""
    for i in range(points - 1):
        rows = tuple(
            replace(
                d,
                tokens_per_s=None
                if d.tokens_per_s is None
                else d.tokens_per_s * (0.5 + 0.5 * ((i * 7 + k * 3) % 5) / 4),
            )
            for k, d in enumerate(snapshot.devices)
        )
        app.show_snapshot(replace(snapshot, at_s=snapshot.at_s - 2.0 * (points - 1 - i), devices=rows))
    app.show_snapshot(snapshot)


class FakeSource:
    """A source that serves what it is given, and remembers commands. `silent` makes it unreachable."""

    def __init__(self, *snapshots: Snapshot, answer: Callable[[Command], CommandResult] | None = None) -> None:
        self.newest: Snapshot | None = snapshots[-1] if snapshots else None
        self.commands: list[Command] = []
        self.asked: list[int] = []
        self.silent = False
        self.refuse = ""
        self._answer = answer
        self._changed = asyncio.Event()

    def put(self, snapshot: Snapshot) -> None:
        """A newer snapshot."""
        self.newest = snapshot
        self._changed.set()

    async def snapshot(self, after: int, wait_s: float) -> Snapshot | None:
        """As the daemon does: at once when there is another one, else when it comes or time is up."""
        self.asked.append(after)
        if self.silent:
            raise UnreachableError("no daemon answers")
        if self.newest is None or self.newest.seq == after:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), wait_s)
            except TimeoutError:
                return None
        if self.silent:
            raise UnreachableError("the daemon closed the connection")
        return self.newest

    async def command(self, command: Command) -> CommandResult:
        """Accept, or refuse with `refuse`."""
        self.commands.append(command)
        if self.refuse:
            raise RefusedError(self.refuse, hint="look again")
        if self._answer is not None:
            return self._answer(command)
        return CommandResult(accepted=True, message="", override_rev=len(self.commands), plan_rev=6)

    @property
    def sent(self) -> list[tuple[str, str | None, str | None]]:
        """Commands as (name, device, role)."""
        return [(c.name, c.device, c.role) for c in self.commands]


def app_on(
    source: FakeSource, theme: str = "dark", *, ascii: bool = False, clock: Callable[[], float] = lambda: 100.0
) -> HexApp:
    """The application over a source, with the clock standing still."""
    keys: Sequence[str] = [f"key-{i}" for i in range(100_000)]
    supply = iter(keys)
    return HexApp(
        source, "local-7f3a", load_theme(theme), ascii=ascii, author="mia", make_key=lambda: next(supply), clock=clock
    )
