"""`hexctl plan --what-if` and `--explain`."""

import json
from pathlib import Path
from typing import Any

import pytest

from hexctl.cli.main import main
from hexctl.cli.render.plan import repaired_text, signed
from planner.plan import Placement, Plan, Prediction
from planner.solution import Explanation, Repaired
from tests.cli.test_plan import MODEL, SMALL


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path / "small.toml"


def call(capfd: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, str]:
    capfd.readouterr()
    got = main(list(argv))
    out, err = capfd.readouterr()
    assert got == code, err
    assert "Traceback" not in err
    return out, err


def test_what_if_shows_before_after_and_what_is_proven(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capfd, "plan", str(small), "--scheduler", "hex", "--what-if", "add=2xcard,eta=8")
    for word in ("what if add=2xcard, eta=8", "BEFORE", "AFTER", "tokens/s", "gap", "predicted", "proven"):
        assert word in out
    text, _ = call(capfd, "plan", str(small), "--what-if", "add=2xcard", "--output", "json")
    document: dict[str, Any] = json.loads(text)
    assert document["changes"] == ["add=2xcard"]
    assert document["after"]["tokens_per_s"] >= document["before"]["tokens_per_s"]
    gain = document["after"]["tokens_per_s"] / document["before"]["tokens_per_s"] - 1
    assert document["predicted_gain"] == pytest.approx(gain)
    assert document["proven_gain"]["at_least"] <= gain <= document["proven_gain"]["at_most"]


def test_nonsense_is_one_error(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, err = call(capfd, "plan", str(small), "--what-if", "remove=node3", code=2)
    assert out == ""
    assert err.count("error") == 1
    assert "node3" in err
    call(capfd, "plan", str(small), "--what-if", "eta=2", "--compare", "hex,areal-hex", code=2)


def test_a_change_that_leaves_no_plan(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capfd, "plan", str(small), "--what-if", "remove=2xcard", code=5)
    assert "after: no plan" in out


def test_explain_adds_pressures_and_actions(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capfd, "plan", str(small), "--scheduler", "hex", "--explain")
    for word in ("held back by", "what one change gives", "one more card", "PROVEN AT MOST"):
        assert word in out
    document = json.loads(call(capfd, "plan", str(small), "--scheduler", "hex", "--explain", "--output", "json")[0])
    assert document["feasible"] is True
    more = next(a for a in document["actions"] if a["what"] == "one more card")
    assert 0 <= more["predicted_gain"] <= more["proven_at_most"] + 1e-6
    one = SMALL.replace("count = 3", "count = 1")
    small.write_text(one)
    _, err = call(capfd, "plan", str(small), "--explain", code=5)
    assert "no plan" in err


def test_a_repaired_plan_shows_no_bound() -> None:
    prediction = Prediction(
        step_s=2.0, train_s=2.0, rollout_s=1.0, update_s=0.1, tokens_per_s=500.0, usd_per_h=None, usd_per_mtok=None
    )
    repaired = Repaired(
        plan=Plan(placements=(Placement(role="rollout", kind="card", devices=("d0",)),)),
        prediction=prediction,
        changed=("d0",),
        explanation=Explanation(headline="repaired: 1 devices change their placement"),
    )
    text = repaired_text(repaired)
    assert "bound       not computed" in text
    assert "gap" not in text
    assert signed(-1e-9) == "+0.0 %"
    assert signed(0.0412) == "+4.1 %"
