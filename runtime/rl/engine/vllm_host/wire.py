"""Frames of JSON over a stream socket: how a replica and its engine's process speak, and engines with the trainer about
weights. No pickle.

A frame is its length in four bytes, big-endian, and that many bytes of UTF-8 JSON: an object with a `kind`.
"""

import json
import select
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from runtime.errors import DeadlineError, RunError

Message = dict[str, Any]
MAX_BYTES = 2**30
_HEADER = struct.Struct(">I")
_CHUNK = 2**18


class Closed(RunError):
    """The other side has ended."""


class Line:
    """One end. Not thread-safe."""

    def __init__(self, end: socket.socket, *, send_s: float = 30.0) -> None:
        """`send_s`: how long the other side may leave a full buffer unread before `send` gives it up."""
        end.setblocking(False)
        self._end, self._send_s = end, send_s
        self._buffer = bytearray()

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises Closed when nobody is there, DeadlineError when the other side does not read.

        What arrives meanwhile is kept: two sides with full buffers do not wait for each other.
        """
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > MAX_BYTES:
            raise RunError("a frame is too long", got=len(body), expected=f"at most {MAX_BYTES} bytes")
        left = memoryview(_HEADER.pack(len(body)) + body)
        while left:
            readable, writable, _ = select.select([self._end], [self._end], [], self._send_s)
            if not readable and not writable:
                raise DeadlineError(f"the other side has not read for {self._send_s:g} s")
            if readable:
                self._take()
            if writable:
                try:
                    left = left[self._end.send(left) :]
                except BlockingIOError:
                    continue
                except OSError as e:
                    raise Closed("the other side has ended", got=e.strerror) from e

    def receive(self, timeout_s: float | None) -> Message | None:
        """The next frame; None when none came in time (None: wait for ever). Raises Closed at the end of the stream."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while (frame := self._frame()) is None:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._end], [], [], left)[0]:
                return None
            self._take()
        return frame

    def ended(self) -> bool:
        """Whether the other side has ended and said nothing more. Takes nothing."""
        try:
            return self._end.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _take(self) -> None:
        """What has arrived, into the buffer."""
        try:
            data = self._end.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as e:
            raise Closed("the other side has ended", got=e.strerror) from e
        if not data:
            raise Closed("the other side has ended")
        self._buffer += data

    def close(self) -> None:
        self._end.close()

    def _frame(self) -> Message | None:
        """The first whole frame in the buffer."""
        if len(self._buffer) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._buffer)
        if length > MAX_BYTES:
            raise RunError("a frame is too long", got=length, expected=f"at most {MAX_BYTES} bytes")
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        message = json.loads(body)
        if not isinstance(message, dict) or "kind" not in message:
            raise RunError("a frame is not a message", got=body[:80])
        return message
