"""benchmarks.bench_trainer on a CPU with a tiny shape: the table's arithmetic, and that each row of it can be made."""

import argparse
import json

import pytest

pytest.importorskip("transformers")

from benchmarks.bench_trainer import _parser, floor_s, main
from benchmarks.trainer_work import sizes

SMALL = [
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--shapes",
    "tiny",
    "--lengths",
    "24",
    "--tokens",
    "96",
    "--in-process",
]


def given(*more: str) -> argparse.Namespace:
    return _parser().parse_args([*SMALL, *more])


def test_a_table_of_both_steps(tmp_path, capsys):
    file = tmp_path / "figures.json"
    variants = ["--ours", "auto", "activation_checkpointing=on,attention=sdpa,micro_batch_tokens=24"]
    assert main([*SMALL, "--steps", "2", "--warm-up", "1", "--json", str(file), *variants]) == 0
    figures = json.loads(file.read_text())
    printed = capsys.readouterr().out
    assert "failed" not in printed
    for label in ("hf", "ours_auto", "ours_activation_checkpointing=on,attention=sdpa,micro_batch_tokens=24"):
        assert figures[f"tiny_24_{label}_tokens_per_s"] > 0
        assert figures[f"tiny_24_{label}_to_hf"] > 0
    assert "recomputed_layers=2 of 2" in printed


def test_a_variant_that_fails_is_a_row_not_the_end(capsys):
    main([*SMALL, "--steps", "1", "--warm-up", "0", "--skip-hf", "--ours", "attention=none", "auto"])
    printed = capsys.readouterr().out
    assert printed.count("failed: ValidationError") == 1
    assert "ours auto" in printed


def test_both_sides_over_two_ranks(tmp_path, capsys):
    file = tmp_path / "figures.json"
    small = [x for x in SMALL if x != "--in-process"]
    assert main([*small, "--steps", "1", "--warm-up", "1", "--ranks", "2", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert "failed" not in capsys.readouterr().out
    assert figures["tiny_24_hf_tokens_per_s"] > 0
    assert figures["tiny_24_ours_auto_tokens_per_s"] > 0


def test_the_floor_by_hand():
    # Two layers of 4 * 32 * 8 * (4 + 2) + 6 * 32 * 64 = 18432 FLOPs a token and 2 * 4 * 8 = 64 a squared token; head 8192.
    flops, seconds = floor_s("tiny", 24, given(), {"matmul_flops": 1e6, "copy_bytes": 1e30})
    assert sizes(24, given()) == [24] * 4
    assert flops == 3 * (2 * (18432 * 96 + 64 * 4 * 24 * 24) + 8192 * 4 * 23)
    assert seconds == pytest.approx(flops / 1e6)


def test_mixed_lengths_lie_between_an_eighth_and_the_whole():
    mixed = sizes(80, given("--mixed", "--tokens", "2000"))
    assert sum(mixed) >= 2000
    assert 10 <= min(mixed) < max(mixed) <= 80
