"""Held-out evaluation beside the run: leases with negative group ordinals, outside the ledger, in memory only.

A round begins every N steps, on weights of that version or later. It takes a small share of a replica's slots, only what
training left free; its samples are leased again when a replica is lost; at the end of the run it is abandoned. Nothing
waits for it. A flow that is restarted begins the round anew.
"""

from collections.abc import Sequence

from planner.record import record, replace
from runtime.rl.flow.records import JsonLines
from runtime.rl.flow.state import EPOCHS_PER_OPENING, FlowState
from runtime.rl.rewards.items import RewardItem, RewardResult
from runtime.rl.tasks.task import TaskItem
from runtime.rl.types import Append, FinishReason, Lease, SampleId

Holder = tuple[str, int, int]  # replica, its epoch, lease epoch


@record
class _Probe:
    """One held-out sample."""

    item: TaskItem
    holder: Holder | None = None
    since_s: float = 0.0  # when leased or last given a token
    seq: int = 0  # flush of the holder that was answered with the lease
    tokens: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()
    finish: FinishReason | None = None
    reward: float | None = None


class Evaluation:
    """At most one round at a time; a round that falls due meanwhile is left out."""

    def __init__(self, state: FlowState, file: JsonLines) -> None:
        self._state, self._file = state, file
        self._items: tuple[TaskItem, ...] | None = None
        self._probes: dict[SampleId, _Probe] = {}
        self._step = 0  # steps behind the weights the running round is about
        last = file.last()
        self._done = int(str(last.get("step", 0))) if last is not None else 0
        self._epoch = state.opening * EPOCHS_PER_OPENING

    @property
    def running(self) -> bool:
        """Whether a round is under way."""
        return bool(self._probes)

    def holds(self, replica: tuple[str, int]) -> int:
        """Samples a replica holds for evaluation."""
        return sum(p.holder is not None and p.holder[:2] == replica and p.finish is None for p in self._probes.values())

    def begin_if_due(self) -> None:
        """Start a round when the newest version is one to evaluate."""
        state, every = self._state, self._state.settings.eval_every_steps
        if not every or self._probes or state.closing or state.limit_reached or state.published is None:
            return
        due = state.version // every * every
        if due <= self._done or due == 0:
            return
        if self._items is None:
            self._items = state.task.eval_items(state.settings.eval_prompts)
        self._step = self._done = due
        base = (due // every) * len(self._items)
        self._probes = {SampleId(-1 - base - i, 0): _Probe(item=item) for i, item in enumerate(self._items)}

    def grant(self, replica: tuple[str, int], *, version: int, slots: int, free: int, seq: int) -> tuple[Lease, ...]:
        """Leases for a replica at `version` with `free` slots that training does not want now."""
        if not self._probes or version < self._step:
            return ()
        share = max(1, int(slots * self._state.settings.eval_share))
        room = min(free, share - self.holds(replica))
        leases: list[Lease] = []
        for sample, probe in self._probes.items():
            if len(leases) >= room:
                break
            if probe.holder is None and probe.finish is None:
                self._epoch += 1
                self._probes[sample] = replace(
                    probe, holder=(*replica, self._epoch), seq=seq, since_s=self._state.clock()
                )
                leases.append(self._lease(sample))
        return tuple(leases)

    def granted_at(self, replica: tuple[str, int], seq: int) -> tuple[Lease, ...]:
        """Leases that answered flush `seq`: for a replica that did not get the answer."""
        mine = [
            s for s, p in self._probes.items()
            if p.holder is not None and p.holder[:2] == replica and p.seq == seq and p.finish is None
        ]  # fmt: skip
        return tuple(self._lease(s) for s in mine)

    def append(self, append: Append, replica: tuple[str, int]) -> tuple[bool, RewardItem | None]:
        """Take tokens. (False, None): no longer wanted from that replica. An item when the sample is finished."""
        probe = self._probes.get(append.sample)
        if probe is None or probe.holder != (*replica, append.epoch) or append.start != len(probe.tokens):
            return False, None
        n = len(append.tokens)
        probe = replace(
            probe,
            tokens=probe.tokens + append.tokens,
            versions=probe.versions + (append.version,) * n,
            finish=append.finished,
            since_s=self._state.clock(),
        )
        self._probes[append.sample] = probe
        if append.finished is None:
            return True, None
        return True, RewardItem(
            sample=append.sample,
            prompt=probe.item.prompt,
            response=response_text(self._state, probe.tokens),
            answer=probe.item.answer,
            finish=append.finished,
        )

    def state(self) -> dict[SampleId, _Probe]:
        """What a transaction that fails must leave as it was."""
        return dict(self._probes)

    def restore(self, probes: dict[SampleId, _Probe]) -> None:
        """As it was."""
        self._probes = probes

    def release(self, replica: tuple[str, int], samples: Sequence[SampleId] | None = None) -> None:
        """A replica no longer holds these (None: any); they are leased elsewhere, with their tokens."""
        for sample, probe in self._probes.items():
            mine = probe.holder is not None and probe.holder[:2] == replica and probe.finish is None
            if mine and (samples is None or sample in samples):
                self._probes[sample] = replace(probe, holder=None)

    def release_stalled(self, now_s: float) -> None:
        """Lease elsewhere what got no token for long, whatever the reason."""
        for sample, probe in self._probes.items():
            if probe.holder and probe.finish is None and now_s - probe.since_s > self._state.stall_s:
                self._probes[sample] = replace(probe, holder=None)

    def rewarded(self, result: RewardResult) -> None:
        """Take a verifier's answer; the last of a round writes its line."""
        probe = self._probes.get(result.sample)
        if probe is None or probe.finish is None:
            return
        self._probes[result.sample] = replace(probe, reward=result.reward)
        self._finish_if_whole()

    def lose(self, sample: SampleId) -> None:
        """The verifiers said nothing: the sample is left out of its round."""
        if self._probes.pop(sample, None) is not None and self._probes:
            self._finish_if_whole()

    def abandon(self) -> None:
        """End the round without a result."""
        self._probes = {}

    def _finish_if_whole(self) -> None:
        probes = self._probes.values()
        rewards = [p.reward for p in probes if p.reward is not None]
        if len(rewards) < len(self._probes):
            return
        versions = [v for p in probes for v in p.versions]
        self._file.append(
            {
                "time_unix_s": self._state.wall(),
                "step": self._step,
                "reward_mean": sum(rewards) / len(rewards),
                "n": len(rewards),
                "versions": [min(versions), max(versions)] if versions else [],
                "response_tokens_mean": len(versions) / len(rewards),
                "truncated_share": sum(p.finish == "length" for p in probes) / len(rewards),
            }
        )
        self._probes = {}

    def _lease(self, sample: SampleId) -> Lease:
        probe = self._probes[sample]
        assert probe.holder is not None
        return Lease(
            sample=sample,
            epoch=probe.holder[2],
            prompt_tokens=probe.item.prompt_tokens,
            tokens=probe.tokens,
            max_new_tokens=self._state.settings.max_new_tokens,
        )


def response_text(state: FlowState, tokens: Sequence[int]) -> str:
    """Text of a response without its end-of-sequence tokens."""
    ends = state.tokenizer.eos_ids
    return state.tokenizer.decode([t for t in tokens if t not in ends])
