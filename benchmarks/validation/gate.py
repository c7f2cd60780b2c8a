"""What is committed beside the report, and whether new figures are worse."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.curves import KINDS
from benchmarks.validation import kernels, pipelines, serving, steps, training
from benchmarks.validation.figures import Figure
from planner.record import record

ROOT = Path(__file__).resolve().parents[2]
RAW = ROOT.parent / "shared" / "data" / "planner"
SAMPLE = ROOT / "tests" / "planner" / "validation_sample"
COMMITTED = ROOT / "docs" / "validation.json"
SET_MARGIN, PART_MARGIN = 0.05, 0.10
SLACK = 0.002  # of rounding and another machine's arithmetic


@record
class Outcome:
    """All figures of one folder of tables, and the constants fitted on the way."""

    figures: tuple[Figure, ...]
    constants: dict[str, dict[str, float]]


def recompute(raw: Path, only: Sequence[str] = tuple(KINDS)) -> Outcome:
    """Every figure, from the tables in `raw`."""
    figures = kernels.run(raw, only)
    constants: dict[str, dict[str, float]] = {}
    parts = (("Serving", serving), ("Training", training), ("Pipelines", pipelines), ("Published steps", steps))
    for name, module in parts:
        found, fitted = module.run(raw)
        figures += found
        if fitted:
            constants[name] = fitted
    return Outcome(figures=tuple(figures), constants=constants)


def encode(outcome: Outcome) -> list[dict[str, object]]:
    """Plain values, rounded."""
    return [
        {k: round(v, 4) if isinstance(v, float) else v for k, v in dataclasses.asdict(f).items()}
        for f in outcome.figures
    ]


def committed(which: str) -> list[Figure]:
    """The figures in docs/validation.json: `full` or `sample`."""
    return [Figure(**f) for f in json.loads(COMMITTED.read_text())[which]]


def worse(before: Sequence[Figure], now: Sequence[Figure]) -> list[str]:
    """What got worse: the row-weighted mean of a set's median errors by more than 5 %, a part's by more than 10 %, or a
    figure that is gone."""
    out: list[str] = []
    new = {(f.name, f.part): f for f in now}
    for name in dict.fromkeys(f.name for f in before):
        mine = [f for f in before if f.name == name]
        gone = [f.part for f in mine if (name, f.part) not in new]
        out += [f"{name}, {part}: no longer computed" for part in gone]
        if gone:
            continue
        rows = sum(f.rows for f in mine)
        was = sum(f.median * f.rows for f in mine) / rows
        found = sum(new[name, f.part].median * f.rows for f in mine) / rows
        if found > was * (1 + SET_MARGIN) + SLACK:
            out.append(f"{name}: median error {found:.4f}, was {was:.4f}")
        for f in mine:
            at = new[name, f.part].median
            if at > f.median * (1 + PART_MARGIN) + SLACK:
                out.append(f"{name}, {f.part}: median error {at:.4f}, was {f.median:.4f}")
    return out
