"""Two ranks of a tiny model on this machine's CPU, and the death of one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live import ROOT


@pytest.mark.accept
def test_two_ranks_agree_with_one_and_end_with_each_other(tmp_path: Path) -> None:
    file = tmp_path / "ranks.json"
    words = ["--model", "configs/models/tiny-qwen3/config.json", "--dtype", "float32", "--steps", "2", "--samples", "4"]
    words += ["--tokens", "16", "--compile", "off", "--deadline", "60", "--folder", str(tmp_path), "--json", str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.check_ranks", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["largest_relative_loss_difference"] < 1e-3
    assert 0 < found["seconds_from_kill_to_the_last_end"] < 30, "Gloo hears of it at once"
    assert done.stdout.index("one rank:") < done.stdout.index("2 ranks:") < done.stdout.index('"model"')
    assert [p.name for p in tmp_path.iterdir()] == ["ranks.json"]
