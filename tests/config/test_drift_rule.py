"""The rule of slow devices from a configuration: what it becomes, and what is refused in words."""

from pathlib import Path

import pytest

from hexctl.data import data_folder
from runtime.config.drift import drift_faults, drift_rule
from runtime.config.load import load_config
from runtime.config.schema import DriftSection
from runtime.errors import ConfigError
from runtime.policy.drift import DriftRule

SHIPPED = data_folder("configs") / "areal-hex-24.toml"


def test_the_defaults_of_the_file_are_those_of_the_rule() -> None:
    assert drift_rule(load_config(SHIPPED).config) == DriftRule()
    assert list(drift_faults(DriftSection())) == []


def test_without_planning_there_is_no_rule() -> None:
    assert drift_rule(load_config(SHIPPED, overrides={"drift.replan": "false"}).config) is None


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            "enter_share = 0.03",
            ("enter_share: no device is ever slow", "0.03", "more than 0.05", "drift.replan = false"),
        ),
        ("leave_share = 0.85", ("leave_share: a device that is slow", "0.85", "enter_share, which is 0.85", "apart")),
        ("enter_share = 0.97", ("leave_share: a device that is slow", "0.95", "enter_share, which is 0.97", "apart")),
        ('enter = "0 s"', ("enter: a verdict at the first look", "0", "more than 0 s", "odd moment")),
        ('leave = "0 s"', ("leave: a verdict at the first look", "0", "more than 0 s", "odd moment")),
        ('payback = "0 s"', ("payback: no move pays", "0", "more than 0 s", "drift.replan = false")),
        ("margin = 0.5", ("margin: moves that earn less", "0.5", "at least 1", "pays for itself")),
        ('retry = "60 s"', ("retry: a slow device would be tried", "60", "at least 120 s", "leaves idle")),
        ('leave = "2 h"', ("retry: a slow device would be tried", "1800", "at least 7200 s", "leaves idle")),
    ],
)
def test_what_means_nothing_is_refused(tmp_path: Path, rows: str, words: tuple[str, str, str, str]) -> None:
    path = tmp_path / "run.toml"
    text = SHIPPED.read_text().replace('"models/', f'"{SHIPPED.parent}/models/')
    path.write_text(f"{text}\n[drift]\n{rows}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message, line = str(caught.value), len(path.read_text().splitlines())
    what, got, expected, hint = words
    assert f"{path}:{line}: " in message or f"{path}:{line - 1}: " in message
    for part in (f"drift.{what}", f"got {got}", expected, hint):
        assert part in message


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    text = SHIPPED.read_text().replace('"models/', f'"{SHIPPED.parent}/models/')
    path.write_text(f"{text}\n[drift]\nmargin = 0\nenter = 0.0\n")
    with pytest.raises(ConfigError, match=r"drift\.margin: bad value"):
        load_config(path)
    path.write_text(f"{text}\n[drift]\nmargin = 0.5\nenter = 0.0\nretry = 1.0\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert all(f"drift.{key}" in str(caught.value) for key in ("margin", "enter", "retry"))
    assert "3 faults" in str(caught.value)
