"""An engine worker's end of the direct path: a thread that takes generations into a second buffer while the engine runs.

What lies there is of one version, whole, with the trainer's checksums, or it is nothing: the engine swaps between two steps.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from planner.record import record
from runtime.errors import RunError
from runtime.rl.engine.vllm_host.wire import Line, Message
from runtime.rl.types import WeightsRef
from runtime.rl.weights.channel import AGAIN_S, HELLO_S, ChannelMember, ChannelOffer
from runtime.rl.weights.group import Group, StuckError, reach_store, within
from runtime.rl.weights.layout import Layout, checksum, decode_layout

BUFFERS = 2  # on the device, where the second buffer has to be on the host
STOP_S = 2.0  # for the thread to end
CLAIM_S = 10.0  # for a swap to follow its claim; well below READY_S, within which the trainer wants the buffer
SPARE_BYTES = 512 * 2**20  # of a GPU's memory, left free beside the second buffer
_log = logging.getLogger(__name__)


class _Refused(RunError):
    """The trainer does not want this engine; asking again is of no use."""


@record
class Received:
    """A whole generation in the second buffer."""

    lineage: int
    version: int
    digest: str
    layout: Layout
    bytes: int
    receive_s: float


@record
class Taken:
    """A generation as it lies in the second buffer."""

    received: Received
    tensors: Mapping[str, Tensor]


class WeightsReceiver:
    """Follows one offer until `stop`. Its thread connects again whenever the trainer drops it."""

    def __init__(
        self,
        offer: ChannelOffer,
        member: ChannelMember,
        *,
        device: torch.device,
        spare: int = SPARE_BYTES,
        hello_s: float = HELLO_S,
    ) -> None:
        """`spare`: bytes of a GPU's memory that the second buffer leaves free; where it cannot, it is in host memory. `hello_s`: how
        long the trainer may take to answer before this end connects again."""
        self.offer, self._member, self._device, self._spare = offer, member, device, spare
        self._hello_s = hello_s
        self._lock = threading.Condition()  # held while the second buffer is read by a swap, or given up
        self._received: Received | None = None
        self._claimed_until = 0.0  # monotonic seconds; until then what was received is not given up
        self._flat: Tensor | None = None
        self._small: list[Tensor] = []  # buckets on the device, where `_flat` is on the host
        self._group: Group | None = None
        self._left = 0  # groups left
        self._store: Any = None
        self._stream: Any = None
        self._stopped = threading.Event()
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="weights-receiver", daemon=True)
        self._thread.start()

    def holds(self, ref: WeightsRef) -> bool:
        """Whether that generation lies whole in the second buffer."""
        got = self._received
        return got is not None and (got.lineage, got.version, got.digest) == (ref.lineage, ref.version, ref.digest)

    def claim(self, ref: WeightsRef) -> bool:
        """Whether it holds that generation. If so it goes on to until it is taken or let go of, for CLAIM_S at most: the trainer's
        next one waits."""
        with self._lock:
            held = self.holds(ref)
            self._claimed_until = time.monotonic() + CLAIM_S if held else 0.0
            return held

    def let_go(self) -> None:
        """Nothing will be taken after all."""
        with self._lock:
            self._claimed_until = 0.0
            self._lock.notify_all()

    @contextlib.contextmanager
    def taken(self, ref: WeightsRef) -> Iterator["Taken | None"]:
        """The generation's tensors where they lie, None when they do not. They stay as they are until the block ends,
        which gives the buffer up."""
        with self._lock:
            if not self.holds(ref) or self._received is None or self._flat is None:
                yield None
                return
            try:
                yield Taken(received=self._received, tensors=dict(self._received.layout.views(self._flat)))
            finally:
                self._received = None
                self.let_go()

    @property
    def received(self) -> Received | None:
        """What lies in the second buffer and is not taken yet."""
        return self._received

    def stop(self) -> None:
        """Follow the trainer no more."""
        self._stopped.set()
        self.let_go()
        end = self._socket
        if end is not None:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._thread.join(STOP_S)  # a thread that is in the library when the process ends would abort it

    # Its thread

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._follow()
            except (_Refused, StuckError) as e:
                _log.warning("weights come by the store from now on: %s", e)
                return
            except (OSError, RunError, RuntimeError, ValueError, KeyError) as e:
                if not self._stopped.is_set():
                    _log.debug("weights: not connected to the trainer: %s", e)
            finally:
                self._leave_group()
            self._stopped.wait(AGAIN_S)

    def _follow(self) -> None:
        """One connection, to its end."""
        with socket.create_connection((self.offer.host, self.offer.port), timeout=self._hello_s) as end:
            self._socket = end
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            host = str(end.getsockname()[0])
            line = Line(end)
            member = {k: getattr(self._member, k) for k in ChannelMember.__dataclass_fields__}
            line.send({"kind": "hello", "token": self.offer.token, **member})
            answer = line.receive(self._hello_s)
            if answer is None:
                raise RunError("the trainer does not answer", got=f"{self._hello_s:g} s")
            if answer["kind"] != "welcome":
                raise _Refused("the trainer refuses", got=answer.get("why"))
            layout: Layout | None = None
            prepared: Message = {}
            while not self._stopped.is_set():
                message = line.receive(None)
                assert message is not None
                match message["kind"]:
                    case "prepare":
                        layout, prepared = decode_layout(message["layout"]), message
                        why = self._make_room(layout)
                        line.send({"kind": "cannot", "why": why} if why else {"kind": "ready"})
                    case "go" if layout is not None:
                        self._take(line, layout, prepared, message, host)
                    case "drop":
                        line.send({"kind": "dropped"})

    def _make_room(self, layout: Layout) -> str:
        """The second buffer, empty; why there is none."""
        with self._lock:
            while (left := self._claimed_until - time.monotonic()) > 0:
                self._lock.wait(left)
            self._received = None
            if self._flat is not None and self._flat.numel() == layout.total:
                return ""
            self._flat, self._small = None, []
            try:
                self._flat, self._small = self._buffers(layout)
            except RuntimeError as e:
                return f"no memory for a second buffer of {layout.total} bytes: {e}"
        return ""

    def _buffers(self, layout: Layout) -> tuple[Tensor, list[Tensor]]:
        if self._device.type != "cuda":
            return torch.empty(layout.total, dtype=torch.uint8), []
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        free, _ = torch.cuda.mem_get_info(self._device)
        free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(
            self._device
        )  # an earlier buffer's
        if free - layout.total >= self._spare:
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                return torch.empty(layout.total, dtype=torch.uint8, device=self._device), []
        _log.warning("weights: %d bytes free on the device, the second buffer is in host memory", free)
        small = [
            torch.empty(min(layout.bucket_bytes, layout.total), dtype=torch.uint8, device=self._device)
            for _ in range(BUFFERS)
        ]
        return torch.empty(layout.total, dtype=torch.uint8, pin_memory=True), small

    def _take(self, line: Line, layout: Layout, prepared: Message, go: Message, host: str) -> None:
        """One transfer, to the trainer's word that everybody has it."""
        began = time.monotonic()
        if go["new"]:
            self._leave_group()

        def watch() -> None:
            said = line.receive(0.0)
            if said is not None:
                raise _CalledOff("the trainer gave the transfer up")

        try:
            sums = within(
                lambda: self._receive(layout, go, host),
                seconds=float(go["deadline_s"]),
                watch=watch,
                abort=self._leave_group,
            )
        except _CalledOff:
            self._leave_group()
            line.send({"kind": "dropped"})
            return
        except RunError as e:
            self._leave_group()
            if isinstance(e, StuckError) and self._device.type == "cuda":
                raise
            line.send({"kind": "failed", "why": str(e).replace("\n", "; ")})
            return
        seconds = time.monotonic() - began
        line.send({"kind": "received", "sums": sums, "receive_s": seconds})
        verdict = line.receive(2 * float(go["deadline_s"]))
        if verdict is None:
            raise RunError("the trainer does not say whether a transfer holds")
        if verdict["kind"] != "sealed":
            self._leave_group()
            line.send({"kind": "dropped"})
            return
        with self._lock:
            self._received = Received(
                lineage=prepared["lineage"],
                version=prepared["version"],
                digest=verdict["digest"],
                layout=layout,
                bytes=layout.total,
                receive_s=seconds,
            )

    @torch.no_grad()
    def _receive(self, layout: Layout, go: Message, host: str) -> list[list[int]]:
        """Every bucket into the second buffer; their checksums."""
        until = time.monotonic() + float(go["deadline_s"])
        stream = torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()
        with stream:
            group = self._joined(go, host)
            flat = self._flat
            assert flat is not None
            sums = self._over_host(group, layout, flat, until) if self._small else _straight(group, layout, flat, until)
            found: list[list[int]] = torch.stack(sums).tolist()  # also waits for this stream
        return found

    def _over_host(self, group: Group, layout: Layout, flat: Tensor, until: float) -> list[Tensor]:
        """Bucket by bucket through the device into host memory."""
        works: list[Any] = []
        sums: list[Tensor] = []
        for number, (low, high) in enumerate(layout.buckets):
            data = self._small[number % BUFFERS][: high - low]
            works.append(group.broadcast(data))
            group.release(works[-1], until)
            sums.append(checksum(data))
            flat[low:high].copy_(data, non_blocking=True)
        for work in works:
            group.finish(work, until)
        return sums

    def _joined(self, go: Message, host: str) -> Group:
        group, left = self._group, self._left
        if group is None:
            if self._store is None:
                self._store = reach_store(go["host"], go["port"], float(go["deadline_s"]))
            group = Group(
                self._store,
                name=go["group"],
                rank=go["rank"],
                world=go["world"],
                host=host,
                device=self._device,
                timeout_s=float(go["deadline_s"]),
                one_card=bool(go.get("one_card")),
            )
            if self._left != left:  # given up meanwhile
                group.abort()
                raise RunError("the transfer was given up")
            self._group = group
        return group

    def _leave_group(self) -> None:
        group, self._group = self._group, None
        self._left += 1
        if group is not None:
            group.abort()


class _CalledOff(RunError):
    """The trainer said `drop`."""


def _straight(group: Group, layout: Layout, flat: Tensor, until: float) -> list[Tensor]:
    """Every bucket to where it stays. All are asked for before the first is summed: sums do not hold up what comes."""
    runs = [flat[low:high] for low, high in layout.buckets]
    works = [group.broadcast(run) for run in runs]
    sums: list[Tensor] = []
    for run, work in zip(runs, works, strict=True):
        group.release(work, until)
        sums.append(checksum(run))
    for work in works:
        group.finish(work, until)
    return sums
