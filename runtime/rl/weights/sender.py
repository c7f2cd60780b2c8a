"""The trainer's end of the direct path: a small server that engines connect to, and transfers to all that are there."""

import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.errors import RunError
from runtime.rl.engine.vllm_host.wire import Line, Message
from runtime.rl.weights.channel import HELLO_S, READY_S, ChannelMember, ChannelOffer, Transfer
from runtime.rl.weights.group import Group, StuckError, serve_store, within
from runtime.rl.weights.layout import Layout, TensorSpec, checksum, filled, fingerprint, lay_out

MOST_REST = 64  # transfers left out after many failures in a row
GIVE_UP_S = 8.0  # for members to give a transfer up that failed
ACCEPT_AGAIN_S = 0.1
BUFFERS = 2  # one is packed while the other travels
_log = logging.getLogger(__name__)


class WeightsSource(Protocol):
    """What a trainer's rank 0 gives out: its current weights as engines use them."""

    @property
    def version(self) -> int: ...

    @property
    def lineage(self) -> int: ...

    def weight_specs(self) -> Sequence[TensorSpec]:
        """Names, shapes and dtypes, in the order of `full_weights`."""
        ...

    def full_weights(self) -> Generator[tuple[str, Tensor], None, None]:
        """Whole tensors in the rollout's dtype, one at a time; a sharded one is gathered when its turn comes. Called once or
        twice a version (to send, to copy for the disk), in a thread of its own when sending. Closed before its end when a
        transfer fails: a source whose other ranks gather along ends that in a `finally`."""
        ...


class _Peer:
    """One engine worker that is connected."""

    def __init__(self, member: ChannelMember, line: Line) -> None:
        self.member, self.line = member, line

    def __str__(self) -> str:
        return f"{self.member.replica}-{self.member.epoch}/{self.member.rank}"


class WeightsSender:
    """Serves the channel of one trainer incarnation. `transfer` in one thread; connections are taken in another."""

    def __init__(
        self,
        *,
        host: str,
        trainer_epoch: int,
        device: torch.device,
        bucket_bytes: int,
        deadline_s: float,
        one_kind: bool = False,
        kind: str = "",
        one_card: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`host`: the address to serve on. `one_kind`: transfer only while every engine is on devices of one kind. `one_card`: the
        engines' GPU is, or may be, the trainer's."""
        self._host, self._device, self._clock = host, device, clock
        self._bucket_bytes, self._deadline_s = bucket_bytes, deadline_s
        self._kind = kind if one_kind else None
        self._one_card = one_card
        self._server = socket.create_server((host, 0), backlog=64)
        self.offer = ChannelOffer(
            host=host, port=self._server.getsockname()[1], token=secrets.token_hex(16), trainer_epoch=trainer_epoch
        )
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._peers: list[_Peer] = []
        self._group: Group | None = None
        self._grouped: list[_Peer] = []  # members of the group, rank 1 first
        self._groups = self._left = 0  # made, left
        self._store: Any = None
        self._store_port = 0
        self._buffers: list[Tensor] = []
        self._stuck = False
        self._failures = self._resting = 0  # in a row; transfers not to be tried before the next
        threading.Thread(target=self._accept, name="weights-channel", daemon=True).start()

    @property
    def members(self) -> tuple[ChannelMember, ...]:
        """Engine workers connected now, as far as known."""
        with self._lock:
            return tuple(p.member for p in self._peers)

    def transfer(self, source: WeightsSource) -> Transfer | None:
        """Send the source's weights to every engine that is connected; None when there is nobody to send to.

        RunError when it failed, within about `deadline_s`: then no engine has the generation, and those that did not
        answer are disconnected. Nothing an engine serves is touched in either case.
        """
        peers = self._present()
        if not peers or self._rests():
            return None
        started = self._clock()
        layout = lay_out(source.weight_specs(), self._bucket_bytes)
        peers = self._prepare(peers, layout, source)
        if not peers:
            raise RunError("no engine could take the weights directly")
        ready_at = self._clock()
        rebuilt = self._group is None or self._grouped != peers
        try:
            sums = self._send(peers, layout, source, new=rebuilt)
            self._compare(peers, self._answers(peers, self._deadline_s), sums)
        except RunError as e:
            self._failures += 1
            self._resting = min(MOST_REST, 2 ** (self._failures - 1) - 1)
            self._leave_group()
            self._stuck = isinstance(e, StuckError) and self._device.type == "cuda"
            self._call_off(peers)
            raise
        self._failures = 0
        digest = fingerprint(layout, sums, lineage=source.lineage, version=source.version)
        for peer in peers:
            self._tell(peer, {"kind": "sealed", "digest": digest})
        return Transfer(
            lineage=source.lineage,
            version=source.version,
            digest=digest,
            bytes=layout.total,
            members=len(peers),
            rebuilt=rebuilt,
            prepare_s=ready_at - started,
            transfer_s=self._clock() - ready_at,
        )

    def close(self) -> None:
        """Serve nobody any more."""
        self._closed.set()
        with suppress(OSError):  # `close` alone leaves the port open until one more has come
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._leave_group()
        with self._lock:
            peers, self._peers = self._peers, []
        for peer in peers:
            peer.line.close()

    def _rests(self) -> bool:
        """After failures in a row, and only then, transfers are left out: each may cost its whole deadline."""
        self._resting -= self._resting > 0
        return self._resting > 0

    # Members

    def _accept(self) -> None:
        while True:
            try:
                end, address = self._server.accept()
            except OSError as e:
                if self._closed.wait(ACCEPT_AGAIN_S):
                    return
                # Of that connection, or of a process out of descriptors: it would be the end of all later engines.
                _log.warning("weights: a connection could not be taken: %s", e.strerror)
                continue
            threading.Thread(target=self._welcome, args=(end, address), name="weights-hello", daemon=True).start()

    def _welcome(self, end: socket.socket, address: Any) -> None:
        """One connection's first words."""
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = Line(end, send_s=HELLO_S)
        try:
            hello = line.receive(HELLO_S)
            why = self._objection(hello)
            if hello is not None:  # else it may come again, and be quicker
                line.send({"kind": "refused", "why": why} if why else {"kind": "welcome"})
        except (RunError, ValueError, KeyError) as e:
            why = f"{type(e).__name__}: {e}"
        if why or hello is None:
            _log.warning("weights: a connection from %s is turned away: %s", address[0], why)
            line.close()
            return
        with self._lock:
            self._peers.append(_Peer(ChannelMember(**{k: hello[k] for k in ChannelMember.__dataclass_fields__}), line))

    def _objection(self, hello: Message | None) -> str:
        if hello is None or hello["kind"] != "hello" or not hmac.compare_digest(str(hello["token"]), self.offer.token):
            return "no valid hello"
        if hello["device"] != self._device.type:
            return f"the trainer is on {self._device.type}, the engine on {hello['device']}"
        return ""

    def _present(self) -> list[_Peer]:
        """Who is connected, dead ones left out, in a fixed order. Nobody where kinds differ and must not, or after a
        thread got stuck."""
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            try:
                while peer.line.receive(0.0) is not None:
                    pass
            except RunError:
                self._drop(peer)
        with self._lock:
            newest: dict[tuple[str, int], _Peer] = {}
            for peer in self._peers:  # a worker that connected again supersedes itself
                newest[peer.member.replica, peer.member.rank] = peer
            present = [newest[key] for key in sorted(newest)]
        kinds = {p.member.device_kind for p in present}
        if self._stuck or (self._kind is not None and kinds - {self._kind}):
            return []
        return present

    def _drop(self, peer: _Peer) -> None:
        with self._lock:
            if peer in self._peers:
                self._peers.remove(peer)
        peer.line.close()

    def _tell(self, peer: _Peer, message: Message) -> None:
        try:
            peer.line.send(message)
        except RunError:
            self._drop(peer)

    def _answers(self, peers: Sequence[_Peer], seconds: float) -> list[tuple[_Peer, Message | None]]:
        """One frame of each; None from those that said nothing in time or are gone, which are dropped."""
        until = self._clock() + seconds
        answers: list[tuple[_Peer, Message | None]] = []
        for peer in peers:
            try:
                message = peer.line.receive(max(0.0, until - self._clock()))
            except RunError:
                message = None
            if message is None:
                _log.warning("weights: %s did not answer, it is disconnected", peer)
                self._drop(peer)
            answers.append((peer, message))
        return answers

    # A transfer

    def _prepare(self, peers: list[_Peer], layout: Layout, source: WeightsSource) -> list[_Peer]:
        """Those that are ready for it."""
        order = {
            "kind": "prepare",
            "lineage": source.lineage,
            "version": source.version,
            "layout": layout.encode(),
        }
        for peer in peers:
            self._tell(peer, order)
        ready = []
        for peer, answer in self._answers(peers, READY_S):
            if answer is not None and answer["kind"] == "ready":
                ready.append(peer)
            elif answer is not None:
                _log.warning("weights: %s cannot take them directly: %s", peer, answer.get("why"))
        return ready

    def _send(self, peers: list[_Peer], layout: Layout, source: WeightsSource, *, new: bool) -> list[list[int]]:
        """The checksums of what was sent."""
        if new:
            self._leave_group()
            self._groups += 1
            if self._store is None:
                self._store, self._store_port = serve_store(self._host, self._deadline_s)
        order = {
            "kind": "go",
            "group": f"group-{self._groups}",
            "world": len(peers) + 1,
            "host": self._host,
            "port": self._store_port,
            "new": new,
            "one_card": self._one_card,
            "deadline_s": self._deadline_s,
        }
        for rank, peer in enumerate(peers, start=1):
            self._tell(peer, {**order, "rank": rank})
        until = time.monotonic() + self._deadline_s
        return within(
            lambda: self._broadcast(f"group-{self._groups}", len(peers) + 1, layout, source, until),
            seconds=self._deadline_s,
            watch=lambda: _all_there(peers),
            abort=self._leave_group,
        )

    @torch.no_grad()
    def _broadcast(self, name: str, world: int, layout: Layout, source: WeightsSource, until: float) -> list[list[int]]:
        group, left = self._group, self._left
        if group is None:
            group = Group(
                self._store,
                name=name,
                rank=0,
                world=world,
                host=self._host,
                device=self._device,
                timeout_s=self._deadline_s,
                one_card=self._one_card,
            )
            if self._left != left:  # given up meanwhile
                group.abort()
                raise RunError("the transfer was given up")
            self._group = group
        size = min(layout.bucket_bytes, layout.total)
        if not self._buffers or self._buffers[0].numel() != size:
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(BUFFERS)]
        works: list[Any] = []
        sums: list[Tensor] = []
        with closing(source.full_weights()) as tensors:
            for number, data in filled(layout, tensors, self._buffers):
                sums.append(checksum(data))
                works.append(group.broadcast(data))
                if number + 1 >= BUFFERS:  # the next one is packed over the oldest still on its way
                    group.release(works[number + 1 - BUFFERS], until)
        for work in works[-BUFFERS:]:
            group.finish(work, until)
        found: list[list[int]] = torch.stack(sums).tolist()
        return found

    def _compare(self, peers: list[_Peer], answers: list[tuple[_Peer, Message | None]], sums: list[list[int]]) -> None:
        """Every member must have received the very bytes."""
        wrong = []
        for peer, answer in answers:
            if answer is None:
                wrong.append(f"{peer} is gone")
            elif answer["kind"] != "received":
                wrong.append(f"{peer}: {answer.get('why', answer['kind'])}")
            elif answer["sums"] != sums:
                wrong.append(f"{peer} received other bytes")
        if wrong:
            raise RunError("a transfer of weights failed", got="; ".join(wrong))
        self._grouped = peers

    def _call_off(self, peers: Sequence[_Peer]) -> None:
        """Nobody uses what came. Who does not even say that it gave up is disconnected: it hangs, or is gone."""
        for peer in peers:
            self._tell(peer, {"kind": "drop"})
        with self._lock:
            left = [p for p in peers if p in self._peers]
        until = self._clock() + GIVE_UP_S
        for peer in left:
            try:
                while (said := peer.line.receive(max(0.0, until - self._clock()))) and said["kind"] != "dropped":
                    pass
            except RunError:
                said = None
            if said is None:
                _log.warning("weights: %s hangs or is gone, it is disconnected", peer)
                self._drop(peer)

    def _leave_group(self) -> None:
        group, self._group, self._grouped = self._group, None, []
        self._left += 1
        if group is not None:
            group.abort()


def _all_there(peers: Sequence[_Peer]) -> None:
    """RunError when a member's connection has ended: it will not take part any more."""
    for peer in peers:
        if peer.line.ended():
            raise RunError("a member of a transfer of weights is gone", got=str(peer))
