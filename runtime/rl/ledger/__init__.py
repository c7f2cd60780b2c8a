"""The trajectory ledger and token journal of a run."""

from runtime.rl.ledger.audit import Audit, audit
from runtime.rl.ledger.book import Book
from runtime.rl.ledger.journal import Span, Trajectory
from runtime.rl.ledger.ledger import KEEP_STEPS, MAX_HOPS, Ledger
from runtime.rl.ledger.rows import GroupRow, ReplicaRow, SampleRow, State, StepRow, hash_ids

__all__ = [
    "KEEP_STEPS",
    "MAX_HOPS",
    "Audit",
    "Book",
    "GroupRow",
    "Ledger",
    "ReplicaRow",
    "SampleRow",
    "Span",
    "State",
    "StepRow",
    "Trajectory",
    "audit",
    "hash_ids",
]
