"""Where flow's own time goes, step by step: what it adds to a step beside the trainer's and the engines' work."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from runtime.rl.ledger import Ledger
from runtime.rl.types import EngineStats


class Spent:
    """Seconds by part since the last step's line: its calls (`flow_<part>_s`), the ledger's commits among them, how
    long finished samples waited for their reward, and a mean plain step of the engines that tell theirs."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger, self._clock = ledger, clock
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._exchanges = 0
        self._rewards, self._reward_s = 0, 0.0
        self._engine_steps, self._engine_s, self._engine_host_s = 0, 0.0, 0.0
        self._commits, self._commit_s = ledger.commits, ledger.commit_s

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time of the block belongs to `name`."""
        began = self._clock()
        try:
            yield
        finally:
            self._seconds[name] += self._clock() - began
            self._exchanges += name == "exchange"

    def reward(self, waited_s: float) -> None:
        """A reward came that long after its sample ended."""
        self._rewards, self._reward_s = self._rewards + 1, self._reward_s + waited_s

    def engine(self, before: EngineStats, now: EngineStats) -> None:
        """A replica told more of its engine's plain steps."""
        self._engine_steps += now.plain_steps - before.plain_steps
        self._engine_s += now.plain_step_s - before.plain_step_s
        self._engine_host_s += now.plain_host_s - before.plain_host_s

    def take(self) -> Mapping[str, float | None]:
        """As a part of a step's line; starts anew."""
        ledger = self._ledger
        row: dict[str, float | None] = {f"flow_{name}_s": s for name, s in sorted(self._seconds.items())}
        row |= {
            "flow_exchanges": self._exchanges,
            "flow_commits": ledger.commits - self._commits,
            "flow_commit_s": ledger.commit_s - self._commit_s,
            "reward_wait_s": self._reward_s / self._rewards if self._rewards else None,
        }
        if self._engine_steps:
            row |= {
                "engine_step_s": self._engine_s / self._engine_steps,
                "engine_host_s": self._engine_host_s / self._engine_steps,
            }
        self._seconds.clear()
        self._exchanges = self._rewards = 0
        self._reward_s = 0.0
        self._engine_steps, self._engine_s, self._engine_host_s = 0, 0.0, 0.0
        self._commits, self._commit_s = ledger.commits, ledger.commit_s
        return row
