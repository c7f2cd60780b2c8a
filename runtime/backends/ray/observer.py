"""Keeps the newest word of every source, in threads of its own. Nobody who reads it ever waits.

Two threads: one asks the GCS which bodies and actors exist, one asks the actors. A source that does not answer leaves its
last word, whose age grows.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from planner.record import record
from runtime.backends.ray import names
from runtime.backends.ray.actors.host import in_words
from runtime.backends.ray.actors.identity import ActorLevel
from runtime.backends.ray.calls import Answer, Question, call
from runtime.backends.ray.executor import BodyNote
from runtime.backends.ray.level import BodySeen
from runtime.backends.ray.names import BodyName
from runtime.backends.ray.placement import groups
from runtime.backends.ray.world import World, start_flow, start_rewards
from runtime.rl.types import FlowStatus

FLOW_EVERY_S, FLOW_CALM_S = 0.5, 1.0
PING_EVERY_S = 1.0
TABLE_EVERY_S, TABLE_CALM_S = 1.0, 2.0
SILENT_S = 0.1  # longest wait for an answer while others have answered
MOST_REST_S, HEALING_REST_S = 0.5, 0.1  # between two looks at what is due
TOGETHER_S = (
    0.25  # questions that would be due within this time are asked with those that are: fewer turns, fewer calls
)
HEAL_S = (0.5, 2.0, 5.0, 15.0, 30.0)
logger = logging.getLogger(__name__)


@record
class Table:
    """What the GCS said exists."""

    read_s: float  # monotonic seconds when the reading began
    groups: dict[BodyName, tuple[str, ...]]  # body -> devices
    actors: frozenset[str]


class Service:
    """Flow or rewards: found or made, asked how it is, made again when it is gone."""

    def __init__(self, name: str, world: World, start: Callable[[World], Any]) -> None:
        self.name, self._world, self._start = name, world, start
        self._failures = 0
        self._heal_at = 0.0
        self._make()

    def _make(self) -> None:
        self.handle = self._start(self._world)
        self.question = Question(self._world.ray, self.handle, "ping", every_s=PING_EVERY_S)

    @property
    def healing(self) -> bool:
        """Whether it is dead and will be made again."""
        return self._heal_at != 0.0

    def heal(self) -> bool:
        """Make it again if it is dead or broken and its time has come; True when that was done."""
        answer, now = self.question.answer, time.monotonic()
        broken = isinstance(answer.value, ActorLevel) and answer.value.phase == "failed"
        if answer.state != "dead" and not broken:
            if answer.state == "answered":
                self._failures = 0
            return False
        if self._heal_at == 0.0:
            self._heal_at = now + HEAL_S[min(self._failures, len(HEAL_S) - 1)]
        if now < self._heal_at:
            return False
        self._failures, self._heal_at = self._failures + 1, 0.0
        logger.error(
            "%s is gone (%s); starting it again", self.name, answer.reason or getattr(answer.value, "reason", "")
        )
        if broken and answer.state != "dead":
            with contextlib.suppress(self._world.ray.exceptions.RayError):
                self._world.ray.kill(self.handle, no_restart=True)
        self._make()
        return True


def _gist(answer: Answer) -> tuple[str, str | bool]:
    """What of an answer is news when it changes: whether there is one, an actor's phase, the end of the run."""
    value = answer.value
    return answer.state, value.finished if isinstance(value, FlowStatus) else getattr(value, "phase", "")


class Observer:
    """`flow` and `rewards` are made when they do not exist: the daemon is the healer of the second, Ray of the first."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._stop = threading.Event()
        self._stir, self._wake = (
            threading.Event(),
            threading.Event(),
        )  # of the thread that reads the table, that asks actors
        self._calm = False
        self._tell: Callable[[], None] = lambda: None
        self.flow_built = threading.Event()
        self._whole = False  # both were built once: from then on they are made again when they are gone
        self._lock = threading.Lock()
        self._table: Table | None = None
        self._table_problem = ""
        self._pings: dict[str, Question] = {}  # by actor
        self._flow = Service(names.FLOW, world, start_flow)
        self._rewards = Service(names.REWARDS, world, start_rewards)
        self._status = Question(world.ray, self.flow, "status", every_s=FLOW_EVERY_S)
        self._threads = [
            threading.Thread(target=self._watch_table, name="ray-table", daemon=True),
            threading.Thread(target=self._ask_actors, name="ray-questions", daemon=True),
        ]

    @property
    def flow(self) -> Any:
        """Flow's handle."""
        return self._flow.handle

    def wait_ready(self, deadline_s: float) -> None:
        """Wait until flow and rewards are built; raises what kept them from it."""
        until = time.monotonic() + deadline_s
        for service in (self._rewards, self._flow):
            left = max(1.0, until - time.monotonic())
            call(self._world.ray, service.handle.ready.remote(), what=f"start of {service.name}", deadline_s=left)
        self.flow_built.set()
        self._whole = True

    def start(self) -> None:
        """Begin to ask."""
        for t in self._threads:
            t.start()

    def on_news(self, tell: Callable[[], None]) -> None:
        """`tell` is called, from a thread of the observer, when a body came or went, an actor died or is in another phase, or
        the run has come to its end."""
        self._tell = tell

    def rest(self, calm: bool) -> None:
        """Ask less often while it is calm; bodies are asked as ever, so that a death is noticed as fast."""
        self._status.every_s = FLOW_CALM_S if calm else FLOW_EVERY_S
        if self._calm and not calm:
            self._stir.set()
        self._calm = calm

    def stop(self, deadline_s: float = 5.0) -> None:
        """End the threads."""
        self._stop.set()
        self._stir.set()
        self._wake.set()
        for t in self._threads:
            if t.is_alive():
                t.join(deadline_s)

    def status(self) -> Answer:
        """Flow's newest status."""
        return self._status.answer

    def services(self) -> dict[str, Answer]:
        """Newest pings of flow and rewards."""
        return {s.name: s.question.answer for s in (self._flow, self._rewards)}

    def table_problem(self) -> str:
        """Why the GCS was not read, in words; "" when it was."""
        return self._table_problem

    def bodies(self, notes: dict[BodyName, BodyNote]) -> tuple[BodySeen, ...]:
        """Every body that exists, is being started or failed to start."""
        with self._lock:
            table, pings = self._table, {name: q.answer for name, q in self._pings.items()}
        seen: dict[BodyName, BodySeen] = {}
        if table is not None:
            for body, devices in table.groups.items():
                note = notes.get(body)
                actors = names.rank_names(body, devices)
                unknown = [a for a in actors if a not in table.actors and a not in pings]
                # A reading from before the start ended says nothing of the actor.
                fresh = note is None or (not note.starting and table.read_s > note.settled_s)
                seen[body] = BodySeen(
                    body=body,
                    devices=devices,
                    ping=pings.get(actors[0], Answer(state="never")),
                    missing=bool(unknown) and fresh,
                    note=note,
                    others=tuple(pings.get(a, Answer(state="never")) for a in actors[1:]),
                )
        for body, note in notes.items():
            if body not in seen and (note.starting or note.reason or table is None or table.read_s <= note.settled_s):
                seen[body] = BodySeen(body=body, devices=note.devices, ping=Answer(state="never"), note=note)
        return tuple(seen[b] for b in sorted(seen, key=lambda b: (b.role, b.id, b.epoch)))

    def _watch_table(self) -> None:
        from ray.util import list_named_actors

        while not self._stop.is_set():
            began = time.monotonic()
            try:
                table = Table(
                    read_s=began,
                    groups={g.body: g.devices for g in groups(self._world)},
                    actors=frozenset(list_named_actors()),
                )
                self._adopt(table)
                with self._lock:
                    before, self._table = self._table, table
                self._table_problem = ""
                if before is None or (before.groups, before.actors) != (table.groups, table.actors):
                    self._tell()
            except Exception as e:  # noqa: BLE001 - a table that cannot be read is a source that does not answer
                self._table_problem = f"Ray's table does not answer: {in_words(e)}"
                logger.warning("%s", self._table_problem)
            self._stir.wait(TABLE_CALM_S if self._calm else TABLE_EVERY_S)
            self._stir.clear()

    def _adopt(self, table: Table) -> None:
        """A question for every actor of a body; none for bodies that are gone."""
        wanted = {name for body, devices in table.groups.items() for name in names.rank_names(body, devices)}
        new = {}
        for name in wanted & table.actors - self._pings.keys():
            if (handle := self._world.find(name)) is not None:
                new[name] = Question(self._world.ray, handle, "ping", every_s=PING_EVERY_S)
        with self._lock:
            kept = {name: q for name, q in self._pings.items() if name in wanted}
            self._pings = kept | new
        if new:
            self._wake.set()

    def _ask_actors(self) -> None:
        while not self._stop.is_set():
            try:
                rest_s = self._ask_once()
                self._heal()
            except Exception:  # Ray's table may be away for a while: whoever asks must outlive that
                logger.exception("asking the actors")
                rest_s = 0.5
            if rest_s > 0:
                self._wake.wait(rest_s)
                self._wake.clear()

    def _ask_once(self) -> float:
        """Send what is due and take the answers that have come; returns how long there is nothing to do, in seconds."""
        ray, now = self._world.ray, time.monotonic()
        with self._lock:
            questions = [self._status, self._flow.question, self._rewards.question, *self._pings.values()]
        ahead_s = TOGETHER_S if min(q.due_s() for q in questions) <= now else 0.0
        refs = {ref: q for q in questions if (ref := q.ask(now, ahead_s)) is not None}
        if refs:
            # All at once where all answer; whoever is silent holds up the others' answers for so long at most.
            ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=SILENT_S)
            for ref in ready:
                self._take(refs[ref])
            if len(ready) < len(refs):
                return 0.0
        longest_s = HEALING_REST_S if self._flow.healing or self._rewards.healing else MOST_REST_S
        return min(longest_s, max(0.0, min(q.due_s() for q in questions) - time.monotonic()))

    def _take(self, question: Question) -> None:
        """An answer has come; what must not wait for the next look is told."""
        before = _gist(question.answer)
        question.take(time.monotonic())
        if _gist(question.answer) != before:
            self._tell()
        if question is self._flow.question and _gist(question.answer) == ("answered", "running"):
            self.flow_built.set()

    def _heal(self) -> None:
        """Flow and rewards are made again, with back-off, when they are dead or could not be built; the first time that ends the
        run instead."""
        if not self._whole:
            return
        self._rewards.heal()
        if self._flow.heal():
            self._status = Question(self._world.ray, self.flow, "status", every_s=FLOW_EVERY_S)
