"""Work for nodes that answers, fails, dies or never ends. Imported by actors."""

import os
import threading
from collections.abc import Callable
from typing import Any


def echo(argument: Any, say: Callable[[object], None], should_stop: Callable[[], bool]) -> Any:
    """Says and answers its argument."""
    say({"said": argument})
    return {"node": os.environ.get("RAY_NODE_ID", ""), "argument": argument, "pid": os.getpid()}


def fails(argument: Any, say: Callable[[object], None], should_stop: Callable[[], bool]) -> Any:
    """Raises."""
    raise ValueError("no such card")


def dies(argument: Any, say: Callable[[object], None], should_stop: Callable[[], bool]) -> Any:
    """Its process ends."""
    os._exit(7)


def never(argument: Any, say: Callable[[object], None], should_stop: Callable[[], bool]) -> Any:
    """Does not end."""
    threading.Event().wait(300)
