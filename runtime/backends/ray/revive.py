"""A backend that outlives its Ray: when gcs_server or raylet of a cluster we started ends, everything is started again from
ledger and checkpoint. Ray has no memory of its own here, so nothing else is lost."""

import logging
import threading
from collections.abc import Callable, Mapping

from planner.record import replace
from runtime.backends.ray.actors.host import in_words
from runtime.backends.ray.backend import RayBackend
from runtime.backends.ray.cluster import RayHead, is_up
from runtime.core.action import Step
from runtime.core.observation import Observation
from runtime.errors import RefusedError
from runtime.runs import RunInfo

logger = logging.getLogger(__name__)
BUILT_S = 90.0  # flow and rewards: their processes, imports, data
AGAIN_S = (0.0, 5.0, 15.0, 60.0)


class RevivingBackend:
    """`runtime.backends.protocol.Backend`. `reopen(run)` starts Ray again and gives a backend on it, flow yet to be built."""

    def __init__(self, inner: RayBackend, reopen: Callable[[RunInfo], RayBackend]) -> None:
        self._inner, self._reopen = inner, reopen
        self._last: Observation | None = None
        self._ending = threading.Event()
        self._reviving: threading.Thread | None = None
        self._problem = ""
        self._tell: Callable[[], None] = lambda: None

    @property
    def run(self) -> RunInfo:
        """The run with Ray's address and processes filled in; already written to `run.json`."""
        return self._inner.run

    @property
    def head(self) -> RayHead:
        """The cluster."""
        return self._inner.head

    def wait_built(self) -> None:
        """Wait until flow and rewards are built. Raises what kept them from it, after nothing is left of a run that was only
        beginning; of one that lived before, everything."""
        self._inner.wait_built(BUILT_S)

    def on_news(self, tell: Callable[[], None]) -> None:
        """`tell` is called, from any thread, when something happened; also by a Ray that is started later."""
        self._tell = tell
        self._inner.on_news(tell)

    def rest(self, calm: bool) -> None:
        """While it is calm figures are asked for once a second."""
        self._inner.rest(calm)

    def observe(self, now_s: float) -> Observation:
        """The newest level. While Ray is being started again: the last one, every body unknown, and why."""
        if self._reviving is None and self.head.owned and not is_up(self.head) and not self._ending.is_set():
            logger.error("Ray has ended; starting it again from ledger and checkpoint")
            self._problem = "Ray has ended; it is being started again from ledger and checkpoint"
            self._reviving = threading.Thread(target=self._revive, name="ray-revive", daemon=True)
            self._reviving.start()
        if self._reviving is None or self._last is None:
            self._last = self._inner.observe(now_s)
            return self._last
        gap_s = now_s - self._last.at_s
        return replace(
            self._last,
            replicas=tuple(replace(r, phase="unknown", age_s=(r.age_s or 0.0) + gap_s) for r in self._last.replicas),
            trainers=tuple(replace(t, phase="unknown", age_s=(t.age_s or 0.0) + gap_s) for t in self._last.trainers),
            flow_age_s=None if self._last.flow_age_s is None else self._last.flow_age_s + gap_s,
            problems=(self._problem,),
        )

    def _revive(self) -> None:
        self._inner.close()
        for attempt in range(1_000_000):
            if self._ending.wait(AGAIN_S[min(attempt, len(AGAIN_S) - 1)]):
                break
            try:
                reopened = self._reopen(self._inner.run)
                reopened.wait_built(BUILT_S)
                reopened.on_news(self._tell)
                self._inner = reopened
            except RefusedError as e:
                self._problem = f"Ray has ended, and another daemon has the run: {in_words(e)}"
                return
            except Exception as e:  # noqa: BLE001 - said on the screen, tried again
                self._problem = f"Ray has ended and does not start again: {in_words(e)}"
                logger.error("%s", self._problem)
            else:
                break
        self._reviving = None

    def allot(self, slots: Mapping[str, int]) -> None:
        """Tell flow, unless there is none to be told."""
        if self._reviving is None:
            self._inner.allot(slots)

    def apply(self, step: Step) -> None:
        """Begin a step, unless there is no Ray to take it."""
        if self._reviving is None:
            self._inner.apply(step)

    def finish(self, deadline_s: float) -> None:
        """End of the run."""
        self._leave()
        self._inner.finish(deadline_s)

    def close(self) -> None:
        """Let go of the run: the control plane ends, the actors live on."""
        self._leave()
        self._inner.close()

    def _leave(self) -> None:
        self._ending.set()
        if (reviving := self._reviving) is not None:
            reviving.join(120.0)
