"""Finished samples on their way to a reward.

A verifier that fails on a response (timeout, crash, exception) answers with reward 0 and an error, which is counted: an
answer that cannot be verified is not right, and giving such samples up would favour short ones. Silence is another thing:
when the verifiers answer nothing at all for a deadline, an item is sent once more, and after a second deadline the sample
becomes a dead letter ("reward_timeout").
"""

from collections.abc import Sequence

from planner.record import record, replace
from runtime.rl.rewards.items import RewardClient, RewardItem
from runtime.rl.types import SampleId

TRIES = 2


@record
class Overdue:
    """Samples whose items were sent again, and those given up."""

    repeated: tuple[SampleId, ...] = ()
    lost: tuple[SampleId, ...] = ()


@record
class _Pending:
    item: RewardItem
    since_s: float
    tries: int


class RewardDesk:
    """Items submitted and not answered. Memory only: after a restart flow submits again what has no reward."""

    def __init__(self, client: RewardClient, *, deadline_s: float) -> None:
        self._client, self._deadline_s = client, deadline_s
        self._pending: dict[SampleId, _Pending] = {}
        self._answered_s = float("-inf")

    def __len__(self) -> int:
        return len(self._pending)

    def submit(self, items: Sequence[RewardItem], now_s: float) -> None:
        """Hand items to the verifiers."""
        new = [i for i in items if i.sample not in self._pending]
        self._pending.update({i.sample: _Pending(item=i, since_s=now_s, tries=1) for i in new})
        if new:
            self._client.submit(new)

    def awaits(self, sample: SampleId) -> bool:
        """Whether somebody waits for that answer."""
        return sample in self._pending

    def settle(self, sample: SampleId, now_s: float) -> float | None:
        """An answer came and is kept: seconds since the item was last sent, None when nobody waited for it. Call it after
        the ledger has it: until then the item is pending."""
        self._answered_s = now_s
        pending = self._pending.pop(sample, None)
        return None if pending is None else now_s - pending.since_s

    def drop(self, sample: SampleId) -> None:
        """Nobody waits for that one any more."""
        self._pending.pop(sample, None)

    def silent_s(self, now_s: float) -> float | None:
        """How long the verifiers have owed an answer; None when they owe none."""
        if not self._pending:
            return None
        return now_s - max(self._answered_s, min(p.since_s for p in self._pending.values()))

    def overdue(self, now_s: float) -> Overdue:
        """Send again, once, what has had no answer for the deadline; name what has had none twice (the caller drops
        them). Answers to other items show that the verifiers are at work, so the deadline counts from the last of them."""
        late = [s for s, p in self._pending.items() if now_s - max(p.since_s, self._answered_s) > self._deadline_s]
        lost = tuple(s for s in late if self._pending[s].tries >= TRIES)
        again = tuple(s for s in late if self._pending[s].tries < TRIES)
        for sample in again:
            p = self._pending[sample]
            self._pending[sample] = replace(p, since_s=now_s, tries=p.tries + 1)
        if again:
            self._client.submit([self._pending[s].item for s in again])
        return Overdue(repeated=again, lost=lost)
