"""Reading the token journal: trajectories of samples, and the steps of the past."""

import json
import sqlite3
from collections.abc import Mapping, Sequence

from planner.record import record
from runtime.rl.arrays import TOKEN_BYTES, unpack_logprobs, unpack_tokens
from runtime.rl.ledger.book import step_row
from runtime.rl.ledger.draft import Segment
from runtime.rl.ledger.rows import StepRow
from runtime.rl.types import SampleId


@record
class Span:
    """Tokens [start, start + length) of a sample, made by weights `version` under lease `epoch`."""

    start: int
    length: int
    version: int
    epoch: int


@record
class Trajectory:
    """What the journal holds of one sample. `tokens`, `logprobs` and `versions` have one entry a token."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()


_SEGMENTS_OF_GROUP = (
    "SELECT grp, member, start, epoch, version, tokens, logprobs FROM segments WHERE grp = ? ORDER BY member, start"
)


class Journal:
    """The segments of the file and those of the open transaction, as one."""

    def __init__(self, db: sqlite3.Connection, pending: Mapping[SampleId, Sequence[Segment]]) -> None:
        self._db, self._pending = db, pending

    def tokens(self, sample: SampleId) -> tuple[int, ...]:
        """Tokens alone."""
        return unpack_tokens(b"".join(s[5] for s in self._segments(sample)))

    def read(self, samples: Sequence[SampleId]) -> Mapping[SampleId, Trajectory]:
        """Whole trajectories; one question to the file a group."""
        wanted: dict[SampleId, list[Segment]] = {sample: [] for sample in samples}
        for group in dict.fromkeys(s.group for s in samples):
            for segment in self._db.execute(_SEGMENTS_OF_GROUP, (group,)):
                if (kept := wanted.get(SampleId(segment[0], segment[1]))) is not None:
                    kept.append(segment)
        return {sample: _trajectory([*found, *self._pending.get(sample, ())]) for sample, found in wanted.items()}

    def last(self, count: int) -> tuple[tuple[Mapping[str, object], ...], Mapping[str, object]]:
        """Figures of the newest `count` applied steps, oldest first, and metrics of the newest: what is shown again and again,
        without the thousands of ids."""
        newest = "FROM steps WHERE state = 'APPLIED' ORDER BY step DESC LIMIT ?"
        figures = self._db.execute(f"SELECT figures {newest}", (count,)).fetchall()
        metrics = self._db.execute(f"SELECT metrics {newest}", (1,)).fetchone()
        return tuple(json.loads(f) for (f,) in reversed(figures)), {} if metrics is None else json.loads(metrics[0])

    def steps(self, last: int) -> tuple[StepRow, ...]:
        """The newest `last` applied steps, oldest first."""
        raw = self._db.execute("SELECT * FROM steps WHERE state = 'APPLIED' ORDER BY step DESC LIMIT ?", (last,))
        return tuple(step_row(r) for r in raw)[::-1]

    def _segments(self, sample: SampleId) -> list[Segment]:
        stored = self._db.execute(
            "SELECT grp, member, start, epoch, version, tokens, logprobs FROM segments"
            " WHERE grp = ? AND member = ? ORDER BY start",
            sample,
        ).fetchall()
        return [*stored, *self._pending.get(sample, ())]


def _trajectory(segments: Sequence[Segment]) -> Trajectory:
    """Blobs are joined before they are unpacked: nothing here is done token by token."""
    versions: list[int] = []
    spans: list[Span] = []
    for _, _, start, epoch, version, token_blob, _ in segments:
        made = len(token_blob) // TOKEN_BYTES
        versions += [version] * made
        last = spans[-1] if spans else None
        if last is not None and (last.version, last.epoch) == (version, epoch):
            spans[-1] = Span(start=last.start, length=last.length + made, version=version, epoch=epoch)
        else:
            spans.append(Span(start=start, length=made, version=version, epoch=epoch))
    return Trajectory(
        tokens=unpack_tokens(b"".join(s[5] for s in segments)),
        logprobs=unpack_logprobs(b"".join(s[6] for s in segments)),
        versions=tuple(versions),
        spans=tuple(spans),
    )
