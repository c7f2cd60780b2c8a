"""Paced devices: real work on CPU, held to a declared speed by a deadline clock.

The declared speeds are in a file that only the devices read; the planner must find them out by measuring. They read it again
when it changes: a device whose pace is cut there while a run goes on is slow, as one that throttles is.
"""

import contextlib
import time
import tomllib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import Field, ValidationError

from runtime.config.schema import Section
from runtime.errors import ConfigError

HOST_BOUND_SHARE = 0.1
LOOK_S = 1.0  # between two looks at the file
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


class DevicePacing(Section):
    """One device that does not run at its kind's speed."""

    speed: Speed = Field(description="share of its kind's speed")


class PacingSpec(Section):
    """Declared speeds by kind, and shares of them by device."""

    kinds: dict[str, KindPacing] = Field(min_length=1)
    devices: dict[str, DevicePacing] = Field({})

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


class Pacing(Protocol):
    """How long work takes on a paced device."""

    def generation_s(self, *, samples: int, prefill_tokens: int) -> float: ...

    def training_s(self, tokens: int) -> float: ...


class DevicePace:
    """Implements `Pacing` for one device as the file says it now. A file that cannot be read leaves everything as it was."""

    def __init__(self, path: Path, kind: str, device: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError when the file has no speed for the kind."""
        self._path, self._kind_name, self._device, self._clock = path, kind, device, clock
        self._looked_at = clock()
        self._mark = self._stamp()
        self._kind, self._share = self._read()

    def generation_s(self, *, samples: int, prefill_tokens: int) -> float:
        """Seconds of one engine step, see `KindPacing`."""
        self._look()
        return self._kind.generation_s(samples=samples, prefill_tokens=prefill_tokens) / self._share

    def training_s(self, tokens: int) -> float:
        """Seconds of an optimiser step on `tokens` tokens."""
        self._look()
        return self._kind.training_s(tokens) / self._share

    def _look(self) -> None:
        if self._clock() - self._looked_at < LOOK_S:
            return
        self._looked_at = self._clock()
        mark = self._stamp()
        if mark is None or mark == self._mark:
            return
        self._mark = mark
        with contextlib.suppress(ConfigError):
            self._kind, self._share = self._read()

    def _read(self) -> tuple[KindPacing, float]:
        spec = load_pacing(self._path)
        own = spec.devices.get(self._device)
        return spec.kind(self._kind_name, where=str(self._path)), 1.0 if own is None else own.speed

    def _stamp(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            found = self._path.stat()
            return found.st_mtime_ns, found.st_size
        return None


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
