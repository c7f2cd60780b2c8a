"""The run's flow in virtual time: groups, steps and weight updates, under the runtime's own policies.

Time moves in windows that end at the next event at the latest (`runtime.sim.windows`). Within one, replicas decode
(`runtime.sim.decoding`), samples that end are replaced at once where the admission rule allows, and a batch that became
complete is found with the moment at which it did, so that a step begins then and not at the end of the window.
"""

from collections.abc import Callable

import numpy as np

from runtime.sim.decoding import INF, Decoding, Held, Lane
from runtime.sim.drawing import draw
from runtime.sim.figures import Books
from runtime.sim.finishing import Finishing
from runtime.sim.granting import Granting
from runtime.sim.groups import Floats, GroupTable, Ints, Suspended
from runtime.sim.rules import FlowRules, WeightsPath
from runtime.sim.runout import RunOut
from runtime.sim.speed import ReplicaSpeed, TrainerSpeed
from runtime.sim.spreading import Spreading
from runtime.sim.timeline import Timeline
from runtime.sim.training import Training
from runtime.sim.windows import is_fine, longest_s, soonest_batch_s

FLUSH_TOKENS, FLUSH_S = 32, 0.25  # of the runtime's replicas: what they may lose when they die
RESUME_SHARE = 0.8  # an overfull replica gives samples back until so much of its KV is used


class SimulatedFlow:
    """One run. `advance` moves it; replicas and the trainer come and go between calls."""

    def __init__(self, rules: FlowRules, seed: int, timeline: Timeline | None = None) -> None:
        self.rules, self.policy, self.timeline = rules, rules.policy, timeline
        self.now_s = 0.0
        self.decoding, self.books = Decoding(), Books()
        self.weights = Spreading(rules, self.decoding, self.books, timeline)
        rows = self.policy.most_outstanding + 2 * self.policy.prompts_per_step
        self.groups = GroupTable(rules.responses_per_prompt, rows)
        self.granting = Granting(rules, self.decoding, self.groups, seed)
        self.finishing = Finishing(rules, self.decoding, self.groups, self.books)
        self.numbers: dict[str, int] = {}
        self.training = Training(rules, self.groups, self.granting, self.finishing, self.books)
        self.on_step: Callable[[], None] = lambda: None

    @property
    def version(self) -> int:
        """Newest published weights; also the next step to train."""
        return self.granting.version

    # Who is there

    def add_replica(self, name: str, speed: ReplicaSpeed, path: WeightsPath) -> None:
        """A replica begins to serve now, on the newest weights."""
        allowed = self.granting.join(name, speed)
        self.numbers[name] = self.decoding.add(Lane(name=name, speed=speed), self.version, allowed)
        self.weights.join(name, path)

    def remove_replica(self, name: str, *, lost: bool) -> None:
        """It stops serving. Its samples go on elsewhere, without what was not journalled when it is `lost`."""
        if name not in self.numbers:
            return
        i, d = self.numbers[name], self.decoding
        self._suspend(i, np.flatnonzero(np.isfinite(d.mine(d.ends, i))) + d.begin[i], lost=lost)
        self.books.retire(d.remove(i))
        self.weights.leave(name)
        self.groups.homes.leave(name)
        self._updated()
        self.numbers = {lane.name: j for j, lane in enumerate(d.lanes)}

    def _suspend(self, i: int, at: Ints, *, lost: bool) -> None:
        d = self.decoding
        if not len(at):
            return
        held: Held = d.held(i, at)
        redone = np.zeros(len(at), dtype=np.int64)
        if lost:
            step_s = float(d.alpha[i]) if len(d.alpha) > i and d.alpha[i] > 0 else FLUSH_S / FLUSH_TOKENS
            redone = held.done % max(1, min(FLUSH_TOKENS, int(FLUSH_S / step_s)))
        kept = held.done - redone
        self.finishing.count(at, held.start + kept)
        self.books.redone_tokens += int(redone.sum())
        self.books.recomputed_tokens += int((held.context + kept).sum())
        for k in range(len(at)):
            self.groups.suspended.append(
                Suspended(
                    row=int(held.rows[k]),
                    left=int(held.left[k] + redone[k]),
                    context=int(held.context[k] + kept[k]),
                    first=int(held.first[k]),
                )
            )
        d.clear(at)
        d.recount()

    def slow_replica(self, name: str, factor: float) -> None:
        """From now on everything takes `factor` times as long on it."""
        if name in self.numbers:
            self.decoding.slow[self.numbers[name]] = factor

    def set_trainer(self, speed: TrainerSpeed | None, *, slow: float = 1.0) -> None:
        """A trainer is there from now on, or none. A step under way begins again with the same batch."""
        self.training.set(speed, slow, self.now_s)

    def slow_trainer(self, factor: float) -> None:
        """Steps take `factor` times as long, from the next one on."""
        self.training.slow = factor

    def roll_back(self, version: int) -> None:
        """Everything stops, and the run is as it was at `version`: what was sampled or trained since is wasted. Replicas
        and trainer are gone."""
        for name in list(self.numbers):
            self.remove_replica(name, lost=False)
        self.set_trainer(None)
        g, books = self.groups, self.books
        books.waste("restart", int(g.tokens[g.live].sum()))
        undone = [s for s in books.steps if s.step >= version]
        books.steps = [s for s in books.steps if s.step < version]
        books.trained_tokens -= sum(s.trained_tokens for s in undone)
        books.masked_tokens -= sum(s.masked_tokens for s in undone)
        books.waste("rolled_back", sum(s.trained_tokens + s.masked_tokens for s in undone))
        books.redone_steps += len(undone)
        self.groups = GroupTable(self.rules.responses_per_prompt, len(g.live))
        self.groups.admitted = version * self.policy.prompts_per_step
        self.granting.restart(self.groups, version)
        self.finishing.restart(self.groups)
        self.training.restart(self.groups)

    @property
    def between_steps(self) -> bool:
        """Whether the trainer computes nothing just now."""
        return self.training.began_s is None

    # Time

    def advance(self, until_s: float, should_stop: Callable[[], bool] = lambda: False) -> str:
        """Move to `until_s`. Answers why it ended before that, "" when it did not: "steps" are done, it was "stopped", or
        nothing can happen any more and it "waits"."""
        why = self._advance(until_s, should_stop)
        self.finishing.settle()
        return why

    def _advance(self, until_s: float, should_stop: Callable[[], bool]) -> str:
        while self.now_s < until_s:
            if self._over():
                return "steps"
            if should_stop():
                return "stopped"
            self._try_step()
            if self.granting.waiting > 0:
                self.finishing.settle()
                self.granting.fill(self.now_s)
            event_s = min(self._next_event_s(), until_s)
            left_s = event_s - self.now_s
            h = min(left_s, longest_s(self.decoding, self.granting, self.rules, self.version))
            if h == INF:
                return "waits"
            runout = self._runout() if h < left_s else None
            if runout is not None:
                h = min(left_s, max(runout.last_s, 1e-9))
            self._window(max(h, 0.0), runout)
            self._try_step()
            self._happen()
        return "steps" if self._over() else ""

    def idle_until(self, at_s: float) -> None:
        """Nothing can happen before: time passes."""
        h = at_s - self.now_s
        if h > 0:
            self._window(h)
            self.finishing.settle()

    def _over(self) -> bool:
        return self.rules.steps is not None and self.version >= self.rules.steps

    def _next_event_s(self) -> float:
        look, g = INF, self.policy.prompts_per_step
        if self.training.may_start:
            look = next((t for t, *_ in self.finishing.complete[g - 1 :] if t > self.now_s), INF)
        return min(self.training.ends_s, self.weights.links.next_s(), look)

    def _runout(self) -> RunOut | None:
        """The ends of all that runs, where nothing can begin before the next event and every engine has room for what it holds."""
        if self.granting.waiting > 0:
            return None
        runout = RunOut(self.decoding)
        return runout if runout.fits else None

    def _open(self, h: float, runout: RunOut | None) -> None:
        if runout is None:
            self.decoding.open_window(h, constant=is_fine(self.decoding))
        else:
            self.decoding.open_runout(runout, h)

    def _window(self, h: float, runout: RunOut | None = None) -> None:
        d, began = self.decoding, self.now_s
        if d.lanes and h > 0:
            self._open(h, runout)
            shorter = self._until_step_s(began) if runout is not None or not is_fine(d) else INF
            if shorter < h:
                h = shorter
                self._open(h, runout)
            self.books.running_area += d.running * h
            at = d.ended()
            while len(at):
                into = d.seconds_into(at)
                sooner = self.granting.before_newcomers(at, into)
                if sooner is None:
                    at = d.ended(self._replace(at, into, began, began + h))
                else:
                    given = self._replace(at[sooner], into[sooner], began, began + h)
                    at = np.concatenate([at[~sooner], d.ended(given)])
            d.close_window()
            self._evict_overfull()
        self.now_s = began + h
        self.books.pass_time(h, self.training.state)
        if self.timeline is not None:
            self.finishing.settle()
            draw(self.timeline, d, self.finishing, self.books, began, self.now_s, runout)

    def _until_step_s(self, began_s: float) -> float:
        """Seconds from the start of the window that is open to the soonest end of a step that is not under way yet: new
        weights may let samples begin. Under `wait` and `drop` a batch that is taken does so already."""
        if not self.training.may_start:
            return INF
        mask = self.policy.stale == "mask"
        first, batch = soonest_batch_s(
            self.decoding,
            self.groups,
            self.rules,
            [t for t, *_ in self.finishing.complete],
            needed=self.training.needed,
            began_s=began_s,
            more=self.groups.unleased_groups() + self.granting.admissible if mask else 0,
        )
        least = self.training.least_s() if mask else 0.0
        # Where samples that have not begun yet could make a batch: none can before the first place is free.
        return max(batch + least, first) * (1 + 1e-12) - began_s + 1e-9

    def _replace(self, at: Ints, into: Floats, began_s: float, end_s: float) -> Ints:
        """Samples in these slots are done, so many seconds into the window; new ones begin in their place where there are any.
        Answers with those slots. The window lasts until `end_s`."""
        d = self.decoding
        d.note_ends(at, into)
        seconds = began_s + into
        order = seconds.argsort(kind="stable")
        at, seconds = at[order], seconds[order]
        ends = self.finishing.note(at, seconds)
        over_s = float((end_s - seconds).sum())
        if self.granting.waiting <= 0:
            self.books.running_area -= over_s
            return at[:0]
        self.finishing.settle()
        within = self._room(at)
        if within is not None:
            at, ends, seconds = at[within], ends[within], seconds[within]
        given = self.granting.give(at, ends, seconds)
        self.books.running_area += float((end_s - d.leased_s[given]).sum() - over_s)
        return given

    def _room(self, at: Ints) -> Ints | None:
        """Those of the slots just emptied whose replica may go on with as many as before (places in `at`); None: all."""
        d = self.decoding
        spare = d.allowed - d.n
        if spare.min() >= 0:
            return None
        left = np.bincount(d.rep[at], minlength=len(d.lanes)) + spare  # places to fill again, by replica
        r = d.rep[at]
        order = np.argsort(r, kind="stable")
        rank = np.empty(len(at), dtype=np.int64)
        rank[order] = np.arange(len(at)) - np.searchsorted(r[order], r[order], side="left")
        return np.flatnonzero(rank < left[r])

    def _evict_overfull(self) -> None:
        """A replica whose KV is full gives back the samples it took last, as engines preempt."""
        d = self.decoding
        if not np.count_nonzero(d.context > d.capacity):  # even with every prompt for itself
            return
        context = d.held_tokens(1.0)
        for i in np.flatnonzero(context > d.capacity).tolist():
            at = np.flatnonzero(np.isfinite(d.mine(d.ends, i))) + d.begin[i]
            newest = at[np.argsort(-d.starts[at], kind="stable")]
            contexts = d.before[newest] + d.v[i] - d.starts[newest] - d.shares[newest]
            freed = np.cumsum(contexts)
            enough = int(np.searchsorted(freed, context[i] - RESUME_SHARE * d.capacity[i])) + 1
            gone = newest[: min(enough, len(newest) - 1)]
            self.books.preempted += len(gone)
            self._suspend(i, gone, lost=False)
            d.allowed[i] = max(1, int(d.n[i]))

    # Steps

    def _try_step(self) -> None:
        self._give_up(self.training.try_step(self.now_s))

    def _happen(self) -> None:
        """Events that are due."""
        if self.training.ends_s <= self.now_s + 1e-12:
            self.finishing.settle()
            self._end_step()
        arrived = self.weights.arrived(self.now_s)
        if arrived:
            self.finishing.settle()
            self.weights.switch(arrived, self.numbers, self.version, self.now_s)
        self._updated()

    def _updated(self) -> None:
        """A trainer that waits for the replicas' updates waits no longer than there are any."""
        if self.training.state == "updating" and not self.weights.under_way:
            self.training.enter("waiting", self.now_s)

    def _end_step(self) -> None:
        seen = self.training.end()
        if self.timeline is not None:
            self.timeline.span("trainer", "trainer", f"step {seen.step}", seen.began_s, self.now_s)
        self.granting.version = seen.step + 1
        for name, i in self.numbers.items():
            self.weights.send(name, i, self.version, self.now_s)
        updating = self.rules.pause_all and self.weights.under_way
        self.training.enter("updating" if updating else "waiting", self.now_s)
        self.on_step()

    def _give_up(self, ordinals: tuple[int, ...]) -> None:
        """Groups that the rule evicted: their tokens are wasted, whoever decodes for them stops."""
        if not ordinals:
            return
        g, d, gone = self.groups, self.decoding, set(ordinals)
        rows = np.array([r for r in np.flatnonzero(g.live).tolist() if int(g.ordinal[r]) in gone])
        at = np.flatnonzero(np.isfinite(d.ends) & np.isin(d.row, rows))
        if len(at):
            self.finishing.count(at, d.starts[at] + np.clip(np.floor(d.v[d.rep[at]] - d.starts[at] + 1e-6), 0, None))
            d.clear(at)
            d.recount()
        self.books.waste("stale", int(g.tokens[rows].sum()))
        g.forget_waiting(set(rows.tolist()))
        self.finishing.take(ordinals)
        g.given_up += len(rows)
        g.release(rows)

    # What is seen

    @property
    def queue_groups(self) -> int:
        """Complete groups that wait for the trainer."""
        return len(self.finishing.complete)

    def partial_tokens(self) -> int:
        """Tokens sampled by running samples since their leases, not yet in their groups."""
        d = self.decoding
        on = np.flatnonzero(np.isfinite(d.ends))
        done = np.floor(d.v[d.rep[on]] - d.starts[on] + 1e-6)
        return int(np.clip(done, 0, d.ends[on] - d.starts[on] - 1).sum())

    def in_flight_tokens(self) -> int:
        """Tokens neither trained nor masked nor wasted."""
        return int(self.groups.tokens[self.groups.live].sum()) + self.partial_tokens()
