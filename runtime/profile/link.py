"""The link between two nodes as TCP sees it: one serves, the other sends. Both are run by `runtime.backends.ray.per_node`."""

import contextlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from runtime.errors import DeadlineError, RunError

LIMIT_S = 25.0  # of the whole exchange; every wait on a socket ends by then
PINGS = 50
SIZE = 64 * 2**20
STREAMS = (1, 4)
_CHUNK = 2**20


def serve(argument: Mapping[str, Any], say: Callable[[object], None], should_stop: Callable[[], bool]) -> str:
    """Listen on a free port, say it with a token, take what comes until the other side says that it is done."""
    token = secrets.token_hex(16)
    done, until = threading.Event(), time.monotonic() + LIMIT_S
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.bind((argument["address"], 0))
        listening.listen(16)
        listening.settimeout(0.5)
        say(json.dumps({"port": listening.getsockname()[1], "token": token}))
        while not done.is_set() and not should_stop() and time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                peer, _ = listening.accept()
                threading.Thread(target=_take, args=(peer, token, done), daemon=True).start()
    if not done.is_set():
        raise DeadlineError("the other node did not come", got=f"{LIMIT_S:.0f} s")
    return ""


def _take(peer: socket.socket, token: str, done: threading.Event) -> None:
    with peer, contextlib.suppress(OSError):
        peer.settimeout(LIMIT_S)
        if not hmac.compare_digest(_exactly(peer, len(token)), token.encode()):
            return
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while order := _exactly(peer, 1):
            if order == b"p":
                peer.sendall(b"p")
            elif order == b"d":
                size = int.from_bytes(_exactly(peer, 8), "big")
                _drop(peer, size)
                peer.sendall(b"d")
            else:
                done.set()
                return


def send(argument: Mapping[str, Any], say: Callable[[object], None], should_stop: Callable[[], bool]) -> str:
    """Measure against a serving node; JSON of the latency one way and the rates by streams."""
    address, token = (argument["address"], int(argument["port"])), argument["token"].encode()
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(_connected(address, token)) for _ in range(max(STREAMS))]
        trips = []
        for _ in range(PINGS):
            began = time.perf_counter()
            peers[0].sendall(b"p")
            _exactly(peers[0], 1)
            trips.append(time.perf_counter() - began)
        rates = {n: SIZE / _sent(peers[:n], SIZE) for n in STREAMS if not should_stop()}
        peers[0].sendall(b"q")
    return json.dumps({"latency_s": min(trips) / 2, "bytes_per_s": rates})


def _connected(address: tuple[str, int], token: bytes) -> socket.socket:
    peer = socket.create_connection(address, timeout=LIMIT_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.sendall(token)
    return peer


def _sent(peers: list[socket.socket], size: int) -> float:
    """Seconds to send `size` bytes over all of them at once, until the other side has them."""

    def one(peer: socket.socket) -> None:
        part, zeros = size // len(peers), bytes(_CHUNK)
        peer.sendall(b"d" + part.to_bytes(8, "big"))
        for start in range(0, part, _CHUNK):
            peer.sendall(zeros[: min(_CHUNK, part - start)])
        _exactly(peer, 1)

    threads = [threading.Thread(target=one, args=(p,), daemon=True) for p in peers]
    began = time.perf_counter()
    for t in threads:
        t.start()
    for t in threads:
        t.join(LIMIT_S)
        if t.is_alive():
            raise DeadlineError("the other node takes no more", got=f"{LIMIT_S:.0f} s")
    return time.perf_counter() - began


def _exactly(peer: socket.socket, size: int) -> bytes:
    """That many bytes; b"" when the other side is gone."""
    out = b""
    while len(out) < size:
        more = peer.recv(size - len(out))
        if not more:
            return b""
        out += more
    return out


def _drop(peer: socket.socket, size: int) -> None:
    left = size
    while left:
        more = peer.recv(min(_CHUNK, left))
        if not more:
            raise RunError("the other node is gone")
        left -= len(more)
