"""Paced devices: real work on CPU, held to a declared speed by a deadline clock.

The declared speeds are in a file that only the devices read; the planner must find them out by measuring.
"""

import time
import tomllib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from runtime.config.schema import Section
from runtime.errors import ConfigError

HOST_BOUND_SHARE = 0.1
Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Span = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class KindPacing(Section):
    """Declared speed of one kind of device."""

    decode_step_s: Speed = Field(description="seconds of one decode step, whatever the batch")
    decode_sample_s: Span = Field(0.0, description="seconds more a decode step takes for each sample in it")
    prefill_tokens_per_s: Speed = Field(description="prompt tokens and recomputed prefixes")
    train_tokens_per_s: Speed = Field(description="prompt and response tokens of a global batch")

    def generation_s(self, *, samples: int, prefill_tokens: int) -> float:
        """Seconds of one engine step that decodes one token for `samples` samples after prefilling `prefill_tokens`."""
        decode_s = self.decode_step_s + self.decode_sample_s * samples if samples else 0.0
        return decode_s + prefill_tokens / self.prefill_tokens_per_s

    def training_s(self, tokens: int) -> float:
        """Seconds of an optimiser step on `tokens` tokens."""
        return tokens / self.train_tokens_per_s


class PacingSpec(Section):
    """Declared speeds by kind."""

    kinds: dict[str, KindPacing] = Field(min_length=1)

    def kind(self, name: str, *, where: str = "") -> KindPacing:
        """Raises ConfigError for a kind without a declared speed."""
        if name not in self.kinds:
            raise ConfigError(
                "no declared speed for this kind", where=where, got=name, expected=", ".join(sorted(self.kinds))
            )
        return self.kinds[name]


def load_pacing(path: Path) -> PacingSpec:
    """Read a pacing file. Raises ConfigError with file and line (syntax) or file and key (values, all at once)."""
    try:
        data = tomllib.loads(path.read_text())
    except OSError as e:
        raise ConfigError("cannot read the pacing file", where=str(path), got=e.strerror) from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"the pacing file is not TOML: {e}", where=str(path)) from e
    try:
        return PacingSpec.model_validate(data)
    except ValidationError as e:
        faults = [f"{'.'.join(map(str, f['loc']))}: {f['msg']} (got {f['input']!r})" for f in e.errors()]
        raise ConfigError("; ".join(faults), where=str(path)) from e


class Pacer:
    """A deadline clock. Each charge moves the deadline on by the declared duration and waits until it.

    A late host keeps its deadline and catches up, but owes at most `max_debt_s`: what is beyond is lost for good.
    Time between `idle` and the next `begin` is nobody's.
    """

    def __init__(
        self,
        wait: Callable[[float], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
        max_debt_s: float = 0.5,
        window_s: float = 10.0,
        settle_s: float = 2.0,
    ) -> None:
        """`wait(seconds)` returns early, with True, when the work is to stop (`threading.Event.wait` is one).

        `lag_share` looks back over `window_s` of busy time and says nothing before `settle_s` of it.
        """
        self._wait, self._clock = wait, clock
        self._max_debt_s, self._window_s, self._settle_s = max_debt_s, window_s, settle_s
        self._deadline: float | None = None
        self._mark = 0.0  # up to here busy time is accounted
        self._spans: deque[tuple[float, float]] = deque()  # (wall, charged) a charge
        self._wall = self._charged = 0.0  # sums of the spans

    def begin(self) -> None:
        """Work starts now, unless it was under way."""
        if self._deadline is None:
            self._deadline = self._mark = self._clock()

    def idle(self) -> None:
        """There is nothing to do: the clock stops, debts are forgiven."""
        self._deadline = None

    def charge(self, seconds: float) -> None:
        """The work since `begin` or the last charge takes `seconds` on the declared device; wait until it would end."""
        self.begin()
        assert self._deadline is not None
        now = self._clock()
        self._deadline = max(self._deadline + seconds, now - self._max_debt_s)
        if self._deadline > now:
            self._wait(self._deadline - now)
        end = self._clock()
        self._record(end - self._mark, seconds)
        self._mark = end

    @property
    def lag_share(self) -> float | None:
        """How far behind its clock: 1 - charged / wall over the last busy seconds; None before there are enough."""
        if self._wall < self._settle_s:
            return None
        return max(0.0, 1.0 - self._charged / self._wall)

    @property
    def host_bound(self) -> bool:
        """The host cannot keep the declared speed: the device is not slow, this machine is."""
        lag = self.lag_share
        return lag is not None and lag > HOST_BOUND_SHARE

    def _record(self, wall: float, charged: float) -> None:
        self._spans.append((wall, charged))
        self._wall, self._charged = self._wall + wall, self._charged + charged
        while self._wall - self._spans[0][0] >= self._window_s:
            old_wall, old_charged = self._spans.popleft()
            self._wall, self._charged = self._wall - old_wall, self._charged - old_charged
