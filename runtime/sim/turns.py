"""The planner's turns in a simulated run: one planning at a time, begun and thrown away by the daemon's own rules."""

from planner.record import replace
from runtime.core.event import Stored
from runtime.core.fold import fold
from runtime.core.needing import Need, needed, outdates, unanswered
from runtime.core.plan_event import PlanningStarted
from runtime.core.solved import PlanCause
from runtime.core.state import ClusterState
from runtime.core.trigger import HARD_LONGEST_S, HARD_QUIET_S, JOIN_LONGEST_S, JOIN_QUIET_S, due
from runtime.sim.watching import Watch

_ROUNDING_S = 1e-9  # times of looks are sums


class Turns:
    """What is needed, and what is being worked on. `watch` knows which devices are slow, and in doubt; None: nobody looks."""

    def __init__(self, watch: Watch | None) -> None:
        self._watch = watch
        self._state = ClusterState()
        self._working: Need | None = None

    def needs(self, cause: PlanCause, reason: str, now_s: float) -> tuple[float, ...]:
        """A plan is needed for one more reason; answers with the times at which its turn may have come."""
        rev = self._state.need_rev + 1
        need = needed(self._state.need, cause, reason, now_s, rev=rev)
        self._state = replace(self._state, need=need, need_rev=rev)
        times = [
            now_s + HARD_QUIET_S,
            now_s + JOIN_QUIET_S,
            need.since_s + HARD_LONGEST_S,
            need.since_s + JOIN_LONGEST_S,
        ]
        if self._watch is not None and self._state.drift_planned is not None:
            times.append(self._state.drift_planned.at_s + self._watch.rule.cooldown_s)
        return tuple(t for t in times if t > now_s)

    def begin(self, now_s: float) -> Need | None:
        """The need to work on from now on; None when there is none, it is not due, or the planner is busy."""
        if self._working is not None and not outdates(self._state.need, self._working):
            return None
        if self._watch is None:
            self._working = due(self._state, now_s + _ROUNDING_S)
            return self._working
        in_doubt = self._watch.doubtful
        self._state = replace(self._state, devices=self._watch.devices)
        self._working = due(self._state, now_s + _ROUNDING_S, drift=self._watch.rule, doubtful=in_doubt)
        if self._working is not None and "drift" in self._working.causes:
            started = PlanningStarted(trigger="", drift=True, doubtful=tuple(in_doubt))
            self._state = fold(self._state, [Stored(seq=0, at_s=now_s, event=started)])
        return self._working

    def stands(self, need: Need) -> bool:
        """Whether the planning for it is under way, or was thrown away."""
        return need is self._working and not outdates(self._state.need, need)

    def end(self, need: Need) -> None:
        """The planner answered."""
        self._working = None
        self._state = replace(self._state, need=unanswered(self._state.need, need.rev))
