"""A communicator of one trainer and the engines it sends weights to, beside whatever default group a process has.

NCCL between GPUs, gloo between CPUs and between processes that share a card, over a store that the trainer serves. Every wait
here polls and has a deadline: the library's own time limits would end the process (NCCL's watchdog) or come after half an hour.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor

from runtime.errors import DeadlineError, RunError, first_line

T = TypeVar("T")
Store = Any
"""A store of torch.distributed."""
dist: Any = torch.distributed  # what is needed of it is not in its typed surface
POLL_S = 0.0005
WATCH_S = 0.02  # between two looks at whether the others are still there
LATE_S = 3600.0  # NCCL's own limit: ours comes first
ABORT_S = 5.0  # for a stuck thread to end once its communicator is aborted
# What NCCL's watchdog and its monitor do when a member dies is to end the process. They read these as a group is made.
_GENTLE = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class StuckError(RunError):
    """A thread did not come back from the communication library though it was told to give up. It cannot be ended. With
    gloo it ends by itself at its time limit; with NCCL no further group may be made in this process."""


def serve_store(host: str, timeout_s: float) -> tuple[Store, int]:
    """A store on `host` alone (not on every interface), and its port."""
    with socket.create_server((host, 0), backlog=64) as listening:
        port = int(listening.getsockname()[1])
        descriptor = os.dup(listening.fileno())  # the store closes it
    limit = timedelta(seconds=timeout_s)
    store = dist.TCPStore(
        host, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=descriptor
    )
    return store, port


def reach_store(host: str, port: int, timeout_s: float) -> Store:
    """The store that another process serves. RunError when it does not answer in time."""
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    except RuntimeError as e:
        raise RunError("the trainer's store does not answer", where=f"{host}:{port}", got=first_line(e)) from e


class Group:
    """Rank 0 sends, all others receive. Making it is a rendezvous: every member makes its own at the same time."""

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        rank: int,
        world: int,
        host: str,
        device: torch.device,
        timeout_s: float,
        one_card: bool = False,
    ) -> None:
        """`name`: of this membership, never used twice on a store. `host`: this process's own address. `one_card`: gloo for GPUs
        too, which copies through host memory: NCCL takes no card twice."""
        self.device = device
        self._streams = device.type == "cuda" and not one_card
        prefixed = dist.PrefixStore(name, store)
        self._backend: Any
        if self._streams:
            self._backend = _nccl(prefixed, rank, world)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = timedelta(seconds=timeout_s)
            self._backend = dist.ProcessGroupGloo(prefixed, rank, world, options)
        self._options = dist.BroadcastOptions()
        self._options.rootRank = self._options.rootTensor = 0
        self._options.asyncOp = True  # on a stream of its own, not on the caller's

    def broadcast(self, data: Tensor) -> Any:
        """Begin to send (rank 0) or receive `data`; the work, to be waited for."""
        return self._backend.broadcast([data], self._options)

    def release(self, work: Any, until: float) -> None:
        """Return when the bytes that `work` sends may be overwritten by what is enqueued next."""
        if self._streams:
            work.wait()  # orders streams only, the host does not wait
        else:
            self.finish(work, until)

    def finish(self, work: Any, until: float) -> None:
        """Wait until `work` is done. DeadlineError at `until` (monotonic seconds), RuntimeError when it failed."""
        while not work.is_completed():
            if time.monotonic() >= until:
                raise DeadlineError("a broadcast of weights did not end in time")
            time.sleep(POLL_S)
        work.wait()

    def abort(self) -> None:
        """Give up what is under way; the group is of no use afterwards. Ends kernels that wait for a dead member. Returns
        within ABORT_S: NCCL's own abort may wait as long as its time limit."""

        def give_up() -> None:
            with contextlib.suppress(RuntimeError, AttributeError):
                self._backend.abort()

        thread = threading.Thread(target=give_up, name="weights-abort", daemon=True)
        thread.start()
        thread.join(ABORT_S)


def within(work: Callable[[], T], *, seconds: float, watch: Callable[[], None], abort: Callable[[], None]) -> T:
    """`work()` in a thread of its own, so that one stuck in the communication library takes nobody along.

    `watch` is called all the while and raises when going on is pointless; then, and when `seconds` are over, `abort` is
    called. DeadlineError, what `watch` or `work` raised, or StuckError when even that did not bring the thread back."""
    result: list[T] = []
    error: list[BaseException] = []

    def carry() -> None:
        try:
            result.append(work())
        except BaseException as e:  # noqa: BLE001 - raised again in the caller
            error.append(e)

    thread = threading.Thread(target=carry, name="weights-transfer", daemon=True)
    until = time.monotonic() + seconds
    thread.start()
    failure: RunError | None = None
    while thread.is_alive() and failure is None:
        thread.join(WATCH_S)
        try:
            watch()
        except RunError as e:
            failure = e
        if failure is None and time.monotonic() >= until:
            failure = DeadlineError(f"a transfer of weights did not end within {seconds:g} s")
    if failure is not None and thread.is_alive():
        abort()
        thread.join(ABORT_S)
        if thread.is_alive():
            raise StuckError("a transfer of weights hangs in the communication library", got=str(failure))
    if result:
        return result[0]
    if failure is not None:
        raise failure
    if isinstance(error[0], RunError):
        raise error[0]
    raise RunError("a transfer of weights failed", got=first_line(error[0])) from error[0]


def _nccl(store: Store, rank: int, world: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=LATE_S)
    before = {name: os.environ.get(name) for name in _GENTLE}
    os.environ.update(_GENTLE)
    try:
        return dist.ProcessGroupNCCL(store, rank, world, options)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
