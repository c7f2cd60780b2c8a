"""Rows of the ledger as values, and the hash of a batch's ids."""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from planner.record import record
from runtime.rl.types import FinishReason, SampleId

State = Literal["PENDING", "LEASED", "SUSPENDED", "DONE", "RESERVED", "APPLIED", "DEAD_LETTER"]
STATES: tuple[State, ...] = ("PENDING", "LEASED", "SUSPENDED", "DONE", "RESERVED", "APPLIED", "DEAD_LETTER")
TERMINAL: frozenset[State] = frozenset(("APPLIED", "DEAD_LETTER"))
LEASABLE: frozenset[State] = frozenset(("PENDING", "SUSPENDED"))


class SampleRow(NamedTuple):
    """One sample, its fields in the order of the table's columns: a flush changes a hundred of them, and a tuple is written
    as it is. Tokens and versions count response tokens in the journal."""

    group: int
    member: int
    state: State = "PENDING"
    epoch: int = 0  # of the last lease; 0: never leased
    replica: str = ""  # holder of the lease
    replica_epoch: int = 0
    lease_seq: int = 0  # flush of the holder that was answered with the lease
    lease_length: int = 0  # tokens when leased
    length: int = 0
    hops: int = 0  # leases in a row that ended without a new token
    finish: FinishReason | None = None
    reward: float | None = None
    step: int | None = None  # reserved or applied in
    reason: str = ""  # of the dead letter
    trained: int = 0  # tokens of weight 1, decided when reserved
    masked: int = 0  # tokens of weight 0
    oldest: int | None = None  # versions of its tokens
    newest: int | None = None

    @property
    def id(self) -> SampleId:
        """Its identity."""
        return SampleId(self.group, self.member)

    @property
    def live(self) -> bool:
        """Whether its tokens are in flight."""
        return self.state not in TERMINAL


@record
class GroupRow:
    """One prompt: its place and its text. Kept until its samples are applied or dead."""

    ordinal: int
    slot: int  # place in the queue of groups not given up (runtime.policy.staleness)
    prompt_tokens: tuple[int, ...]
    prompt: str
    answer: str


@record
class StepRow:
    """One optimiser step. `figures` is what is shown and summed later; `metrics` is the line of metrics.jsonl."""

    step: int
    state: Literal["RESERVED", "APPLIED"]
    lineage: int
    ids_hash: str
    ids: tuple[SampleId, ...]
    eta: int  # the bound its weights were decided under
    figures: Mapping[str, object] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, object] = dataclasses.field(default_factory=dict)


@record
class ReplicaRow:
    """What must be remembered of a replica incarnation: the last flush applied and the tokens received from it."""

    replica: str
    epoch: int
    seq: int = 0
    received: int = 0
    order: str = "serve"
    forgotten: bool = False  # it gets nothing any more
    counted: bool = False  # what it lost is in the redone tokens


def hash_ids(step: int, ids: Iterable[SampleId]) -> str:
    """Hash of the batch of `step`: hex, over the step and the sorted ids."""
    text = f"{step}:" + ",".join(f"{g}.{m}" for g, m in sorted(ids))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
