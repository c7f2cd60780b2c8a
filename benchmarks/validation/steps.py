"""Steps of RL runs that others published: what parts a step has, and how long new weights take.

verl's co-located steps are generation, log-probabilities, reference and update one after the other; its asynchronous steps are
the wait for samples and the update. An asynchronous row is predicted from the co-located row of the same model on as many
GPUs: each part scales with the GPUs it has, and the slower side sets the pace. AReaL-Hex printed the seconds of a weight
update for three models on three clusters; each cluster has its own fixed part and rate.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.validation.figures import Figure, figure, groups
from planner.record import record

MODEL_BYTES = {"1.5B": 3.55e9, "7B": 15.2e9, "14B": 29.5e9}  # bf16, as the papers' folder gives them


@record
class Step:
    """One published row of verl; None where a part is not given."""

    source: str
    model: str
    engine: str
    longest: str
    mode: str
    train_gpus: int
    rollout_gpus: int
    step_s: float
    generation_s: float  # of an asynchronous row: what the trainer waited for it, or ran beside it
    log_prob_s: float
    reference_s: float
    update_s: float

    @property
    def colocated(self) -> bool:
        """Whether all parts take turns on the same GPUs."""
        return self.mode == "colocate_sync"

    @property
    def parts_s(self) -> float:
        """What the parts add up to."""
        return self.generation_s + self.log_prob_s + self.reference_s + self.update_s


def steps(raw: Path) -> list[Step]:
    """All rows."""

    def seconds(text: str) -> float:
        return float(text) if text else 0.0

    with (raw / "verl_async_step_times.csv").open(newline="") as file:
        return [
            Step(
                source=r["source"],
                model=r["model"],
                engine=r["engine"],
                longest=r["max_resp"],
                mode=r["mode"],
                train_gpus=int(r["train_gpus"]),
                rollout_gpus=int(r["rollout_gpus"]),
                step_s=seconds(r["step_s"]),
                generation_s=seconds(r["gen_s"]),
                log_prob_s=seconds(r["old_logprob_s"]),
                reference_s=seconds(r["ref_s"]),
                update_s=seconds(r["update_actor_s"]),
            )
            for r in csv.DictReader(file)
        ]


def asynchronous_s(beside: Step, row: Step) -> float:
    """Step of an asynchronous row from the co-located one: max of generation on its GPUs and training on its own. Log-probabilities
    count where the row has them: fully asynchronous runs take the engine's."""
    gpus = beside.train_gpus
    generation = beside.generation_s * gpus / row.rollout_gpus
    scored = beside.log_prob_s if row.log_prob_s else 0.0
    training = (scored + beside.reference_s + beside.update_s) * gpus / row.train_gpus
    return max(generation, training)


def pairs(of: Sequence[Step]) -> list[tuple[Step, Step]]:
    """(co-located row, asynchronous row) of one model, engine and length on as many GPUs in all."""
    out = []
    for row in of:
        if row.colocated:
            continue
        for beside in of:
            same = (beside.source, beside.model, beside.engine, beside.longest) == (
                row.source,
                row.model,
                row.engine,
                row.longest,
            )
            if beside.colocated and same and beside.train_gpus == row.train_gpus + row.rollout_gpus:
                out.append((beside, row))
    return out


def verl(raw: Path) -> list[Figure]:
    """Parts against steps, and asynchronous rows from co-located ones."""
    rows = steps(raw)
    out: list[Figure] = []
    for source, at in groups(r.source for r in rows if r.colocated).items():
        mine = [[r for r in rows if r.colocated][i] for i in at]
        out.append(
            figure(
                "verl, parts of a co-located step",
                source,
                [r.parts_s for r in mine],
                [r.step_s for r in mine],
                fitted="nothing",
            )
        )
    waits = [r for r in rows if r.mode == "fully_async"]
    part = "wait + reference + update"
    out.append(
        figure(
            "verl, parts of an asynchronous step",
            part,
            [r.parts_s for r in waits],
            [r.step_s for r in waits],
            fitted="nothing",
        )
    )
    for source in dict.fromkeys(r.source for r in rows):
        found = [(b, r) for b, r in pairs(rows) if r.source == source]
        if found:
            got = [asynchronous_s(b, r) for b, r in found]
            measured = [r.step_s for _, r in found]
            name = "verl, asynchronous step from the co-located one"
            out.append(figure(name, source, got, measured, fitted="the co-located row"))
    return out


def updates(raw: Path) -> tuple[list[Figure], dict[str, float]]:
    """Weight updates of AReaL-Hex: two constants a cluster, every model predicted from the other two."""
    path = raw.parent / "papers" / "areal_hex_latency.csv"
    if not path.exists():
        path = raw / "areal_hex_latency.csv"
    by: dict[str, list[tuple[float, float]]] = {}
    with path.open(newline="") as file:
        for r in csv.DictReader(file):
            if r["sync_s"]:
                by.setdefault(r["system"], []).append((MODEL_BYTES[r["model"]], float(r["sync_s"])))
    out: list[Figure] = []
    constants: dict[str, float] = {}
    for system, points in by.items():
        size, seconds = np.array(points).T
        got = []
        for i in range(len(points)):
            kept = np.arange(len(points)) != i
            slope, fixed = np.polyfit(size[kept], seconds[kept], 1)
            got.append(fixed + slope * size[i])
        out.append(
            figure("AReaL-Hex weight update", system, got, seconds, fitted="the two other models of the cluster")
        )
        slope, fixed = np.polyfit(size, seconds, 1)
        constants[f"{system}: fixed seconds"] = float(fixed)
        constants[f"{system}: GB/s"] = float(1e-9 / slope)
    return out, constants


def run(raw: Path) -> tuple[list[Figure], dict[str, float]]:
    """All figures of published steps."""
    found, constants = updates(raw)
    return [*verl(raw), *found], constants
