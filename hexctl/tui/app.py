"""The dashboard: one newest snapshot in, commands out. It holds nothing that the run needs."""

import asyncio
import getpass
import os
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import ClassVar

from textual.app import App
from textual.binding import BindingType
from textual.filter import LineFilter, NoColor
from textual.screen import Screen

from hexctl.roots import root_words
from hexctl.tui.feed import Feed, SnapshotSource
from hexctl.tui.keys import MAIN, Key, keys_at, works_in
from hexctl.tui.pen import AsciiFilter, Pen
from hexctl.tui.screens.confirm import ConfirmScreen
from hexctl.tui.screens.info import InfoScreen
from hexctl.tui.screens.main import MainScreen, Scene
from hexctl.tui.screens.palette import Palette, palette_entries
from hexctl.tui.screens.pin import PinScreen
from hexctl.tui.terminal import Guard, drawing_fileno, wants_ascii
from hexctl.tui.theme import Theme, choose_theme
from hexctl.tui.view import chrome
from hexctl.tui.view.consent import Ask, Refusal, Request, Role, weigh
from hexctl.tui.view.context import Context
from hexctl.tui.view.details import device_details, event_details
from hexctl.tui.view.history import EMPTY
from hexctl.tui.view.text import Line, clean
from planner.errors import HexError
from planner.record import record, replace
from runtime.api.wire import Command, CommandName, DeviceRow, Snapshot
from runtime.errors import ConfigError

TICK_S = 1.0
UNDO_DEPTH = 20


@record
class Undo:
    """What takes an accepted action back."""

    requests: tuple[Request, ...]
    words: str


class HexApp(App[int], inherit_bindings=False):
    """The console of one run."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "hexctl"
    BINDINGS: ClassVar[list[BindingType]] = []
    CSS = """
    LinesPanel, RowList, CommandList {
        scrollbar-color: $panel-lighten-2; scrollbar-color-hover: $primary; scrollbar-color-active: $primary;
        scrollbar-background: $background; scrollbar-background-hover: $background; scrollbar-background-active: $background;
    }
    Toast { background: $panel; padding: 0 1; }
    """

    def __init__(
        self,
        source: SnapshotSource,
        run_name: str,
        theme: Theme,
        *,
        ascii: bool = False,
        utc_offset_s: int = 0,
        author: str = "",
        make_key: Callable[[], str] = lambda: uuid.uuid4().hex,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._source = source
        self.run_name = run_name
        self.look = theme
        self._ascii = ascii
        self._utc_offset_s = utc_offset_s
        self._author = author
        self._make_key = make_key
        self._clock = clock
        self._pens = (Pen(theme), Pen(theme, outdated=True))
        self._snapshot: Snapshot | None = None
        self._received_at = clock()
        self._history = EMPTY
        self._undo: list[Undo] = []
        self.feed: Feed | None = None
        self.register_theme(theme.textual())
        self.theme = theme.name
        self.no_color = self.no_color or not theme.colour
        self._main = MainScreen()

    def get_default_screen(self) -> Screen[None]:
        """The main screen is under everything."""
        return self._main

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Without colour no colour leaves, in ASCII mode nothing else does, whoever drew it."""
        filters: list[LineFilter] = [NoColor()] if not self.look.colour else list(super().get_line_filters())
        return [*filters, AsciiFilter()] if self._ascii else filters

    def on_mount(self) -> None:
        """Start polling."""
        self.feed = Feed(self._source, self.show_snapshot, self.redraw, clock=self._clock)
        self.run_worker(self.feed.run(), name="feed", exit_on_error=True)
        self.set_interval(TICK_S, self.redraw)

    @property
    def farewell(self) -> str:
        """What to know after leaving."""
        run = None if self._snapshot is None else self._snapshot.run
        if run is not None and run.state in ("finished", "failed"):
            return f"run {self.run_name} has {'ended' if run.state == 'finished' else 'failed'}; its folder is {clean(run.folder)}"
        if run is not None and run.state == "stopping":
            return f"run {self.run_name} is ending; hexctl runs shows when it has"
        root = clean(root_words(run.folder)) if run is not None else ""
        return f"run {self.run_name} goes on; hexctl attach{root} comes back; hexctl down{root} ends it"

    # drawing

    def show_snapshot(self, s: Snapshot) -> None:
        """The newest snapshot; older ones are forgotten."""
        self._snapshot, self._received_at = s, self._clock()
        self._history = self._history.grown(s)
        self.redraw()

    def _surroundings(self) -> Context:
        return Context(
            elapsed_s=max(0.0, self._clock() - self._received_at), utc_offset_s=self._utc_offset_s, ascii=self._ascii
        )

    def redraw(self) -> None:
        """Draw what is known now, with ages as they are now."""
        ctx, s = self._surroundings(), self._snapshot
        health = self.feed.health if self.feed is not None else None
        banner: tuple[Line, ...] = ()
        if s is None:
            if health is not None:
                banner = (chrome.waiting_banner(health, self.run_name),)
        elif health is not None:
            banner = chrome.banner_lines(s, ctx.elapsed_s, health)
        pen = self._pens[0 if health is None or health.answering else 1]
        self._main.draw(Scene(snapshot=s, history=self._history, context=ctx, pen=pen, banner=banner))

    # what keys ask for

    def on_main_screen_wanted(self, message: MainScreen.Wanted) -> None:
        """A key of the main screen that is not about what is seen."""
        doers: dict[str, Callable[[], None]] = {
            "cordon": self._cordon,
            "drain": lambda: self._act("drain"),
            "pin": self._pin,
            "approve": lambda: self._act("approve"),
            "reject": lambda: self._act("reject"),
            "replan": lambda: self._act("replan"),
            "undo": self._take_back,
            "details": self._details,
            "copy": self._copy,
            "refresh_now": self._refresh_now,
            "palette": self._palette,
            "help": self._help,
            "leave": lambda: self.exit(0),
        }
        if self.screen is self._main:  # a dialog that opened meanwhile has the word
            doers[message.action]()

    def _targets(self) -> list[DeviceRow]:
        chosen = set(self._main.chosen_devices())
        return [d for d in self._snapshot.devices if d.id in chosen] if self._snapshot is not None else []

    def _cordon(self) -> None:
        """Toggle: uncordon when every chosen device is kept from work (an operator's cordon, or a quarantine), else cordon
        those that are not."""
        targets = self._targets()
        free = [d for d in targets if not (d.cordoned or d.status == "quarantined")]
        self._act("cordon" if free or not targets else "uncordon", free or targets)

    def _pin(self) -> None:
        targets = self._targets()
        if not targets:
            self._say("no device is under the cursor", "warning")
            return
        names = ", ".join(d.display for d in targets[:2]) + (
            f" and {len(targets) - 2} more" if len(targets) > 2 else ""
        )

        def chosen(role: str | None) -> None:
            wanted: dict[str, Role] = {"rollout": "rollout", "train": "train"}
            if role == "":
                self._act("unpin", targets)
            elif role in wanted:
                self._act("pin", targets, wanted[role])

        self.push_screen(PinScreen(names, self._pens[0], ascii=self._ascii), chosen)

    def _act(self, name: CommandName, targets: Sequence[DeviceRow] | None = None, role: Role | None = None) -> None:
        """Weigh, ask as the level wants, send."""
        if self._snapshot is None:
            return
        weighed = weigh(name, self._snapshot, self._targets() if targets is None else targets, role)
        if isinstance(weighed, Refusal):
            self._say(weighed.why, "warning")
        elif weighed.level == 0:
            self._send(weighed)
        else:
            ask = weighed
            screen = ConfirmScreen(ask, self._pens[0], width=self.size.width, ascii=self._ascii)
            self.push_screen(screen, lambda yes: self._send(ask) if yes else None)

    def _send(self, ask: Ask) -> None:
        self.run_worker(
            self._deliver(ask.requests, ask.title.rstrip("?"), ask.undo), name="command", exit_on_error=True
        )
        self._main.clear_marks()

    async def _deliver(self, requests: Sequence[Request], words: str, undo: tuple[Request, ...] = ()) -> int:
        """Send one after the other; stop at the first refusal and say what went through. Returns how many did."""
        done = 0
        for request in requests:
            try:
                result = await self._source.command(self._command(request))
            except (HexError, OSError, TimeoutError) as fault:
                self._say(f"{words}: {_told(fault)}" + (f" ({done} of {len(requests)} done)" if done else ""), "error")
                break
            if not result.accepted:
                self._say(f"{words}: {result.message}", "error")
                break
            done += 1
            if len(requests) == 1 and result.message:
                words = result.message
        if done and undo:  # also of what went through before a refusal
            went = {r.device for r in requests[:done]}
            back = tuple(u for u in undo if u.device in went)
            self._undo = [*self._undo[-(UNDO_DEPTH - 1) :], *([Undo(requests=back, words=words)] if back else [])]
        if done and done == len(requests):
            self._say(f"{words} · u undoes" if undo else words)
        if self.feed is not None:
            self.feed.nudge()
        return done

    def _command(self, r: Request) -> Command:
        return Command(
            name=r.name,
            key=self._make_key(),
            device=r.device,
            role=r.role,
            plan_rev=r.plan_rev,
            force=r.force,
            author=self._author,
        )

    def _take_back(self) -> None:
        if not self._undo:
            self._say("nothing to undo", "warning")
            return
        self.run_worker(self._undo_last(self._undo.pop()), name="command", exit_on_error=True)

    async def _undo_last(self, last: "Undo") -> None:
        done = await self._deliver(last.requests, f"undone: {last.words}")
        if done < len(last.requests):  # the rest may be undone later
            self._undo.append(replace(last, requests=last.requests[done:]))

    def _details(self) -> None:
        s = self._snapshot
        if s is None:
            return
        width = min(72, self.size.width - 4)
        if self._main.view == "events":
            seq = self._main.chosen_event()
            if seq is None:
                return
            title, lines = event_details(s, seq, self._surroundings(), width - 4)
        else:
            chosen = self._main.query_one("#fleet").cursor_key  # type: ignore[attr-defined]
            if chosen is None:
                return
            title, lines = device_details(s, chosen, self._surroundings(), width - 4)
        self._read(title, lines, width)

    def _read(self, title: str, lines: tuple[Line, ...], width: int) -> None:
        self.push_screen(
            InfoScreen(title, lambda _w, _h: lines, len(lines), self._pens[0], width=width, ascii=self._ascii)
        )

    def _help(self) -> None:
        width = min(80, self.size.width - 4)
        self._read("Keys", chrome.help_lines(width - 4), width)

    def _copy(self) -> None:
        s = self._snapshot
        if s is None:
            return
        if self._main.view == "events":
            text = next((e.message for e in s.events if e.seq == self._main.chosen_event()), "")
        else:
            text = "\n".join(d.id for d in self._targets())
        if text:
            self.copy_to_clipboard(clean(text) if "\n" not in text else text)
            self._say(f"copied {text.splitlines()[0]}" + (" and more" if "\n" in text else ""))

    def _refresh_now(self) -> None:
        if self.feed is not None:
            self.feed.nudge()
        self.redraw()

    def _palette(self) -> None:
        open_ = self._snapshot is not None and self._snapshot.proposal is not None
        usable: list[Key] = [k for k in keys_at(MAIN) if works_in(k, self._main.view, proposal_open=open_)]
        self.push_screen(Palette(palette_entries(usable, self._run_on_main)))

    def _run_on_main(self, action: str) -> None:
        self.call_later(self._main.run_action, action)

    def _say(self, text: str, severity: str = "information") -> None:
        self.notify(clean(text), severity=severity, markup=False, timeout=6)  # type: ignore[arg-type]


def _told(fault: BaseException) -> str:
    if isinstance(fault, HexError):
        return f"{fault.what} ({fault.hint})" if fault.hint else fault.what
    return str(fault) or type(fault).__name__


def run_tui(socket: Path, run_name: str, theme: str | None = None) -> int:
    """Show the run behind `socket` until the operator leaves; the run goes on. Returns the exit code.

    ConfigError for an unknown theme or when there is no terminal to draw on.
    """
    from hexctl.client import AsyncClient

    chosen = choose_theme(theme, os.environ)
    if not (sys.stdin.isatty() and os.isatty(drawing_fileno())):
        raise ConfigError(
            "the dashboard needs a terminal", hint="hexctl status prints the same figures; --output json for programs"
        )
    try:
        author = getpass.getuser()
    except (KeyError, OSError):
        author = str(os.getuid())
    client = AsyncClient(socket)
    app = HexApp(
        client, run_name, chosen, ascii=wants_ascii(os.environ), utc_offset_s=time.localtime().tm_gmtoff, author=author
    )  # fmt: skip
    return show_app(app, client.close)


def show_app(app: HexApp, close: Callable[[], Awaitable[None]]) -> int:
    """Run the application with the terminal guarded, then `close` its source; says on stderr what goes on when it was left."""
    guard = Guard(drawing_fileno())

    async def main() -> int | None:
        loop = asyncio.get_running_loop()

        def leave() -> None:
            loop.call_soon_threadsafe(app.exit, 0)

        with guard.watching(leave):
            try:
                return await app.run_async()
            finally:
                await close()

    try:
        code = asyncio.run(main())
    except BaseException:
        guard.restore()  # Textual restores what it caught itself; this got past it
        raise
    if guard.received is not None:
        return 128 + guard.received
    if app.return_code:
        return app.return_code
    if code is None:
        return 1
    sys.stderr.write(app.farewell + "\n")
    return code
