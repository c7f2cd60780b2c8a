"""benchmarks.bench_weights on a CPU with a tiny shape: every process of it, real transfers, figures that fit each other."""

import json
from pathlib import Path

import pytest

from benchmarks.bench_weights import goal_s, main

pytestmark = pytest.mark.timeout(600)


def test_the_goal_by_hand() -> None:
    assert goal_s(300_000_000, 100e6) == pytest.approx(1.5 * 3.0 + 0.05)


def test_a_tiny_shape_on_a_cpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    words = "--device cpu --engine torch --shapes tiny-qwen3 --bucket 100000 --sequences 4 --tokens 32 --updates 2"
    code = main([*words.split(), "--json", str(out)])
    (figures,) = json.loads(out.read_text()).values()
    assert code == (0 if figures["met"] else 1)  # the time on a busy CPU is no promise; what was measured is told
    assert figures["update_s"] >= max(figures["transfer_s"], figures["pause_s"]) > 0
    assert figures["bytes"] > 400_000
    assert figures["decoded"] > 0, "it generated meanwhile"
    assert figures["goal_s"] == pytest.approx(goal_s(figures["bytes"], figures["bandwidth"]))
    assert "goal 1.5 x bytes/bandwidth + 50 ms" in capfd.readouterr().out
