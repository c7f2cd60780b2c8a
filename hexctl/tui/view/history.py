"""What the console remembers between snapshots: tokens/s of each device, for the little curves in the fleet table."""

from collections.abc import Mapping

from planner.record import record
from runtime.api.wire import Snapshot

KEPT = 14
SPACING_S = 2.0


@record
class History:
    """Recent rates by device id, newest last. A value; `grown` gives the next one."""

    at_s: float = float("-inf")
    rates: Mapping[str, tuple[float, ...]]

    def of(self, device_id: str) -> tuple[float, ...]:
        """Rates of one device, oldest first."""
        return self.rates.get(device_id, ())

    def grown(self, s: Snapshot) -> "History":
        """With the snapshot's rates added, at most one point every two seconds; devices that are gone are forgotten."""
        if s.at_s < self.at_s + SPACING_S and s.at_s >= self.at_s:
            return self
        rates = {d.id: (*self.of(d.id)[-(KEPT - 1) :], d.tokens_per_s or 0.0) for d in s.devices}
        return History(at_s=s.at_s, rates=rates)


EMPTY = History(rates={})
