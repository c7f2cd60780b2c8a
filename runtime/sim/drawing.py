"""A window of the run on its timeline."""

import bisect

from runtime.sim.decoding import Decoding
from runtime.sim.figures import Books
from runtime.sim.finishing import Finishing
from runtime.sim.runout import RunOut
from runtime.sim.timeline import Timeline

POINTS = 16  # at which the counts are shown of a window in which all runs out


def draw(  # noqa: PLR0917
    t: Timeline, d: Decoding, finishing: Finishing, books: Books, began_s: float, now_s: float, runout: RunOut | None
) -> None:
    """What the replicas did from `began_s` to `now_s`, and the counts; all that ended is settled."""
    for i, lane in enumerate(d.lanes):
        what, since_s = "update" if d.paused[i] else "decode" if d.n[i] else "", began_s
        if not what and d.last[i] > 0:  # its last sample ended on the way
            since_s = min(began_s + float(d.last[i]), now_s)
            t.span("replicas", lane.name, "decode", began_s, since_s)
        t.span("replicas", lane.name, what, since_s, now_s)
    if runout is not None:
        for into_s in ((now_s - began_s) * k / POINTS for k in range(1, POINTS)):
            complete = bisect.bisect_right(finishing.complete, began_s + into_s, key=lambda c: c[0])
            t.counter("queue of complete groups", began_s + into_s, complete)
            t.counter("running samples", began_s + into_s, runout.running(into_s))
    t.counter("queue of complete groups", now_s, len(finishing.complete))
    t.counter("running samples", now_s, d.running)
    if books.steps:
        t.counter("staleness, mean of groups", now_s, round(books.steps[-1].group_age_mean, 3))
