"""The profile of every node of a joined Ray cluster, and of the links between them."""

import itertools
import json
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planner.calibration import KindTables, LinkPoint
from planner.record import record, replace
from runtime.backends.ray import cluster as ray_cluster
from runtime.backends.ray.per_node import Node, NodeAnswer, nodes, run_on
from runtime.profile.agenda import LIMIT_S, QUICK_LIMIT_S, Order, Part
from runtime.profile.measure import Measured, Progress
from runtime.profile.node import Told, measured_of

GRACE_S = 45.0  # beyond a node's own limit: its last item ends, processes start
LINK_S = 40.0
MOST_LINKS = 4  # pairs of nodes: enough to see a slow one, few enough for the time


@record
class NodeOutcome:
    """One node. `failure`: why it is left out."""

    node: str
    measured: Measured | None
    failure: str = ""
    items: tuple[Mapping[str, Any], ...] = ()  # of a dry run


def profile_cluster(
    address: str,
    order: Order,
    *,
    today: str,
    dry_run: bool,
    on_progress: Callable[[str, Progress], None],
    should_stop: Callable[[], bool],
) -> tuple[NodeOutcome, ...]:
    """Every node at once, then pairs of them. Errors: the cluster does not answer."""
    ray = ray_cluster.connect(address, f"hexctl-profile-{uuid.uuid4().hex[:8]}", token=None)
    try:
        found = nodes(ray)
        names = _names(found)
        argument = {"quick": order.quick, "only": list(order.only), "today": today, "dry_run": dry_run}

        def said(node: Node, what: Any) -> None:
            if isinstance(what, Told):
                on_progress(names[node], what.progress)

        limit_s = (QUICK_LIMIT_S if order.quick else LIMIT_S) + GRACE_S
        work = dict.fromkeys(found, ("runtime.profile.node:run", argument))
        answers = run_on(
            ray, work, deadline_s=limit_s, import_path=(os.getcwd(),), on_said=said, should_stop=should_stop
        )
        outcomes = [_outcome(names[a.node], a, dry_run) for a in answers]
        wanted: tuple[Part, ...] = order.only
        if not dry_run and len(found) > 1 and not wanted:
            outcomes = _with_links(ray, found, names, outcomes, on_progress, should_stop)
        return tuple(outcomes)
    finally:
        ray_cluster.disconnect()


def _names(found: Sequence[Node]) -> dict[Node, str]:
    """Host names; where two nodes have the same one, with the address or the node's number behind it."""
    names: dict[Node, str] = {}
    for n in found:
        alike = [o for o in found if o.name == n.name]
        same_address = sum(o.address == n.address for o in alike) > 1
        names[n] = n.name if len(alike) == 1 else f"{n.name}/{n.id[:6]}" if same_address else f"{n.name}/{n.address}"
    return names


def _outcome(name: str, answer: NodeAnswer, dry_run: bool) -> NodeOutcome:
    if answer.failure:
        return NodeOutcome(node=name, measured=None, failure=answer.failure)
    if dry_run:
        return NodeOutcome(node=name, measured=None, items=tuple(json.loads(answer.result)["items"]))
    return NodeOutcome(node=name, measured=measured_of(answer.result))


def _with_links(  # noqa: PLR0917 - the parts of one call
    ray: Any,
    found: Sequence[Node],
    names: Mapping[Node, str],
    outcomes: list[NodeOutcome],
    on_progress: Callable[[str, Progress], None],
    should_stop: Callable[[], bool],
) -> list[NodeOutcome]:
    """Links between neighbours in the list, one pair at a time, added to the tables of the one that sends."""
    by_name = {o.node: o for o in outcomes}
    pairs = [p for p in itertools.pairwise(found) if all(by_name[names[n]].measured for n in p)][:MOST_LINKS]
    for i, (a, b) in enumerate(pairs):
        what = f"link {names[a]} to {names[b]}"
        on_progress(names[a], Progress(done=i, of=len(pairs), what=what, left_s=(len(pairs) - i) * LINK_S / 4))
        text = link_between(ray, a, b, should_stop)
        mine, theirs = by_name[names[a]].measured, by_name[names[b]].measured
        assert mine is not None
        assert theirs is not None
        if not text:
            mine = replace(mine, notes=(*mine.notes, f"left out: {what}"))
        else:
            mine = replace(mine, tables=_linked(mine.tables, theirs.tables, json.loads(text)))
        by_name[names[a]] = replace(by_name[names[a]], measured=mine)
    return [by_name[o.node] for o in outcomes]


def link_between(ray: Any, sender: Node, server: Node, should_stop: Callable[[], bool]) -> str:
    """JSON of `runtime.profile.link.send` between two nodes; "" when they do not reach each other in time."""
    told = threading.Event()
    place: dict[str, Any] = {}
    result: list[str] = []

    def said(node: Node, what: Any) -> None:
        place.update(json.loads(what))
        told.set()

    def serve() -> None:
        run_on(
            ray,
            {server: ("runtime.profile.link:serve", {"address": server.address})},
            deadline_s=LINK_S,
            import_path=(os.getcwd(),),
            on_said=said,
            should_stop=should_stop,
        )

    serving = threading.Thread(target=serve, name="profile-link", daemon=True)
    serving.start()
    if told.wait(LINK_S):
        argument = {"address": server.address, **place}
        work = {sender: ("runtime.profile.link:send", argument)}
        [answer] = run_on(ray, work, deadline_s=LINK_S, import_path=(os.getcwd(),), should_stop=should_stop)
        result = [answer.result] if not answer.failure else []
    serving.join(LINK_S)
    return result[0] if result else ""


def _linked(
    mine: tuple[KindTables, ...], theirs: tuple[KindTables, ...], link: Mapping[str, Any]
) -> tuple[KindTables, ...]:
    """The first kind of the sender gets the points; `to` is the kind at the other end when it is another."""
    if not mine or not theirs:
        return mine
    first, other = mine[0], theirs[0].kind
    points = tuple(
        LinkPoint(
            path="node_to_node",
            size_bytes=64 * 2**20,
            bytes_per_s=rate,
            streams=int(streams),
            latency_s=link["latency_s"],
            to="" if other == first.kind else other,
        )
        for streams, rate in link["bytes_per_s"].items()
    )
    return (replace(first, links=(*first.links, *points)), *mine[1:])
