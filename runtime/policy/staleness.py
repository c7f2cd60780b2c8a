"""The staleness bound: who may be admitted, where a sample may run, what a step takes and what each token weighs.

One object owns the rule; nobody else repeats it. Version v is the weights after v optimiser steps, step i turns version i
into i + 1, and a token of version v trained at step i has age i - v. G groups make a step.

A group's `slot` is its place in the queue of groups that can still be trained: the number of groups admitted before it
that were not given up. Without losses it is the group's ordinal. Slot s is due at step s // G.

Admission alone bounds only the mean age; the guarantee is where groups are consumed (`select`, `token_weights`):

- mask: a step takes the G oldest complete groups; tokens older than eta weigh 0. Nothing waits, nothing is lost.
- wait: a step is taken only if every group already begun can still be taken in time (a demand-bound test over all
  horizons), and a lease that would make that impossible is refused. No token is ever older than eta.
- drop: groups that can no longer be trained within eta are given up. Favours short answers; counted as waste.

With eta = 0 all three are exactly synchronous.
"""

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from planner.errors import InvalidInput
from planner.record import record

StalePolicy = Literal["mask", "wait", "drop"]


@record
class GroupView:
    """What the rule needs to know of a live group (admitted, neither reserved nor given up)."""

    ordinal: int
    slot: int
    complete: bool  # every member done and rewarded, or dead
    started: int | None  # lowest version of its tokens, or of a replica that holds a lease on it; None: not begun


@record
class Selection:
    """What step i does: train `groups`, give up `evicted`; or wait for what `waits_for` says."""

    groups: tuple[int, ...] = ()
    evicted: tuple[int, ...] = ()
    waits_for: str = ""


@record
class StalenessPolicy:
    """Admit, select, weigh and evict under the bound `eta` (in optimiser steps)."""

    eta: int
    prompts_per_step: int
    stale: StalePolicy = "mask"

    def __post_init__(self) -> None:
        if self.eta < 0:
            raise InvalidInput("eta must not be negative", got=self.eta)
        if self.prompts_per_step < 1:
            raise InvalidInput("prompts_per_step must be positive", got=self.prompts_per_step)

    def capacity(self, version: int) -> int:
        """How many groups may hold a slot in all, from the start of the run, while `version` is the newest published."""
        return (version + self.eta + 1) * self.prompts_per_step

    @property
    def most_outstanding(self) -> int:
        """Most groups admitted and not yet trained at any moment."""
        return (self.eta + 1) * self.prompts_per_step

    def admits(self, slot: int, version: int) -> bool:
        """Whether a group may take `slot` while `version` is the newest published."""
        return slot // self.prompts_per_step <= version + self.eta

    def min_version(self, slot: int) -> int:
        """Lowest version of weights that may decode a sample of that slot."""
        return max(0, slot // self.prompts_per_step - self.eta)

    def may_lease(self, group: GroupView, version: int, step: int, others: Sequence[GroupView]) -> bool:
        """Whether a sample of `group` may go to a replica at `version` when `step` is the next to train.

        `others`: the other live groups. Only `wait` needs them: beginning a group on old weights shortens its deadline,
        which must leave every deadline feasible.
        """
        if version < self.min_version(group.slot):
            return False
        counts = Counter(g.started for g in others if g.started is not None) if self.stale == "wait" else {}
        return self.may_begin(group.started, version, step, counts)

    def may_begin(self, started: int | None, version: int, step: int, starts: Mapping[int, int]) -> bool:
        """The part of `may_lease` that does not depend on the slot: whether a group first begun at `started` may (also) begin
        at `version`. `starts`: how many other live groups were begun at each version; only `wait` reads it."""
        if self.stale == "mask":
            return True
        start = version if started is None else min(version, started)
        if start == started:
            return True
        if start < step - self.eta:
            return False
        if self.stale == "drop":
            return True
        return all(
            sum(n for s, n in starts.items() if s <= step - self.eta + h) + (start <= step - self.eta + h)
            <= (h + 1) * self.prompts_per_step
            for h in range(self.eta + 1)
        )

    def select(self, groups: Sequence[GroupView], step: int) -> Selection:
        """The batch of `step` from all live groups."""
        evicted: tuple[int, ...] = ()
        if self.stale == "drop":
            oldest_allowed = step - self.eta
            evicted = tuple(sorted(g.ordinal for g in groups if g.started is not None and g.started < oldest_allowed))
            groups = [g for g in groups if g.ordinal not in set(evicted)]
        complete = [g for g in groups if g.complete]
        if self.stale == "wait":
            complete.sort(key=lambda g: (-1 if g.started is None else g.started, g.ordinal))
        else:
            complete.sort(key=operator.attrgetter("ordinal"))
        needed = self.prompts_per_step
        if len(complete) < needed:
            return Selection(evicted=evicted, waits_for=f"{needed - len(complete)} more complete groups")
        taken = complete[:needed]
        if self.stale == "wait" and (late := self._overdue(groups, taken, step)):
            return Selection(waits_for=late)
        return Selection(groups=tuple(sorted(g.ordinal for g in taken)), evicted=evicted)

    def token_weights(self, versions: Sequence[int], step: int) -> tuple[float, ...]:
        """1.0 for a token the bound allows at `step`, 0.0 for an older one. Applied under every policy."""
        oldest_allowed = step - self.eta
        if not versions or min(versions) >= oldest_allowed:  # nearly all samples: no loop over tokens
            return (1.0,) * len(versions)
        return tuple([1.0 if v >= oldest_allowed else 0.0 for v in versions])

    def _overdue(self, groups: Sequence[GroupView], taken: Sequence[GroupView], step: int) -> str:
        """Words for a demand that could not be met after taking `taken`; "" when all can. Demand D(h) counts the groups
        that must be trained by step + h; later steps up to then train h * G."""
        for h in range(self.eta + 1):
            due = step - self.eta + h
            demand = sum(g.started is not None and g.started <= due for g in groups)
            met = sum(g.started is not None and g.started <= due for g in taken)
            if demand - met > h * self.prompts_per_step:
                return f"{demand - met - h * self.prompts_per_step} groups begun at version {due} or before"
        return ""


def ages(versions: Sequence[int], step: int) -> Mapping[int, int]:
    """Histogram of token ages at `step`: age -> tokens. A token of a newer version (after a fork) counts as age 0."""
    counts: dict[int, int] = {}
    for v, tokens in Counter(versions).items():  # a few versions, many tokens
        age = max(0, step - v)
        counts[age] = counts.get(age, 0) + tokens
    return counts
