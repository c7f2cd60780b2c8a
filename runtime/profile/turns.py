"""What a trainer's whole turns take against a flow that always has a batch: gradients, update, checkpoint, publication."""

import statistics
import time
from collections.abc import Callable
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
    checkpoint_s: float  # of one; 0: none was made
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


class _Saving:
    """A trainer that writes no checkpoint while `saves` is off: when none are asked for, and at the end of a bench."""

    def __init__(self, trainer: TrainerWork, *, saves: bool) -> None:
        self._trainer, self.saves = trainer, saves

    def save_checkpoint(self, ids_hash: str) -> str:
        return self._trainer.save_checkpoint(ids_hash) if self.saves else ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


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
    work: Any = saving  # a TrainerWork: what it has not is the trainer's
    loop = TrainerLoop(work, flow, name="profile", epoch=1, weights=weights, direct=direct, checkpoint_every=every)
    driven = Driven(loop, flow)
    began, warm_s = time.monotonic(), 0.0
    least = WARM_TURNS + max(LEAST_TURNS, every)
    while driven.runs() and not should_stop():
        done = len(flow.asked) - 1
        if done < WARM_TURNS:
            warm_s = time.monotonic() - began
            if warm_s > 2 * LATE_S + seconds:
                break
        elif (done >= least and time.monotonic() - began - warm_s >= seconds) or (
            time.monotonic() - began - warm_s > seconds + LATE_S
        ):
            break
    saving.saves = False
    driven.end(3 * LATE_S)
    found = [f for f in flow.figures if "turn_s" in f][WARM_TURNS:]
    if not found and should_stop():
        return Turns(turn_s=0.0, checkpoint_s=0.0, rows=0.0, turns=0)
    if not found:
        raise RunError("the trainer made too few steps in time", got=len(flow.figures), expected=f"{WARM_TURNS + 1}")
    # The turn that a stop ends has no question after it, and those before it have their own checkpoints.
    saved = [f["checkpoint_s"] for i, f in enumerate(found, start=WARM_TURNS + 1) if i % every == 0]
    return Turns(
        turn_s=statistics.fmean(f["turn_s"] - f["checkpoint_s"] for f in found),
        checkpoint_s=statistics.fmean(saved) if saved else 0.0,
        rows=statistics.fmean(f["micro_batches"] for f in found),
        turns=len(found),
    )
