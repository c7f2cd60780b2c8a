"""What the doctor says of a calibration: of this machine, old, of another driver, torch or card, absent, broken."""

import json
from datetime import date
from pathlib import Path

import pytest

from hexctl.cli.commands.doctor_calibration import OLD_DAYS, MachineFacts, calibration_findings, judged, parts_finding
from hexctl.cli.main import main
from hexctl.cli.probe import Gpus
from planner.calibration import Calibration, EngineRate, KindTables, Provenance, TrainerRate, encode
from planner.record import replace

NOW = MachineFacts(
    today=date(2026, 5, 20), host="box", torch="2.8.0", driver="570.1", devices=("NVIDIA H100 80GB HBM3",)
)
CARD = Provenance(
    source="hexctl profile", how="measured", device="NVIDIA H100 80GB HBM3", host="box", driver="570.1", torch="2.8.0",
    measured_on="2026-05-18",
)  # fmt: skip
PACED = replace(CARD, how="paced", device="CPU", driver="")


def said(p: Provenance, now: MachineFacts = NOW) -> tuple[str, str]:
    [finding] = judged(Calibration(kinds=(KindTables(kind="k", provenance=p),)), replace(now, devices=(p.device,)))
    assert (finding.verdict == "ok") == (finding.hint == "")
    return finding.verdict, finding.found


def test_of_this_machine_and_fresh() -> None:
    assert said(CARD) == ("ok", "measured on 2026-05-18 (measured)")
    assert said(PACED) == ("ok", "measured on 2026-05-18 (paced)")
    # What is not installed or not told cannot differ.
    assert said(CARD, replace(NOW, torch="", driver=""))[0] == "ok"
    assert said(replace(CARD, driver="", torch="", host=""))[0] == "ok"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"measured_on": "2026-04-01"}, "49 days old"),
        ({"measured_on": "2026-06-01"}, "dated 2026-06-01, which is to come"),
        ({"measured_on": ""}, "without a date"),
        ({"measured_on": "yesterday"}, "without a date"),
        ({"driver": "550.0"}, "with driver 550.0, now 570.1"),
        ({"torch": "2.6.0"}, "with torch 2.6.0, now 2.8.0"),
        ({"host": "other"}, "of another machine (other)"),
        ({"driver": "550.0", "torch": "2.6.0"}, "with driver 550.0, now 570.1; with torch 2.6.0, now 2.8.0"),
    ],
)
def test_what_is_no_longer_so(changes: dict[str, str], words: str) -> None:
    assert said(replace(CARD, **changes)) == ("note", words)


def test_the_last_day_of_the_month_is_still_fresh() -> None:
    day = date.fromordinal(NOW.today.toordinal() - OLD_DAYS)
    assert said(replace(CARD, measured_on=day.isoformat()))[0] == "ok"


def test_another_card_and_a_card_that_was_not_measured() -> None:
    here = replace(NOW, devices=("NVIDIA L4", "NVIDIA L4"))
    found = [(f.verdict, f.found) for f in judged(Calibration(kinds=(KindTables(kind="H100", provenance=CARD),)), here)]
    assert found == [
        ("note", "of NVIDIA H100 80GB HBM3, which this machine does not have"),
        ("note", "not of NVIDIA L4, which this machine has"),
    ]
    # Without cards nothing is missing, and a card's figures may be for planning elsewhere.
    assert [
        f.verdict
        for f in judged(Calibration(kinds=(KindTables(kind="H100", provenance=CARD),)), replace(NOW, devices=()))
    ] == ["ok"]


def test_absent_broken_and_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "calibration.json"
    [absent] = calibration_findings(path, Gpus(count=0))
    assert (absent.verdict, absent.hint) == ("note", "hexctl profile measures this machine")
    path.write_text("{}")
    [broken] = calibration_findings(path, Gpus(count=0))
    assert broken.verdict == "fault"
    assert main(["doctor", "--root", str(tmp_path), "--output", "json"]) == 2
    rows = {f["what"]: f for f in json.loads(capfd.readouterr().out)}
    assert rows["calibration"]["verdict"] == "fault"
    path.write_text(encode(Calibration(kinds=(KindTables(kind="wide", provenance=replace(PACED, host="")),))))
    main(["doctor", "--root", str(tmp_path)])
    assert "calibration of wide" in capfd.readouterr().out


RATE = EngineRate(phase="decode", model="m", params=1, tp=1, running=8, context=100, tokens_per_s=1e3)
TURN = TrainerRate(
    model="m", params=1, devices=1, sequence_tokens=10, micro_batch=1, recompute=False, tokens_per_s=1e3
)  # fmt: skip


def of_parts(gpu_parts: int | None, count: int, *kinds: KindTables) -> list[tuple[str, str]]:
    gpus = Gpus(count=count, names=(CARD.device,) * count)
    return [(f.verdict, f.found) for f in parts_finding(gpu_parts, Calibration(kinds=kinds), gpus)]


def test_a_gpu_that_counts_as_parts_is_told_with_whose_rates_it_is_planned() -> None:
    """One GPU alone is two devices. Rates of both roles on parts come before those of whole cards; another card's count for none."""
    own = KindTables(kind="H100 1/2", provenance=CARD, engine=(RATE,), trainer=(TURN,))
    card = KindTables(kind="H100", provenance=CARD, engine=(RATE,), trainer=(TURN,))
    elsewhere = replace(own, provenance=replace(CARD, device="NVIDIA L4"))
    alone = "a GPU counts as 2 devices that take turns on it, as there is one alone; planned "
    by_card = alone + "by H100, measured on whole cards, and the rest assumed"
    assert of_parts(None, 1, card, own) == [("ok", alone + "by H100 1/2, each role measured beside the other")]
    assert of_parts(None, 1, card) == [("note", by_card)]
    assert of_parts(None, 1, card, replace(own, trainer=())) == [("note", by_card)]
    assert of_parts(None, 1, elsewhere) == [("note", alone + "with nothing measured, and the rest assumed")]
    assert of_parts(None, 2, own) == []
    assert of_parts(1, 1, own) == []
    assert of_parts(2, 0, own) == []
    [(verdict, found)] = of_parts(3, 2, card, own)
    assert (verdict, "counts as 3 devices that take turns on it; planned by H100, measured" in found) == ("note", True)
    assert [f.what for f in calibration_findings(Path("absent"), Gpus(count=1, names=(CARD.device,)))] == [
        "GPUs in parts",
        "calibration",
    ]


def test_the_doctor_looks_at_what_a_configuration_names(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "calibration.json").write_text(encode(Calibration(kinds=(KindTables(kind="mine", provenance=PACED),))))
    main(["doctor", "local", "--root", str(tmp_path), "--output", "json"])
    rows = [f["what"] for f in json.loads(capfd.readouterr().out)]
    assert "calibration of mine" in rows
    assert f"free disk at {tmp_path}" in rows
    assert "GPUs in parts" not in rows
