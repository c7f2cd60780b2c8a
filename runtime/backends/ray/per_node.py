"""The same work once on every node of a cluster: an actor a node, pinned by node affinity, asked how it is, never waited for
beyond a deadline. Nothing of it outlives the call."""

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planner.record import record
from runtime.backends.ray.actors.host import in_words, resolve

START_S = 60.0  # an actor's process, on a loaded machine
SILENCE_S = 20.0  # an actor that does not say how it is
_POLL_S = 0.3

Say = Callable[[object], None]
Work = Callable[[Any, Say, Callable[[], bool]], Any]
"""work(argument, say, should_stop) -> result: what a "module:function" names."""


@record
class NodeLevel:
    """An actor's answer to a ping."""

    said: Any = None  # the newest thing the work said
    ended: bool = False
    result: Any = None
    failure: str = ""


@record
class Node:
    """A living node of the cluster."""

    id: str
    name: str
    address: str


@record
class NodeAnswer:
    """What became of the work on one node. `failure` in words; "" when there is a result."""

    node: Node
    result: Any = None
    failure: str = ""


class NodeActor:
    """Carries one piece of work in a thread, so that it can be asked meanwhile."""

    def __init__(self, import_path: Sequence[str]) -> None:
        import sys

        sys.path += [p for p in import_path if p not in sys.path]
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            del os.environ["CUDA_VISIBLE_DEVICES"]  # Ray hides the cards of actors that claim none
        self._level = NodeLevel()
        self._stop = threading.Event()

    def start(self, work: str, argument: Any) -> None:
        """Begin `work`, a "module:function"."""
        threading.Thread(target=self._carry, args=(work, argument), daemon=True).start()

    def _carry(self, work: str, argument: Any) -> None:
        try:
            result = resolve(work)(argument, self._say, self._stop.is_set)
        except BaseException as e:  # noqa: BLE001 - whatever it is, the node's answer says it
            traceback.print_exc()
            self._level = NodeLevel(said=self._level.said, ended=True, failure=in_words(e))
        else:
            self._level = NodeLevel(said=self._level.said, ended=True, result=result)

    def _say(self, what: object) -> None:
        self._level = NodeLevel(said=what)

    def level(self) -> NodeLevel:
        """How it is now."""
        return self._level

    def stop(self) -> None:
        """Ask the work to end."""
        self._stop.set()


def nodes(ray: Any) -> tuple[Node, ...]:
    """The living nodes, by address."""
    found = [
        Node(id=n["NodeID"], name=n.get("NodeManagerHostname") or n["NodeID"][:8], address=n["NodeManagerAddress"])
        for n in ray.nodes()
        if n["Alive"]
    ]
    return tuple(sorted(found, key=lambda n: (n.address, n.id)))


def run_on(
    ray: Any,
    work: Mapping[Node, tuple[str, Any]],
    *,
    deadline_s: float,
    import_path: Sequence[str] = (),
    on_said: Callable[[Node, Any], None] = lambda n, said: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[NodeAnswer, ...]:
    """Do `work` (function and argument by node) at once on all its nodes; an answer a node, in order.

    A node that does not start, is silent or is not done by `deadline_s` has a failure that says so. KeyboardInterrupt when
    `should_stop` says so. The actors are gone when this returns.
    """
    began, pause = time.monotonic(), threading.Event()
    actors = {node: _actor(ray, node, import_path) for node in work}
    heard = dict.fromkeys(work, began)
    started: set[Node] = set()
    answers: dict[Node, NodeAnswer] = {}
    asked: dict[Any, Node] = {}
    try:
        for node, (function, argument) in work.items():
            actors[node].start.remote(function, argument)
            asked[actors[node].level.remote()] = node
        while len(answers) < len(work):
            if should_stop():
                raise KeyboardInterrupt
            ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_POLL_S)
            now = time.monotonic()
            for ref in ready:
                node = asked.pop(ref)
                level = _taken(ray, ref)
                heard[node] = now
                started.add(node)
                if level.said is not None:
                    on_said(node, level.said)
                if level.ended:
                    answers[node] = NodeAnswer(node=node, result=level.result, failure=level.failure)
                else:
                    asked[actors[node].level.remote()] = node
            for node in work:
                why = _late(now - heard[node], now - began, node in started, deadline_s)
                if node not in answers and why:
                    answers[node] = NodeAnswer(node=node, failure=why)
                    asked = {r: n for r, n in asked.items() if n != node}
            if len(ready) and len(answers) < len(work):
                pause.wait(_POLL_S)
        return tuple(answers[n] for n in work)
    finally:
        for actor in actors.values():
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)


def _taken(ray: Any, ref: Any) -> NodeLevel:
    """An actor's answer; a dead actor's is its failure."""
    try:
        level: NodeLevel = ray.get(ref, timeout=1.0)
    except Exception as e:  # noqa: BLE001 - whatever Ray says of the actor
        return NodeLevel(ended=True, failure=in_words(e))
    return level


def _late(silent_s: float, since_s: float, started: bool, deadline_s: float) -> str:
    if not started:
        return f"no actor there within {START_S:.0f} s" if silent_s > START_S else ""
    if silent_s > SILENCE_S:
        return f"does not answer for {silent_s:.0f} s"
    return f"not done within {deadline_s:.0f} s" if since_s > deadline_s else ""


def _actor(ray: Any, node: Node, import_path: Sequence[str]) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    pinned = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
    remote = ray.remote(NodeActor).options(num_cpus=0, max_concurrency=4, scheduling_strategy=pinned)
    return remote.remote(tuple(import_path))
