"""benchmarks.bench_weights on a CPU with a tiny shape: every process of it, real transfers, figures that fit each other."""

import json
from pathlib import Path

import pytest

from benchmarks.bench_weights import Child, goal_s, main, parse
from benchmarks.weights_ends import COMPILE_S, START_S, patience_s, weight_bytes

pytestmark = pytest.mark.timeout(600)


def test_the_goal_by_hand() -> None:
    assert goal_s(300_000_000, 100e6) == pytest.approx(1.5 * 3.0 + 0.05)


def test_a_wait_is_as_long_as_the_weights_are_large() -> None:
    small, large = (weight_bytes(shape, "bfloat16") for shape in ("1.5b", "7b"))
    assert 3e9 < small < 4e9
    assert 15e9 < large < 16e9
    assert weight_bytes("7b", "float32") == 2 * large
    assert 60 < patience_s(small) < patience_s(large) < patience_s(large) + COMPILE_S < 900
    assert patience_s(large, 2) - patience_s(large) == pytest.approx(patience_s(large) - patience_s(0))


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
    out_, talk = capfd.readouterr()
    assert "goal 1.5 x bytes/bandwidth + 50 ms" in out_
    for wait in ("trainer tiny-qwen3: making the weights", "link tiny-qwen3: plain broadcasts", "engine tiny-qwen3: starting torch",
                 "trainer tiny-qwen3: the engine connects", "update 2 of 2: sending", "update 2 of 2: swapping in"):  # fmt: skip
        assert f"{wait}, at most " in talk


def test_a_child_that_says_nothing_is_named() -> None:
    given = parse(["--device", "cpu", "--shapes", "tiny-qwen3"])
    child = Child("trainer", "tiny-qwen3", given, 0)
    try:
        child.says("making the weights", patience_s(0))
        with pytest.raises(SystemExit, match=r"^trainer tiny-qwen3: what nobody asked for: not within 0 s$"):
            child.says("what nobody asked for", 0.01)
    finally:
        child.end()
    with pytest.raises(SystemExit, match="trainer tiny-qwen3: ended with 0"):
        child.says("more", START_S)
