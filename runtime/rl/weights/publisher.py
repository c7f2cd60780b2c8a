"""New weights to whoever is to serve them: straight to the engines that are connected, and to disk in the background.

The disk stays the truth for joiners and restarts. When a direct transfer fails, or nobody is connected, the generation is
on disk before anybody is told of it, as without the direct path. One version has one digest on both ways: the fingerprint
of its packed bytes, which the manifest on disk vouches for beside its own SHA-256s.

After each generation the disk is left to the ledger and to checkpoints for as long as that was written: a model whose generations
take longer to write than a step would always be at it.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from planner.record import record
from runtime.errors import DeadlineError, RunError, WeightsError
from runtime.rl.host_room import HostRoom
from runtime.rl.types import ChannelOffer, WeightsRef
from runtime.rl.weights.channel import Transfer
from runtime.rl.weights.generation import GenerationWriter, generation_folder
from runtime.rl.weights.layout import Layout, fingerprint_of, lay_out, pieces
from runtime.rl.weights.sender import WeightsSource

STORE_S = 900.0  # for the last generation to be on disk when the trainer ends
_log = logging.getLogger(__name__)


class Sends(Protocol):
    """What a publisher needs of `WeightsSender`."""

    @property
    def offer(self) -> ChannelOffer: ...

    def transfer(self, source: WeightsSource) -> Transfer | None: ...

    def close(self) -> None: ...


@record
class Publication:
    """What became of a version. `stored`: it is on disk; if not it is at the engines, and `keep` brings it to disk."""

    ref: WeightsRef
    stored: bool
    transfer: Transfer | None = None


@record
class _Copy:
    """A generation in host memory on its way to disk."""

    ref: WeightsRef
    layout: Layout
    room: HostRoom


class Stores(Protocol):
    """Where generations come to disk: `runtime.rl.weights.generation.GenerationWriter`, or a disk that a test makes slow or full."""

    def write(
        self, tensors: Mapping[str, Tensor], *, lineage: int, version: int, fingerprint: str | None = None
    ) -> WeightsRef:
        """The whole generation, or an error."""
        ...


class DirectPublisher:
    """Used by the trainer's loop, in one thread; it writes in another."""

    def __init__(
        self,
        root: Path,
        sender: Sends,
        *,
        bucket_bytes: int,
        full_every: int = 1,
        store: Stores | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`root`: where generations are; every `full_every`-th is written whole, unless a `store` says how. `clock` times a write."""
        self._store: Stores = store or GenerationWriter(root, full_every=full_every)
        self._root, self._sender, self._bucket_bytes, self._clock = root, sender, bucket_bytes, clock
        self._changed = threading.Condition()
        self._pending: _Copy | None = None  # a newer one takes its place: joiners want the newest alone
        self._writing = self._closed = self._hurried = False
        self._stored: list[WeightsRef] = []
        self._failure: BaseException | None = None
        self._spare: list[HostRoom] = []
        self._rests = full_every == 1  # a delta is against the version before: none may be left out
        threading.Thread(target=self._write_all, name="weights-store", daemon=True).start()

    @property
    def offer(self) -> ChannelOffer:
        """For the engines."""
        return self._sender.offer

    def publish(self, source: WeightsSource) -> Publication:
        """Send the source's weights to the engines; to disk when that cannot be. Raises what the disk raises."""
        try:
            transfer = self._sender.transfer(source)
        except RunError as e:
            _log.warning("weights of version %d go by disk: %s", source.version, e)
            transfer = None
        if transfer is not None:
            return Publication(ref=self._ref(source, transfer.digest), stored=False, transfer=transfer)
        copy = self._copy(source, None)
        self._write(copy)
        return Publication(ref=copy.ref, stored=True)

    def keep(self, source: WeightsSource, publication: Publication) -> None:
        """Copy what was sent and write it in the background. Returns when the source may change."""
        copy = self._copy(source, publication.ref.digest)
        with self._changed:
            if self._pending is not None:
                self._spare.append(self._pending.room)
            self._pending = copy
            self._changed.notify_all()

    def stored(self) -> tuple[WeightsRef, ...]:
        """What came to disk since the last call, oldest first. Raises what kept a generation from it."""
        with self._changed:
            stored, self._stored = tuple(self._stored), []
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return stored

    def finish(self, seconds: float = STORE_S) -> tuple[WeightsRef, ...]:
        """Wait for what is being written: as `stored`. DeadlineError when it takes longer."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: self._pending is None and not self._writing, seconds)
            self._hurried = False
        if not done:
            raise DeadlineError(f"a generation of weights was not on disk after {seconds:g} s", where=str(self._root))
        return self.stored()

    def close(self) -> None:
        """Serve engines no more; what is pending is not written."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._sender.close()

    def _ref(self, source: WeightsSource, digest: str) -> WeightsRef:
        folder = generation_folder(self._root, lineage=source.lineage, version=source.version)
        return WeightsRef(lineage=source.lineage, version=source.version, path=str(folder), digest=digest)

    @torch.no_grad()
    def _copy(self, source: WeightsSource, digest: str | None) -> _Copy:
        """The source's weights in host memory. WeightsError when they are not those of `digest`."""
        layout = lay_out(source.weight_specs(), self._bucket_bytes)
        room = self._room(layout.total)
        flat = room.flat
        on_device = False
        for begin, data in pieces(layout, source.full_weights()):
            on_device = on_device or data.is_cuda
            flat[begin : begin + data.numel()].copy_(data, non_blocking=True)
        if on_device:
            torch.cuda.synchronize()
        if digest is None:
            digest = fingerprint_of(layout, flat, lineage=source.lineage, version=source.version)
        return _Copy(ref=self._ref(source, digest), layout=layout, room=room)

    def _room(self, total: int) -> HostRoom:
        """Host memory for a copy, used again."""
        with self._changed:
            while self._spare:
                room = self._spare.pop()
                if room.flat.numel() == total:
                    return room
        return HostRoom(total, locked=torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def _write_all(self) -> None:
        took_s = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._hurried, took_s if self._rests else 0.0)
                self._changed.wait_for(lambda: self._closed or self._pending is not None)
                if self._closed or self._pending is None:
                    return
                copy, self._pending, self._writing = self._pending, None, True
            failure: BaseException | None = None
            began_s = self._clock()
            try:
                self._write(copy)
            except BaseException as e:  # noqa: BLE001 - raised again in the loop's thread
                failure = e
            took_s = self._clock() - began_s
            with self._changed:
                self._writing, self._failure = False, self._failure or failure
                self._spare.append(copy.room)
                if failure is None:
                    self._stored.append(copy.ref)
                self._changed.notify_all()

    def _write(self, copy: _Copy) -> None:
        """To disk, once its bytes have the digest that engines report."""
        ref = copy.ref
        found = fingerprint_of(copy.layout, copy.room.flat, lineage=ref.lineage, version=ref.version)
        if found != ref.digest:
            raise WeightsError("the copy for the disk is not what was sent", got=found, expected=ref.digest)
        tensors: Mapping[str, Tensor] = dict(copy.layout.views(copy.room.flat))
        self._store.write(tensors, lineage=ref.lineage, version=ref.version, fingerprint=ref.digest)
