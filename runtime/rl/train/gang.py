"""The gang: all ranks of one trainer, as one process sees it. A process group an epoch; when one rank goes, all go.

Two groups over one meeting place: the data group (NCCL between GPUs, else Gloo) carries parameters and gradients, the control
group (Gloo) carries commands and figures as bytes and waits patiently while rank 0 waits for work. Every operation of either
has a deadline. torch.distributed keeps the groups per process: one gang a process.
"""

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from planner.record import record
from runtime.errors import RunError
from runtime.rl.train.meeting import Meeting, meet
from runtime.rl.train.wire import Head, decode, encode

CONTROL_S = 1800.0  # between two commands: rank 0 alone checks checkpoints, writes generations and waits for flow
CLOSE_S = 5.0
# NCCL's watchdog ends a process whose collective is over its deadline, and sleeps four times this before it does, a minute by
# default, for records of the last collectives to be written.
_END_SOON = ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "500")
_log = logging.getLogger(__name__)


@record
class GangSpec:
    """This process's place in the gang. `shares`: of every batch's tokens, by rank."""

    rank: int
    shares: tuple[float, ...]
    meeting: Meeting
    collective_s: float = 300.0  # deadline of one collective of the data group

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.shares)


class Gang:
    """A joined gang. One thread uses it; every rank calls the same operations in the same order."""

    def __init__(self, spec: GangSpec, device: torch.device) -> None:
        """Join, at most the meeting's deadline. DeadlineError names the ranks that did not come."""
        self.rank, self.world, self.shares = spec.rank, spec.world, spec.shares
        self.device = device
        _stay_local(spec.meeting)
        os.environ.setdefault(*_END_SOON)
        store = meet(spec.meeting, rank=spec.rank, world=spec.world)
        timeout = timedelta(seconds=spec.collective_s)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world, timeout=timeout)
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=CONTROL_S))
        self.mesh = DeviceMesh(device.type, list(range(self.world)), mesh_dim_names=("ranks",))
        _log.info("rank %d of %d has joined on %s", self.rank, self.world, device)

    def tell(self, head: Head, body: Mapping[str, Tensor] | None = None) -> None:
        """Rank 0: a command for all others."""
        message = encode(head, body)
        with self.lost("a command"):
            self._broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8))

    def hear(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Every other rank: the next command."""
        with self.lost("the next command"):
            return decode(self._broadcast(None).numpy().tobytes())

    def share(self, value: Any) -> Any:
        """Rank 0's value at every rank; anything JSON holds. What the others pass is ignored."""
        if self.rank == 0:
            self.tell({"value": value})
            return value
        return self.hear()[0]["value"]

    def gather(self, value: Any) -> list[Any] | None:
        """All ranks' values by rank, at rank 0; None elsewhere. Anything JSON holds."""
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        with self.lost("the other ranks' word"):
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
            dist.all_gather(sizes, torch.tensor([len(mine)]), group=self._control)
            if self.rank != 0:
                dist.send(mine, dst=0, group=self._control)
                return None
            values = [value]
            for rank in range(1, self.world):
                found = torch.empty(int(sizes[rank]), dtype=torch.uint8)
                dist.recv(found, src=rank, group=self._control)
                values.append(json.loads(found.numpy().tobytes()))
            return values

    def total(self, figures: Sequence[float]) -> list[float]:
        """Sums over all ranks, at every rank."""
        return self._reduced(figures, dist.ReduceOp.SUM)

    def most(self, figures: Sequence[float]) -> list[float]:
        """Largest over all ranks, at every rank."""
        return self._reduced(figures, dist.ReduceOp.MAX)

    def close(self) -> None:
        """Let go of the groups: whoever waits for this rank hears of it at once. Never waits longer than `CLOSE_S`."""

        def destroy() -> None:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()

        thread = threading.Thread(target=destroy, name="gang-close", daemon=True)
        thread.start()
        thread.join(CLOSE_S)

    def _broadcast(self, message: Tensor | None) -> Tensor:
        size = torch.tensor([0 if message is None else len(message)])
        dist.broadcast(size, src=0, group=self._control)
        if message is None:
            message = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(message, src=0, group=self._control)
        return message

    def _reduced(self, figures: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(list(figures), dtype=torch.float64)
        with self.lost("figures of the other ranks"):
            dist.all_reduce(tensor, op=operation, group=self._control)
        return tensor.tolist()

    @contextlib.contextmanager
    def lost(self, what: str) -> Iterator[None]:
        """The errors of a collective in words: RunError for those that say that another rank is gone or silent."""
        try:
            yield
        except RuntimeError as e:
            if not isinstance(e, dist.DistError) and "gloo" not in str(e):
                raise
            raise RunError(
                f"rank {self.rank} of the trainer lost the others while it waited for {what}",
                got=str(e).strip().splitlines()[0][:200],
                hint="one rank has ended or is silent: its own log says why; all start again",
            ) from e


def _stay_local(meeting: Meeting) -> None:
    """Gloo and NCCL look for an interface by the host's name unless they are told; on one machine it is loopback."""
    if meeting.host.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
