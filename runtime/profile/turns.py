"""What a trainer's whole turns take against a flow that always has a batch: gradients, update, checkpoint, publication.

A checkpoint that is written beside the training costs the turns what it makes them stand still, and what they are slower while
it is written. Here one begins when the one before is written, however long that takes: whether it would have to be waited for in a
run depends on how many turns lie between two there.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from planner.record import record
from runtime.errors import RunError
from runtime.profile.bench import Driven, EndlessFlow
from runtime.rl.train.loop import TrainerLoop, TrainerWork
from runtime.rl.types import Applied, ChannelOffer, NextBatch, TrainBatch
from runtime.rl.weights.channel import Transfer
from runtime.rl.weights.layout import checksum, filled, fingerprint, lay_out
from runtime.rl.weights.publisher import DirectPublisher
from runtime.rl.weights.sender import BUFFERS, WeightsSource

WARM_TURNS = 3  # compiling, the optimiser's state, the second shape of a row
LEAST_TURNS = 3
LATE_S = 20.0  # beyond its seconds a bench is given up


@record
class Turns:
    """Means over the turns after the first ones."""

    turn_s: float  # without checkpoints
    checkpoint_s: float  # of these turns that one costs, standing still and slower ones; 0: none was made
    write_s: float  # for which one was written beside the turns; 0: while they waited, or none was
    rows: float
    turns: int


class Loopback:
    """Stands where the sender to engines does in a machine without any: packs and sums every bucket, sends it nowhere. To engines on
    the same card (`one_card`) weights go through the host's memory, and here as far as that."""

    def __init__(self, device: torch.device, bucket_bytes: int, *, one_card: bool = False) -> None:
        self._device, self._bucket_bytes, self._one_card = device, bucket_bytes, one_card
        self._buffers: list[torch.Tensor] = []

    @property
    def offer(self) -> ChannelOffer:
        """Nobody ever takes it."""
        return ChannelOffer(host="127.0.0.1", port=1, token="", trainer_epoch=1)

    @torch.no_grad()
    def transfer(self, source: WeightsSource) -> Transfer:
        """As far as this end of a transfer goes."""
        began = time.monotonic()
        layout = lay_out(source.weight_specs(), self._bucket_bytes)
        size = min(layout.bucket_bytes, layout.total)
        if not self._buffers:
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(BUFFERS)]
        sums = []
        for _, data in filled(layout, source.full_weights(), self._buffers):
            sums.append(checksum(data))
            if self._one_card:
                data.cpu()
        found: list[list[int]] = torch.stack(sums).tolist()
        return Transfer(
            lineage=source.lineage,
            version=source.version,
            digest=fingerprint(layout, found, lineage=source.lineage, version=source.version),
            bytes=layout.total,
            members=0,
            rebuilt=False,
            prepare_s=0.0,
            transfer_s=time.monotonic() - began,
        )

    def close(self) -> None:
        """Nothing is open."""


class _TimedFlow(EndlessFlow):
    """Also keeps when each turn ended and what it said of itself."""

    def __init__(self, make: Callable[[int], TrainBatch]) -> None:
        super().__init__(make)
        self.asked: list[float] = []  # when each batch was handed out
        self.figures: list[dict[str, float]] = []
        self.of_checkpoint: list[int | None] = []  # of each turn: the checkpoint made or written in it
        self.saving: _Saving | None = None

    def next_batch(self, trainer: str, epoch: int) -> NextBatch:
        ended = time.perf_counter()
        if self.asked:
            self.figures[-1]["turn_s"] = ended - self.asked[-1]
        answer = super().next_batch(trainer, epoch)
        if answer.order == "train":
            self.asked.append(time.perf_counter())
        return answer

    def applied(self, applied: Applied) -> None:
        super().applied(applied)
        self.figures.append({k: float(v) for k, v in applied.metrics.items()})
        self.of_checkpoint.append(None if self.saving is None else self.saving.touched())


class _Saving:
    """A trainer that writes no checkpoint while `saves` is off: when none are asked for, and at the end of a bench. One that is due
    while another is being written is left out."""

    def __init__(self, trainer: TrainerWork, *, saves: bool) -> None:
        self._trainer, self.saves = trainer, saves
        self.under_way = False
        self.writes_s: list[float] = []
        self._made, self._touched = 0, False

    def touched(self) -> int | None:
        """Number of the checkpoint that was made, or was being written, since the last call."""
        touched, self._touched = self._touched or self.under_way, False
        return self._made if touched else None

    def save_checkpoint(self, ids_hash: str) -> str:
        if not self.saves:
            return ""
        self._count()
        return self._trainer.save_checkpoint(ids_hash)

    def begin_checkpoint(self, ids_hash: str) -> bool:
        if not self.saves:
            return False
        if not self.under_way and self._trainer.begin_checkpoint(ids_hash):
            self.under_way = True
            self._count()
        return self.under_way

    @property
    def checkpoint_written(self) -> bool:
        return not self.under_way or self._trainer.checkpoint_written

    def seal_checkpoint(self) -> float:
        return self.end() if self.under_way and self._trainer.checkpoint_written else 0.0

    def end(self) -> float:
        """Wait for what is under way."""
        if self.under_way:
            self.under_way, self._touched = False, True
            self.writes_s.append(self._trainer.seal_checkpoint())
            return self.writes_s[-1]
        return 0.0

    def _count(self) -> None:
        self._made, self._touched = self._made + 1, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


@record
class Turn:
    """Seconds of one, `stood_s` of them for a checkpoint; `of`: the number of the one that was made or written in it."""

    seconds: float
    stood_s: float
    of: int | None


def costs(turns: Sequence[Turn]) -> tuple[float, float]:
    """Seconds of a turn without a checkpoint, and what one checkpoint adds to the turns in which it is made and written.

    The first one also makes its memory: it is left out where there are others. Where there are no turns beside which none is
    written, what they are slower does not show.
    """
    free = [t.seconds for t in turns if t.of is None]
    turn_s = statistics.fmean(free if len(free) >= LEAST_TURNS else [t.seconds - t.stood_s for t in turns])
    numbers = sorted({t.of for t in turns if t.of is not None})
    numbers = [n for n in numbers if n > 1] or numbers
    if not numbers:
        return turn_s, 0.0
    there = [t for t in turns if t.of in numbers]
    stood_s, more_s = sum(t.stood_s for t in there), sum(t.seconds - turn_s for t in there)
    return turn_s, max(stood_s, more_s) / len(numbers)


def turns(
    trainer: TrainerWork,
    make: Callable[[int], TrainBatch],
    *,
    seconds: float,
    weights: Path,
    checkpoint_every: int | None,
    direct: DirectPublisher | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Turns:
    """Run a fresh trainer for about `seconds` of turns after the first ones; without checkpoints where `checkpoint_every` is None.
    RunError when too few were made in time; none where it was told to stop before."""
    flow, every = _TimedFlow(make), checkpoint_every or 1
    saving = _Saving(trainer, saves=checkpoint_every is not None)
    flow.saving = saving
    work: Any = saving  # a TrainerWork: what it has not is the trainer's
    loop = TrainerLoop(work, flow, name="profile", epoch=1, weights=weights, direct=direct, checkpoint_every=every)
    driven = Driven(loop, flow)
    began, warm_s = time.monotonic(), 0.0
    least = WARM_TURNS + max(LEAST_TURNS, every if every == 1 else 2 * every)
    while driven.runs() and not should_stop():
        done = len(flow.asked) - 1
        if done < WARM_TURNS:
            warm_s = time.monotonic() - began
            if warm_s > 2 * LATE_S + seconds:
                break
        elif (done >= least and not saving.under_way and time.monotonic() - began - warm_s >= seconds) or (
            time.monotonic() - began - warm_s > seconds + LATE_S
        ):
            break
    saving.saves = False
    driven.end(3 * LATE_S)
    saving.end()
    found = [f for f in flow.figures if "turn_s" in f][WARM_TURNS:]
    if not found and should_stop():
        return Turns(turn_s=0.0, checkpoint_s=0.0, write_s=0.0, rows=0.0, turns=0)
    if not found:
        raise RunError("the trainer made too few steps in time", got=len(flow.figures), expected=f"{WARM_TURNS + 1}")
    # The turn that a stop ends has no question after it.
    numbers = flow.of_checkpoint[WARM_TURNS : WARM_TURNS + len(found)]
    turn_s, checkpoint_s = costs(
        [Turn(seconds=f["turn_s"], stood_s=f["checkpoint_s"], of=n) for f, n in zip(found, numbers, strict=True)]
    )
    return Turns(
        turn_s=turn_s,
        checkpoint_s=checkpoint_s,
        write_s=statistics.fmean(saving.writes_s) if saving.writes_s else 0.0,
        rows=statistics.fmean(f["micro_batches"] for f in found),
        turns=len(found),
    )
