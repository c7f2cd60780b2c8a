"""Planning in a process of its own: started and polled without waiting, killed at its deadline; the last incumbent stands."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from planner.problem import Budget, Problem
from planner.record import record, replace
from planner.solution import Feasible, Solution
from runtime.planning.message import Ask, Broken, Done, FromChild, Incumbent, Ready
from runtime.process_group import ProcessGroup

CHILD = (sys.executable, "-m", "runtime.planning.child")
START_S = 60.0  # imports of the child, on a loaded machine
SEND_BUFFER_BYTES = 1 << 22  # a problem of thousands of devices must fit, so that sending never waits
GRACE_S = 1.0  # after its own deadline, before it is killed


@record
class PlanningResult:
    """The end of one planning. Exactly one of `solution` and `error` says something."""

    solution: Solution | None
    error: str
    solve_s: float  # from the child's readiness


class PlanningProcess:
    """At most one planning at a time. Not shared between threads. `command` gets the number of its socket as last argument."""

    def __init__(
        self,
        *,
        solve_s: float,
        budget: Budget | None = None,
        clock: Callable[[], float] = time.monotonic,
        command: Sequence[str] = CHILD,
    ) -> None:
        self._solve_s, self._budget, self._clock, self._command = solve_s, budget or Budget(), clock, tuple(command)
        self._child: ProcessGroup | None = None
        self._pipe: Connection | None = None
        self._started_s = 0.0
        self._ready_s: float | None = None
        self._incumbent: Feasible | None = None

    @property
    def busy(self) -> bool:
        """Whether a planning is under way."""
        return self._child is not None

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return None if self._child is None else self._child.pid

    @property
    def incumbent(self) -> Feasible | None:
        """The best plan of the planning under way."""
        return self._incumbent

    def start(self, problem: Problem, scheduler: str) -> None:
        """Begin; a planning under way is cancelled."""
        self.cancel()
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        with theirs:
            theirs.set_inheritable(True)
            child = subprocess.Popen(
                [*self._command, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._child = ProcessGroup(child)
        self._pipe = Connection(ours.detach())
        self._started_s, self._ready_s, self._incumbent = self._clock(), None, None
        with contextlib.suppress(OSError):  # it is dead already; the next poll says so
            self._pipe.send(Ask(problem=problem, scheduler=scheduler, budget=self._budget, seconds=self._solve_s))

    def poll(self) -> PlanningResult | None:
        """The result once there is one; None before and when nothing is under way. Never waits."""
        if self._child is None:
            return None
        message = self._drain()
        if isinstance(message, Done):
            return self._end(message.solution, "")
        if isinstance(message, Broken):
            return self._end(self._incumbent, message.message)
        now_s = self._clock()
        if message is None and (code := self._child.ended()) is not None:
            return self._end(self._incumbent, f"the planner process ended by itself ({code})")
        if self._ready_s is None:
            late = now_s - self._started_s > START_S
            return self._end(None, f"the planner process did not start within {START_S:.0f} s") if late else None
        if now_s - self._ready_s > self._solve_s + GRACE_S:
            return self._end(self._incumbent, f"no plan within {self._solve_s:g} s")
        return None

    def cancel(self) -> None:
        """Kill the planning under way with all its children; its incumbent is forgotten."""
        child, pipe = self._child, self._pipe
        self._child = self._pipe = None
        if pipe is not None:
            pipe.close()
        if child is not None:
            child.kill()

    def _drain(self) -> FromChild | None:
        """Read what is there; returns the last message that ends the planning, else the newest, else None."""
        newest: FromChild | None = None
        pipe = self._pipe
        assert pipe is not None
        try:
            while pipe.poll(0):
                newest = pipe.recv()
                if isinstance(newest, Ready):
                    self._ready_s = self._clock()
                elif isinstance(newest, Incumbent):
                    self._incumbent = newest.feasible
                else:
                    return newest
        except (EOFError, OSError):
            return None
        return newest

    def _end(self, solution: Solution | None, error: str) -> PlanningResult:
        if error and solution is not None and isinstance(solution, Feasible):
            solution = replace(solution, finished=False)
        since_s = self._ready_s if self._ready_s is not None else self._started_s
        result = PlanningResult(
            solution=solution, error="" if solution is not None else error, solve_s=self._clock() - since_s
        )
        self.cancel()
        self._incumbent = None
        return result
