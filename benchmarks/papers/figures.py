"""The figures the papers report, as their CSV files have them. Nothing is computed here."""

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from planner.errors import InvalidInput
from planner.record import record

FILES = (
    "areal_hex_latency.csv",
    "areal_hex_ratios.csv",
    "areal_hex_setup.csv",
    "areal_hex_throughput.csv",
    "hetrl_ratios.csv",
)
MODELS = ("1.5B", "7B", "14B")
H20, H800, HEX = "AReaL H20 same budget", "AReaL H800", "AReaL-Hex"  # systems of Figure 3
UNIFORM = "AReaL H800 uniform allocation"  # Table 3
H20_LATENCY, H800_LATENCY, HEX_LATENCY = H20, "AReaL H800 x24", "AReaL-Hex x56"  # the same in Figure 4
CASE_H800, CASE_H20, CASE_MIXED = "32 H800", "88 H20", "24 H800 + 24 H20"  # Figure 2

T = TypeVar("T")


@record
class Latency:
    """Seconds of one step: rollout, training, and the weight update that follows (None: not printed)."""

    infer_s: float
    train_s: float
    sync_s: float | None

    @property
    def step_s(self) -> float:
        """max(infer, train) + sync: the reading of Figure 4 that gives the printed share of sync."""
        return max(self.infer_s, self.train_s) + (self.sync_s or 0.0)


@record
class Range:
    """A range of speed-ups over the models and algorithms of one scenario."""

    scenario: str
    mode: str
    baseline: str
    low: float
    high: float


@record
class Figures:
    """Everything read."""

    setup: Mapping[str, float]  # by item
    latency: Mapping[tuple[str, str], Latency]  # by model and system
    tokens_per_s: Mapping[tuple[str, str, int | None], float]  # by model, system and GPUs (None: not printed)
    ratios: Mapping[tuple[str, str], float]  # by what and model ("": of none)
    hetrl: tuple[Range, ...]

    def price(self, h800: int, h20: int) -> float:
        """USD an hour of that many GPUs."""
        return h800 * self.setup["H800 price"] + h20 * self.setup["H20 price"]

    def speed_up(self, scenario: str, mode: str, baseline: str) -> Range | None:
        """HetRL's range there; None where it has none."""
        return next((r for r in self.hetrl if (r.scenario, r.mode, r.baseline) == (scenario, mode, baseline)), None)


def missing(folder: Path) -> tuple[str, ...]:
    """The files that `folder` lacks."""
    return tuple(name for name in FILES if not (folder / name).is_file())


def read_figures(folder: Path) -> Figures:
    """Read `folder`; InvalidInput, with file and line, for a row that does not decode."""
    read = {name: _rows(folder / name) for name in FILES}
    return Figures(
        setup=dict(_each(read["areal_hex_setup.csv"], lambda r: (r["item"], float(r["value"])))),
        latency=dict(
            _each(
                read["areal_hex_latency.csv"],
                lambda r: (
                    (r["model"], r["system"]),
                    Latency(
                        infer_s=float(r["infer_s"]),
                        train_s=float(r["train_s"]),
                        sync_s=float(r["sync_s"]) if r["sync_s"] else None,
                    ),
                ),
            )
        ),
        tokens_per_s=dict(
            _each(
                read["areal_hex_throughput.csv"],
                lambda r: (
                    (r["model"], r["system"], int(r["gpus"]) if r["gpus"] else None),
                    float(r["tokens_per_s"]),
                ),
            )
        ),
        ratios=dict(_each(read["areal_hex_ratios.csv"], lambda r: ((r["what"], r["model"]), float(r["value"])))),
        hetrl=tuple(
            _each(
                read["hetrl_ratios.csv"],
                lambda r: Range(
                    scenario=r["scenario"],
                    mode=r["mode"],
                    baseline=r["baseline"],
                    low=float(r["low"]),
                    high=float(r["high"]),
                ),
            )
        ),
    )


Row = tuple[str, dict[str, str]]


def _rows(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return [(f"{path.name}:{i}", row) for i, row in enumerate(csv.DictReader(file), start=2)]


def _each(rows: Sequence[Row], decode: Callable[[dict[str, str]], T]) -> list[T]:
    out: list[T] = []
    for where, row in rows:
        try:
            out.append(decode(row))
        except (KeyError, ValueError, TypeError) as e:
            raise InvalidInput("a row of the papers' figures does not decode", where=where, got=str(e)) from e
    return out
