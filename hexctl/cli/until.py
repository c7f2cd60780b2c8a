"""The conditions of `hexctl wait --until`: parsed and judged without I/O."""

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from planner.record import record
from runtime.errors import ConfigError

_TERM = re.compile(r"^\s*([a-z_][a-z0-9_.]*)\s*(>=|<=|==|!=|=|>|<)\s*(\S+)\s*$", re.IGNORECASE)
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "=": operator.eq, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_SHORT = {"step": "steps_done", "steps": "steps_done", "reward": "reward_mean", "staleness": "staleness_mean"}


@record
class Term:
    """One comparison. `name` is a key of the status document; a dot goes into a mapping."""

    name: str
    compare: str
    value: float | str

    def holds(self, status: Mapping[str, Any]) -> bool:
        """Whether it holds; a figure that is not known satisfies nothing."""
        seen = look_up(status, self.name)
        if seen is None:
            return False
        if isinstance(self.value, float) != (isinstance(seen, int | float) and not isinstance(seen, bool)):
            raise ConfigError(
                f"--until: {self.name} is not compared with such a value",
                got=self.value,
                expected=f"something like {seen!r}",
            )
        return _COMPARE[self.compare](seen, self.value)


def parse(text: str) -> tuple[Term, ...]:
    """ "step>=50 and reward>0.9" as terms; ConfigError says what does not parse."""
    terms = []
    for part in re.split(r"\s+and\s+|,", text):
        m = _TERM.match(part)
        if m is None:
            raise ConfigError(
                "--until: not a condition",
                got=part,
                expected='NAME OP VALUE, such as "step>=50" or "state=running", joined by "and"',
            )
        name, compare, raw = m.groups()
        try:
            value: float | str = float(raw)
        except ValueError:
            value = raw.strip("\"'")
            if compare not in ("=", "==", "!="):
                raise ConfigError("--until: a text has no order", got=part, expected="= or !=") from None
        terms.append(Term(name=_SHORT.get(name, name), compare=compare, value=value))
    return tuple(terms)


def look_up(status: Mapping[str, Any], name: str) -> Any:
    """The figure of that name; ConfigError where the status document has no such key."""
    here: Any = status
    for key in name.split("."):
        if not isinstance(here, Mapping):
            return None if here is None else _unknown(status, name)
        if key not in here:
            # Keys below the first level come and go (reasons, metrics); those of the document are fixed.
            return _unknown(status, name) if here is status else None
        here = here[key]
    return here


def _unknown(status: Mapping[str, Any], name: str) -> Any:
    raise ConfigError(
        "--until: no such figure", got=name, expected=", ".join(sorted(k for k in status if k != "schema_version"))
    )
