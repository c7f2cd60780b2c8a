"""The planner process: one problem in, incumbents and a solution out over a private socket, then the end.

Started by `runtime.planning.process` as `python -m runtime.planning.child FD`. It leads a process group of its own, so
that a hard cancel takes solver children along; it ends itself when the other side of the socket is closed.
"""

import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection

from runtime.planning.message import Ask, Broken, Done, FromChild, Incumbent, Ready


def _die_with_parent(connection: Connection) -> None:
    """The daemon never sends anything after the problem: readable means closed."""
    try:
        connection.poll(None)
    finally:
        os.killpg(os.getpgid(0), signal.SIGKILL)


def run(connection: Connection) -> None:
    """Serve one problem."""
    ask = connection.recv()
    assert isinstance(ask, Ask)
    threading.Thread(target=_die_with_parent, args=(connection,), daemon=True).start()

    def send(message: FromChild) -> None:
        connection.send(message)

    try:
        import planner

        send(Ready())
        end_s = time.monotonic() + ask.seconds
        solution = planner.solve(
            ask.problem,
            scheduler=ask.scheduler,
            budget=ask.budget,
            on_incumbent=lambda feasible: send(Incumbent(feasible=feasible)),
            should_stop=lambda: time.monotonic() >= end_s,
        )
        send(Done(solution=solution))
    except Exception as e:  # noqa: BLE001 - whatever it is, the daemon says it and goes on
        send(Broken(message=f"{type(e).__name__}: {e}"))


def main() -> None:
    """Entry point; standard output is nobody's: a solver's banner goes to standard error."""
    os.dup2(2, 1)
    run(Connection(int(sys.argv[1])))
    os._exit(0)  # the watching thread must not kill a process that is done


if __name__ == "__main__":
    main()
