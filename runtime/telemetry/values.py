"""Figures as NVML gives them, made honest: sentinels and nonsense become None, and are counted."""

_ALL_ONES = frozenset({2**16 - 1, 2**32 - 1, 2**64 - 1, 2**31 - 1, 2**63 - 1, -1})


class Sieve:
    """Lets plausible figures through. `rejected` counts those that were not."""

    def __init__(self) -> None:
        self.rejected = 0

    def number(self, value: object, low: float, high: float, scale: float = 1.0) -> float | None:
        """`value * scale` if it is a number between `low` and `high` (after scaling) and no sentinel."""
        if value is None or isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if value in _ALL_ONES or value != value:  # noqa: PLR0124 - NaN
            self.rejected += 1
            return None
        scaled = value * scale
        if not low <= scaled <= high:
            self.rejected += 1
            return None
        return float(scaled)

    def pid(self, value: object) -> int | None:
        """A process id that a kernel could have given."""
        return value if isinstance(value, int) and 0 < value <= 2**22 else None
