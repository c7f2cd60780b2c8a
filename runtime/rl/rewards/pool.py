"""Verifiers at work: N children, each item with a hard deadline, results in batches.

An item whose verifier runs over the deadline is answered as an error and its child killed; one whose child dies is tried
once more on a fresh child. A verifier that does not start is tried again, ever more slowly; its items wait.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from planner.errors import HexError
from runtime.errors import DeadlineError, RunError
from runtime.rl.rewards.items import RewardItem, RewardResult
from runtime.rl.rewards.process import ChildLost, VerifierChild
from runtime.rl.rewards.verifiers import VerifierSpec

if TYPE_CHECKING:  # children import this package, and pydantic would be most of their start
    from runtime.config.schema import TaskSection

GATHER_S = 0.02  # results that come within this time are handed over together
RECYCLE_ITEMS = 5000  # a child is replaced after so many: parsers keep caches
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0
_log = logging.getLogger(__name__)


def verifier_spec(task: "TaskSection", search_path: Sequence[str] = ()) -> VerifierSpec:
    """The verifier a task names."""
    return VerifierSpec(name=task.reward, callable=task.callable, search_path=tuple(search_path))


class RewardPool:
    """Implements `RewardClient`. `submit` from any thread; `on_results` is called from a thread of the pool."""

    def __init__(
        self,
        spec: VerifierSpec,
        *,
        workers: int,
        timeout_s: float,
        on_results: Callable[[Sequence[RewardResult]], None],
        start_s: float = 60.0,
    ) -> None:
        """Returns when the first child is ready. ConfigError when the verifier does not load, DeadlineError when it takes
        longer than `start_s`."""
        self._spec, self._timeout_s, self._start_s, self._on_results = spec, timeout_s, start_s, on_results
        self._items: queue.SimpleQueue[RewardItem | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[RewardResult | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._children: dict[int, VerifierChild] = {}  # worker -> its child
        self._workers = [
            threading.Thread(target=self._work, args=(i,), name=f"verifier-{i}", daemon=True) for i in range(workers)
        ]
        self._deliverer = threading.Thread(target=self._deliver, name="verifier-results", daemon=True)
        self._first: queue.SimpleQueue[HexError | None] = queue.SimpleQueue()
        self._workers[0].start()
        if (failure := self._first.get()) is not None:
            self._closing.set()
            raise failure
        for thread in (*self._workers[1:], self._deliverer):
            thread.start()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the children now alive."""
        return tuple(c.pid for c in self._children.copy().values())

    def submit(self, items: Sequence[RewardItem]) -> None:
        """Queue items. Returns at once."""
        for item in items:
            self._items.put(item)

    def close(self) -> None:
        """Kill the children. Items not answered are dropped."""
        self._closing.set()
        for _ in self._workers:
            self._items.put(None)
        for child in self._children.copy().values():
            child.interrupt()
        for thread in self._workers:
            thread.join(self._start_s)
        self._results.put(None)
        self._deliverer.join(5.0)

    def _work(self, worker: int) -> None:
        child: VerifierChild | None = None
        try:
            if worker == 0:
                child = self._start_first()
            while not self._closing.is_set() and (item := self._items.get()) is not None:
                child, result = self._answer(worker, child, item)
                if child is None:
                    self._children.pop(worker, None)
                if result is not None:
                    self._results.put(result)
        finally:
            if child is not None:
                child.kill()
            self._children.pop(worker, None)

    def _start_first(self) -> VerifierChild | None:
        """The child whose start shows whether the verifier loads. It belongs to the thread that made it: the kernel
        takes the end of that thread for the parent's death."""
        try:
            child = VerifierChild(self._spec, start_s=self._start_s)
        except HexError as e:
            self._first.put(e)
            return None
        except OSError as e:
            self._first.put(RunError("a verifier's process cannot be started", got=str(e)))
            return None
        self._children[0] = child
        self._first.put(None)
        return child

    def _answer(
        self, worker: int, child: VerifierChild | None, item: RewardItem
    ) -> tuple[VerifierChild | None, RewardResult | None]:
        """The item's result, and the child to use next. None when the pool closes."""
        started = time.monotonic()
        error = ""
        for _attempt in range(2):
            if child is None or child.asked >= RECYCLE_ITEMS:
                if child is not None:
                    child.kill()
                child = self._start(worker)
                if child is None:
                    return None, None
            try:
                reward, error = child.verify(item, timeout_s=self._timeout_s)
            except DeadlineError:
                error = f"timeout: no answer within {self._timeout_s:g} s, killed"
                return None, self._result(item, 0.0, error, started)
            except ChildLost as e:
                error, child = f"crash: {e.got}", None
                continue
            return child, self._result(item, reward, error, started)
        return None, self._result(item, 0.0, error, started)

    def _start(self, worker: int) -> VerifierChild | None:
        """A fresh child, however long it takes; None when the pool closes first."""
        wait_s = FIRST_RETRY_S
        while not self._closing.is_set():
            try:
                child = VerifierChild(self._spec, start_s=self._start_s)
            except (RunError, OSError) as e:
                _log.error("a verifier does not start, next try in %g s: %s", wait_s, e)
                self._closing.wait(wait_s)
                wait_s = min(2 * wait_s, LAST_RETRY_S)
                continue
            self._children[worker] = child
            if not self._closing.is_set():
                return child
            child.kill()  # `close` may have looked before it was there
        return None

    def _result(self, item: RewardItem, reward: float, error: str, started: float) -> RewardResult:
        return RewardResult(sample=item.sample, reward=reward, error=error, seconds=time.monotonic() - started)

    def _deliver(self) -> None:
        while (first := self._results.get()) is not None:
            batch, end = [first], time.monotonic() + GATHER_S
            while (left := end - time.monotonic()) > 0:
                try:
                    more = self._results.get(timeout=left)
                except queue.Empty:
                    break
                if more is None:
                    self._hand_over(batch)
                    return
                batch.append(more)
            self._hand_over(batch)

    def _hand_over(self, batch: Sequence[RewardResult]) -> None:
        try:
            self._on_results(batch)
        except Exception:  # noqa: BLE001 - flow asks again for what it did not get
            _log.exception("results of %d verifications were not taken", len(batch))
