"""Conditions of `hexctl wait`."""

from typing import Any

import pytest

from hexctl.cli.until import parse
from runtime.errors import ConfigError

STATUS: dict[str, Any] = {
    "state": "running", "steps_done": 50, "reward_mean": 0.91, "staleness_max": 4, "usd_per_h": None, "infeasible": "",
    "wasted_tokens": {"cancelled": 88}, "metrics": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("step>=50", True), ("steps > 50", False), ("reward>0.9 and staleness_max<=4", True), ("reward>0.9,step<50", False),
        ("state=running", True), ("state=='running'", True), ("state != running", False), ("usd_per_h<1e9", False),
        ("wasted_tokens.cancelled>=88", True), ("wasted_tokens.other>=0", False), ("metrics.kl<1", False), ("reward_mean=0.91", True),
    ],
)  # fmt: skip
def test_conditions(text: str, holds: bool) -> None:
    assert all(t.holds(STATUS) for t in parse(text)) is holds


@pytest.mark.parametrize("text", ["", "step", "step>=", ">=5", "step>=5 or reward>1", "state>running", "step>=5 and"])
def test_what_does_not_parse(text: str) -> None:
    with pytest.raises(ConfigError, match="--until"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "says"), [("stepps>=5", "no such figure"), ("state=5", "not compared"), ("step=many", "not compared")]
)
def test_what_makes_no_sense_of_the_status(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        all(t.holds(STATUS) for t in parse(text))
