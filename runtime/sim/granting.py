"""Who gets the next sample: admission, the staleness rule and dispatch, as the runtime's own policies have them."""

import math
from collections import Counter
from collections.abc import Mapping

import numpy as np

from runtime.policy import dispatch
from runtime.sim.decoding import INF, Bools, Decoding, Lane
from runtime.sim.groups import Floats, GroupTable, Ints
from runtime.sim.rules import FlowRules
from runtime.sim.speed import ReplicaSpeed


class Granting:
    """Gives samples to slots. `version` is the newest published; the flow keeps it up to date."""

    def __init__(self, rules: FlowRules, decoding: Decoding, groups: GroupTable, seed: int) -> None:
        self._rules, self._decoding, self._groups = rules, decoding, groups
        self.version = 0
        self.begun: Counter[int] = Counter()  # live groups by the version they were begun at; only `wait` needs it
        self._waits = rules.policy.stale == "wait"
        self._block = rules.block
        self._ramps: dict[str, int] = {}
        self._cold: set[str] = set()  # replicas whose warm-up is not over
        self._speeds: dict[str, dispatch.SpeedModel] = {}
        self._allotted: Mapping[str, int] = {}
        # Generators of their own, so that a run's lengths do not depend on how many were drawn at once.
        rngs = [np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(4)]
        self._lengths, self._prompts, self._rounding, self._prompt_rounding = rngs

    def restart(self, groups: GroupTable, version: int) -> None:
        """Go on with other groups at an older version."""
        self._groups, self.version, self.begun = groups, version, Counter()

    def join(self, name: str, speed: ReplicaSpeed) -> int:
        """A replica comes; answers with how many samples it may hold at first. Its speed counts as known."""
        model, context = dispatch.SpeedModel(), self._rules.prompt.mean_tokens + self._rules.response.mean_tokens / 2
        for n in (max(1, speed.slots // 2), speed.slots):
            step = speed.step_s(n, context)
            model = model.observe(n, n / step if step > 0 else 0.0)
        self._ramps[name], self._speeds[name] = dispatch.first_ramp(speed.slots), model
        self._cold.add(name)
        return self._ramps[name]

    def allot(self, slots: Mapping[str, int]) -> None:
        """Samples that each replica of these names decodes at once, in place of all that was said before; the others as many as
        they have room for. What runs beyond that goes on to its end."""
        if slots != self._allotted:
            self._allotted = dict(slots)
            most = [self._most(lane) for lane in self._decoding.lanes]
            self._decoding.allowed = np.minimum(self._decoding.allowed, np.array(most, dtype=np.int64))

    def most(self, i: int) -> int:
        """Samples that replica i decodes at once, once it is warm."""
        return self._most(self._decoding.lanes[i])

    def _most(self, lane: Lane) -> int:
        return max(1, min(lane.speed.slots, self._allotted.get(lane.name, lane.speed.slots)))

    @property
    def admissible(self) -> int:
        """Groups that may be admitted now."""
        return max(0, self._rules.policy.capacity(self.version) - self._groups.next_slot)

    @property
    def waiting(self) -> int:
        """Samples that could be leased now, those of groups not yet admitted included."""
        return self._groups.waiting + self.admissible * self._rules.responses_per_prompt

    @property
    def ramping(self) -> bool:
        """Whether a replica is still warming up: what it may hold grows from window to window."""
        if not self._cold:
            return False
        d = self._decoding
        full = (d.n >= d.allowed).tolist()
        return any(f and self._ramps[x.name] < self._most(x) for x, f in zip(d.lanes, full, strict=True))

    def fill(self, now_s: float) -> None:
        """Work for free slots."""
        d, waiting = self._decoding, self.waiting
        if not d.lanes or waiting <= 0:
            return
        self._warm_up()
        allowed = d.allowed
        room = allowed - d.n
        if room.max() <= 0:
            return
        if waiting < room.clip(0).sum() and len({id(x.speed) for x in d.lanes}) > 1:
            room = np.minimum(room, self._granted(waiting))
        free = np.flatnonzero(d.ends == INF)
        r = d.rep[free]
        rank = np.arange(len(free)) - free.searchsorted(d.begin[:-1])[r]
        chosen = rank < room[r]
        free, rank, r = free[chosen], rank[chosen], r[chosen]
        order = np.argsort((rank + d.n[r]) / allowed[r], kind="stable")  # the emptiest first
        free = free[order]
        if len(self.give(free, d.v[d.rep[free]], np.full(len(free), now_s))):
            d.recount()

    def _warm_up(self) -> None:
        """What each replica may hold, by its warm-up and its use of KV."""
        d = self._decoding
        held = d.held_tokens(dispatch.KV_HIGH_WATER)
        share = np.where(np.isfinite(d.capacity), held / np.maximum(d.capacity, 1.0), 0.0)
        most = np.array([self._most(x) for x in d.lanes]) if self._allotted else d.slots
        settled = (d.allowed >= most) & (share * most <= dispatch.KV_HIGH_WATER * d.n)
        for i in np.flatnonzero(~settled).tolist():
            lane = d.lanes[i]
            slots = self._most(lane)
            if self._ramps[lane.name] < slots:
                self._ramps[lane.name] = dispatch.next_ramp(self._load(i, float(share[i])), progressed=True)
            if self._ramps[lane.name] >= slots:
                self._cold.discard(lane.name)
            d.allowed[i] = self._load(i, float(share[i])).cap()

    def _load(self, i: int, share: float) -> dispatch.ReplicaLoad:
        lane = self._decoding.lanes[i]
        return dispatch.ReplicaLoad(
            slots=self._most(lane),
            leased=int(self._decoding.n[i]),
            kv_used_share=share,
            speed=self._speeds[lane.name],
            ramp=self._ramps[lane.name],
        )

    def _granted(self, waiting: int) -> Ints:
        """How many samples each replica takes when there are fewer than places, by the runtime's rule: it is asked for the
        emptiest replica of each speed, and the others of that speed take as many."""
        loads = [self._load(i, 0.0) for i in range(len(self._decoding.lanes))]
        alike: dict[int, list[int]] = {}
        for i in sorted(range(len(loads)), key=lambda i: loads[i].leased / loads[i].slots):
            alike.setdefault(id(self._decoding.lanes[i].speed), []).append(i)
        out = np.zeros(len(loads), dtype=np.int64)
        for same in alike.values():
            first = same[0]
            most = dispatch.grant(loads[first], loads[:first] + loads[first + 1 :], waiting=waiting)
            for i in same:
                out[i] = min(most, waiting)
                waiting -= int(out[i])
        if waiting > 0 and not out.any():
            out[:] = waiting  # each would leave it to the others
        return out

    def before_newcomers(self, at: Ints, into: Floats) -> Bools | None:
        """Which of these slots, whose samples end so many seconds into the window, are free no later than the soonest that a
        sample which takes such a place can end (None: all). They can be given at once, and all is given in the order of
        time."""
        d, g = self._decoding, self._groups
        if self.waiting <= 0:
            return None
        count = len(at) if self._block is None else self._begin_at_most(at) * g.members
        self._admit_for(count)
        least = g.least_left(count)
        if least is None:
            return None
        sooner: Bools = into <= float(d.seconds_into(at, after=least).min())
        return None if sooner.all() else sooner

    def _begin_at_most(self, at: Ints) -> int:
        """Groups that these slots begin when each replica first takes what is left of its own."""
        return int((-(-np.bincount(self._decoding.rep[at]) // self._groups.members)).sum())

    def _admit_for(self, count: int) -> None:
        g = self._groups
        short = count - (g.fresh_count if self._block is None else g.fresh_count - g.homes.waiting)
        if short > 0:
            self._admit(min(self.admissible, math.ceil(short / self._rules.responses_per_prompt)))

    def give(self, at: Ints, starts: Floats, now_s: Floats) -> Ints:
        """Lease what waits to these slots, first come first served; answers with the slots that got something. `starts`:
        the replica's clock in tokens at each."""
        d, g = self._decoding, self._groups
        resumed = self._resume(at, starts, now_s) if g.suspended and len(at) else np.zeros(0, dtype=np.int64)
        if len(resumed):
            left = ~np.isin(at, resumed)
            at, starts, now_s = at[left], starts[left], now_s[left]
        if not len(at):
            return resumed
        if self._block is not None:
            given = self._give_together(at, starts, now_s)
            return np.concatenate([resumed, given]) if len(resumed) else given
        self._admit_for(len(at))
        if g.fresh_count == 0:
            return resumed
        gets = self._allowed(at)
        if gets is not None:
            at, starts, now_s = at[gets], starts[gets], now_s[gets]
        rows, lengths = g.take_fresh(len(at))
        at, starts, now_s = at[: len(rows)], starts[: len(rows)], now_s[: len(rows)]
        versions = d.version[d.rep[at]]
        g.begin(rows, versions)
        d.lease(at, starts=starts, rows=rows, lengths=lengths, before=g.prompt[rows], first=versions, now_s=now_s)
        return np.concatenate([resumed, at]) if len(resumed) else at

    def _shared(self, rows: Ints) -> Floats:
        """Tokens of the prompts of these groups that their samples share: whole blocks before the last token."""
        if self._block is None:
            return np.zeros(len(rows))
        shared: Floats = self._block * np.floor((self._groups.prompt[rows] - 1) / self._block)
        return shared

    def _give_together(self, at: Ints, starts: Floats, now_s: Floats) -> Ints:
        """`give` where samples of a group share their prompt: each slot in turn takes one of a group whose prompt is there."""
        d, g, policy = self._decoding, self._groups, self._rules.policy
        taken: list[tuple[int, int, int, bool]] = []  # place in `at`, row, length, whether its prompt is there
        begun: dict[int, int] = {}
        limits: dict[int, int] = {}
        for k, r in enumerate(d.rep[at].tolist()):
            name, version = d.lanes[r].name, int(d.version[r])
            row = self._next_at(name)
            if row is None:
                break
            if g.slot[row] >= limits.setdefault(version, policy.capacity(version)):
                continue
            if self._waits and not self._begins(row, version, begun):
                continue
            if row == g.next_group:
                g.open_next()
            taken.append((k, row, *g.homes.take(row, name)))
        g.fresh_count -= len(taken)
        if not taken:
            return np.zeros(0, dtype=np.int64)
        places, rows, lengths, known = (np.array(x, dtype=np.int64) for x in zip(*taken, strict=True))
        at, starts, now_s = at[places], starts[places], now_s[places]
        versions, prompts = d.version[d.rep[at]], g.prompt[rows]
        shares = self._shared(rows)
        g.begin(rows, versions)
        d.lease(
            at, starts=starts, rows=rows, lengths=lengths, before=prompts, first=versions, now_s=now_s, shares=shares,
            found=shares * known,
        )  # fmt: skip
        return at

    def _next_at(self, name: str) -> int | None:
        """The group whose sample a replica takes next, in the order of `dispatch.choose`: of those due first one whose prompt it
        has, then one that nobody has, then one that others have. None: nothing waits."""
        g, size = self._groups, self._rules.policy.prompts_per_step
        oldest, here = next(iter(g.homes), None), g.homes.here(name)
        if here is not None and g.slot[oldest] // size >= g.slot[here] // size:
            return here  # a group that is not begun is due no sooner
        if g.next_group is None:
            self._admit(min(self.admissible, 1))
        found = [
            (g.slot[row] // size, i, row)
            for i, row in enumerate((here, g.homes.nowhere(), g.next_group, oldest))
            if row is not None
        ]
        return min(found)[2] if found else None

    def _resume(self, at: Ints, starts: Floats, now_s: Floats) -> Ints:
        """Suspended samples go on first, each on the first slot whose weights its group allows."""
        d, g, policy = self._decoding, self._groups, self._rules.policy
        out: list[int] = []
        back = []
        free = list(range(len(at)))
        while g.suspended and free:
            sample = g.suspended.popleft()
            least = policy.min_version(int(g.slot[sample.row]))
            if self._waits:
                least = max(least, int(g.started[sample.row]))
            k = next((k for k in free if d.version[d.rep[at[k]]] >= least), None)
            if k is None:
                back.append(sample)
                continue
            free.remove(k)
            one = at[k : k + 1]
            d.lease(
                one,
                starts=starts[k : k + 1],
                rows=np.array([sample.row]),
                lengths=np.array([sample.left]),
                before=np.array([float(sample.context)]),
                first=np.array([sample.first]),
                now_s=now_s[k : k + 1],
                shares=self._shared(np.array([sample.row])),
            )
            out.append(int(at[k]))
        g.suspended.extendleft(reversed(back))
        return np.array(out, dtype=np.int64)

    def _admit(self, count: int) -> None:
        if count <= 0:
            return
        s = self._rules.responses_per_prompt
        lengths = self._rules.response.draw(self._lengths, count * s, self.version, rounding=self._rounding)
        prompts = self._rules.prompt.draw(self._prompts, count, rounding=self._prompt_rounding)
        self._groups.admit(lengths.reshape(count, s), prompts)

    def _allowed(self, at: Ints) -> Ints | None:
        """Which of these slots, in order, get the next fresh samples (places in `at`; None: all). A slot goes without when
        its replica's weights are too old for the sample whose turn it is."""
        g, policy = self._groups, self._rules.policy
        # Fresh samples come in the order of their slots: where the last may run on the oldest weights, all may anywhere.
        if not self._waits and g.slot[g.fresh[-1][0][-1]] < policy.capacity(int(self._decoding.version.min())):
            return None
        versions = self._decoding.version[self._decoding.rep[at]]
        limits = {v: policy.capacity(v) for v in set(versions.tolist())}
        if not self._waits:
            return self._within(at, versions, limits)
        out: list[int] = []
        turns = iter(g.next_rows(len(at)).tolist())
        row = next(turns, None)
        held: dict[int, int] = {}
        for k, v in enumerate(versions.tolist()):
            if row is None:
                break
            if g.slot[row] >= limits[v]:
                continue
            if self._waits and not self._begins(row, v, held):
                continue
            out.append(k)
            row = next(turns, None)
        return np.array(out, dtype=np.int64)

    def _within(self, at: Ints, versions: Ints, limits: dict[int, int]) -> Ints:
        """Under `mask` and `drop`: by the slots' limits alone."""
        g = self._groups
        slots = g.slot[g.next_rows(len(at))]
        known = np.array(sorted(limits))
        limit = np.array([limits[int(v)] for v in known])[np.searchsorted(known, versions)]
        out, left, turn = [], np.arange(len(at)), 0
        for most in sorted(limits.values()):
            mine = left[: max(0, int(np.searchsorted(slots, most)) - turn)]
            out.append(mine)
            turn += len(mine)
            left = left[len(mine) :]
            left = left[limit[left] > most]
        return np.concatenate(out)

    def _begins(self, row: int, version: int, held: dict[int, int]) -> bool:
        """Under `wait`: whether a sample of the group may begin at that version, which is then noted."""
        started = held.get(row, int(self._groups.started[row]))
        if started >= 0:
            self.begun[started] -= 1
        ok = self._rules.policy.may_begin(None if started < 0 else started, version, self.version, self.begun)
        if ok:
            started = version if started < 0 else min(started, version)
            held[row] = started
        if started >= 0:
            self.begun[started] += 1
        return ok
