"""Samples that end: their tokens, their groups, and which groups can be trained.

A window only notes what ends in it. It is put into the figures later, for many windows together: `settle` is called before
anybody looks at them, and before the slots or the versions that they are counted by become others.
"""

import bisect

import numpy as np

from runtime.policy.staleness import GroupView
from runtime.sim.decoding import Decoding
from runtime.sim.figures import Books
from runtime.sim.groups import Floats, GroupTable, Ints
from runtime.sim.rules import FlowRules

Complete = tuple[float, int, GroupView]  # since when, its row, and what the staleness rule is told of it


class Finishing:
    """`complete`: groups that can be trained, by the time at which they became so; up to date once `settle` was called."""

    def __init__(self, rules: FlowRules, decoding: Decoding, groups: GroupTable, books: Books) -> None:
        self._rules, self._decoding, self._groups, self._books = rules, decoding, groups, books
        self.complete: list[Complete] = []
        self._noted: list[tuple[Ints, Floats, Floats]] = []

    def restart(self, groups: GroupTable) -> None:
        """Go on with other groups, of which none is complete."""
        self._groups, self.complete, self._noted = groups, [], []

    def note(self, at: Ints, seconds: Floats) -> Floats:
        """The samples of these slots ended at these times, in this order; the slots are free. Answers with V at each end."""
        ends: Floats = self._decoding.ends[at]
        self._noted.append((at, ends, seconds))
        self._decoding.clear(at)
        return ends

    def settle(self) -> None:
        """Everything noted is in the figures, in the order in which it ended."""
        if not self._noted:
            return
        d, g, noted = self._decoding, self._groups, self._noted
        for slots, _, times in noted:
            self._books.finish(len(slots), float((times - d.leased_s[slots]).sum()))
        at, ends, seconds = noted[0] if len(noted) == 1 else map(np.concatenate, zip(*noted, strict=True))
        self._noted = []
        self.count(at, ends)
        done = g.finish(d.row[at], seconds, d.before[at] + (ends - d.starts[at]))
        if done:
            for at_s, row, view in zip(g.complete_s[done].tolist(), done, self.seen(done, complete=True), strict=True):
                bisect.insort(self.complete, (at_s + self._rules.reward_s, row, view))

    def count(self, at: Ints, upto: Floats) -> None:
        """Put the tokens that these slots have sampled until V = `upto` into their groups, by version."""
        rows = self._decoding.row[at]
        for versions, tokens in self._decoding.spans(at, upto):
            self._groups.count(rows, versions, tokens)
            self._books.generated_tokens += int(tokens.sum())

    def seen(self, rows: list[int], *, complete: bool) -> list[GroupView]:
        """What the staleness rule is told of these groups."""
        g = self._groups
        told = zip(g.ordinal[rows].tolist(), g.slot[rows].tolist(), g.started[rows].tolist(), strict=True)
        return [GroupView(ordinal=o, slot=s, complete=complete, started=None if v < 0 else v) for o, s, v in told]

    def take(self, ordinals: tuple[int, ...]) -> list[int]:
        """These groups are trained or given up, complete ones are so no longer; answers with the rows of those that were, in the
        order asked for."""
        asked, rows, left = set(ordinals), {}, []
        for c in self.complete:
            _, row, view = c
            if view.ordinal in asked:
                rows[view.ordinal] = row
            else:
                left.append(c)
        self.complete = left
        return [rows[o] for o in ordinals if o in rows]
