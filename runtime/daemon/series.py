"""Short histories for the dashboard's curves."""

from collections import deque
from collections.abc import Mapping

from planner.cluster import fleet_usd_per_h
from runtime.core.observation import Observation
from runtime.core.snapshot import Facts
from runtime.core.state import ClusterState
from runtime.core.view import usd_per_mtok

EVERY_S = 0.9  # a little less than the loop's slowest rhythm, so that no turn is left out
KEPT = 240


class Series:
    """One point a second of each figure that is known, at most four minutes."""

    def __init__(self) -> None:
        self._points: dict[str, deque[float]] = {}
        self._fed_s: float | None = None

    def feed(self, obs: Observation | None, facts: Facts, state: ClusterState, now_s: float) -> None:
        """Take the figures of an observation, unless the last were taken less than a second ago."""
        if obs is None or obs.flow is None or (self._fed_s is not None and now_s - self._fed_s < EVERY_S):
            return
        self._fed_s = now_s
        flow = obs.flow
        figures: dict[str, float | None] = {
            "reward": flow.reward_mean,
            "staleness_mean": flow.staleness_mean,
            "queue_batches": flow.queue_groups / max(1, facts.groups_per_batch),
            "generated_tokens_per_s": flow.generated_tokens_per_s,
            "tokens_per_s": flow.trained_tokens_per_s,
            "usd_per_mtok": usd_per_mtok(
                fleet_usd_per_h(facts.kinds, (d.kind for d in state.present)), flow.trained_tokens_per_s
            ),
        }
        for name, value in figures.items():
            if value is not None:
                self._points.setdefault(name, deque(maxlen=KEPT)).append(value)

    def view(self) -> Mapping[str, tuple[float, ...]]:
        """All points, newest last."""
        return {name: tuple(points) for name, points in self._points.items()}
