"""Predicted beside measured: the step of a run as the plan had it before its first step, and as it was.

    python -m benchmarks.predicted runs/smollm2-gsm8k-gpus-2-1a2b                          # of a run that is there
    python -m benchmarks.predicted configs/smollm2-gsm8k-gpus-2.toml --steps 40 --calibration runs/calibration.json

With a configuration a run of `--steps` is made through `hexctl daemon` first, in a folder below `--root`. A step is the mean time
between two applied ones after the first `--skip`, over the last whole periods of checkpoints, so that the share of a checkpoint is in
it as it is in the prediction; the trainer's turn is gradients to publication, over the same steps. As the run's samples are seldom as
long as the configuration says, the prediction is also told at the lengths that the run had. Beside that stands what the run itself knows
after a third of its steps, by the factors that it found until then, against the steps after that. A run that is told to end (SIGTERM)
is compared as far as it got.
"""

import argparse
import dataclasses
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from benchmarks.ending import end_when_told
from planner.cluster import Cluster, Device, DeviceKind, whole_of
from planner.cost.model import CostModel
from planner.model import load_model_spec
from planner.plan import Plan, Prediction
from planner.record import record
from runtime.config.calibration import NAME, load_calibration
from runtime.config.load import load_config
from runtime.config.problem import DEFAULT_LINK, kind_from_config, problem_from_config
from runtime.config.schema import Config
from runtime.core.calibrating import Factors
from runtime.core.event import Stored
from runtime.core.fleet_event import CalibrationChanged
from runtime.core.modelled import corrected
from runtime.core.plan_event import PlanAdopted
from runtime.runs import list_runs
from runtime.store.events import open_store

if TYPE_CHECKING:
    from tests.live import LiveRun

Row = Mapping[str, Any]  # of metrics.jsonl
SAY_S = 20.0  # from one word of a run's progress to the next

SKIP = 5  # steps that compile, fill caches and queues
LEARNT = 1 / 3  # of the steps, by which a run knows its own factors


@record
class Learnt:
    """What a run predicts by its own factors, and the steps after it knew them."""

    after_steps: int
    step_s: float  # predicted, at the lengths of the steps after
    measured_s: float
    steps: int


@record
class Compared:
    """One run; seconds a step."""

    planned: Prediction  # at the configuration's lengths
    at_lengths: Prediction | None  # at those of the run; None: the plan cannot be costed there
    step_s: float
    step_median_s: float
    turn_s: float  # of the trainer
    response_mean: float
    prompt_mean: float
    generated_tokens_per_s: float
    trainer_waits: float  # share of the time
    steps: int
    periods: int  # whole periods of checkpoints that these steps are; 0: the run was too short for one
    factors: Mapping[str, float]  # that the run found, by "kind role"
    learnt: Learnt | None  # None: no factor was found by then, or nothing is left to hold it against


def over_periods(rows: Sequence[Row], every: int) -> tuple[Sequence[Row], int]:
    """The last rows between which as many whole periods of checkpoints lie as there are, and how many; all rows and 0 where there
    is none. A step's checkpoint comes before its row is written: any `every` steps in a row have one between their rows."""
    periods = (len(rows) - 1) // every
    return (rows[-(periods * every + 1) :], periods) if periods > 0 else (rows, 0)


def compared(folder: Path, skip: int = SKIP) -> Compared:
    """What a run's folder says. SystemExit when it has too few steps or no plan."""
    config = load_config(folder / "config.toml").config
    store = open_store(folder / "events.db")
    try:
        stored = list(store.read())
    finally:
        store.close()
    events = [s.event for s in stored]
    plans = [e.solved for e in events if isinstance(e, PlanAdopted)]
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()][skip:] if file.exists() else []
    if not plans or len(rows) < 3:
        raise SystemExit(f"{folder}: {len(plans)} plans and {len(rows)} steps after the first {skip}: too few")
    learnt = _learnt(config, plans[0].plan, folder, rows, stored)
    rows, periods = over_periods(rows, config.trainer.checkpoint_every_steps)
    between = [b["time_unix_s"] - a["time_unix_s"] for a, b in itertools.pairwise(rows)]
    rows = rows[1:]  # the first one is where the first step begins
    prompt, response = _lengths(rows)
    changed = [e for e in events if isinstance(e, CalibrationChanged)]
    return Compared(
        planned=plans[0].prediction,
        at_lengths=_again(config, plans[0].plan, folder, prompt, response),
        step_s=statistics.fmean(between),
        step_median_s=statistics.median(between),
        turn_s=statistics.fmean(r["cycle_s"] + r["publish_s"] for r in rows),
        response_mean=response,
        prompt_mean=prompt,
        generated_tokens_per_s=statistics.fmean(r["generated_tokens_per_s"] for r in rows),
        trainer_waits=statistics.fmean(r["trainer_wait_share"] for r in rows),
        steps=len(rows),
        periods=periods,
        factors={f"{e.kind} {e.role}": e.factor for e in changed},
        learnt=learnt,
    )


def _lengths(rows: Sequence[Row]) -> tuple[float, float]:
    """Mean tokens of prompt and response."""
    response = statistics.fmean(r["response_tokens_mean"] for r in rows)
    return statistics.fmean(r["batch_tokens"] / r["samples"] for r in rows) - response, response


def _learnt(config: Config, plan: Plan, folder: Path, rows: Sequence[Row], stored: Sequence[Stored]) -> Learnt | None:
    after = round(len(rows) * LEARNT)
    known_at_s, later = rows[after]["time_unix_s"], rows[after:]
    factors = {
        (s.event.kind, s.event.role): s.event.factor
        for s in stored
        if isinstance(s.event, CalibrationChanged) and s.at_s <= known_at_s
    }
    kept, _ = over_periods(later, config.trainer.checkpoint_every_steps)
    if not factors or len(kept) < 3:
        return None
    predicted = _again(config, plan, folder, *_lengths(kept[1:]), factors)
    if predicted is None:
        return None
    seconds = kept[-1]["time_unix_s"] - kept[0]["time_unix_s"]
    return Learnt(
        after_steps=kept[0]["step"] + 1,
        step_s=predicted.step_s,
        measured_s=seconds / (len(kept) - 1),
        steps=len(kept) - 1,
    )


def _again(  # noqa: PLR0917 - one plan at one place
    config: Config, plan: Plan, folder: Path, prompt: float, response: float, factors: Factors = MappingProxyType({})
) -> Prediction | None:
    """The plan's prediction at other lengths, on devices of one machine that are as fast as `factors` say."""
    file = folder / NAME
    lengths = config.lengths.model_copy(
        update={
            "prompt_mean": min(prompt, config.lengths.prompt_max),
            "response_mean": min(response, config.lengths.response_max or config.sampling.max_new_tokens),
        }
    )
    kinds = {p.kind: _kind(config, p.kind) for p in plan.placements}
    cluster = Cluster(
        kinds=kinds,
        devices=tuple(Device(id=d, kind=p.kind, node="n0") for p in plan.placements for d in p.devices),
        same_kind=DEFAULT_LINK,
        cross_kind=DEFAULT_LINK,
    )
    problem = problem_from_config(
        config.model_copy(update={"lengths": lengths}),
        cluster,
        load_model_spec(config.model.path),
        calibration=load_calibration(file) if file.exists() else None,
    )
    scored = CostModel(corrected(problem, factors)).evaluate(plan)
    return None if scored is None else scored.prediction


def _kind(config: Config, name: str) -> DeviceKind:
    """A kind of the run's devices: of cards, or of their parts."""
    card, parts = whole_of(name)
    kind = kind_from_config(config, card)
    return kind if parts == 1 else kind.in_parts(parts)


def table(found: Compared) -> str:
    """Predicted and measured, one line a figure; off is predicted over measured, less one."""
    at = found.at_lengths

    def line(name: str, planned: float | None, there: float | None, measured: float | None) -> str:
        cells = [f"{x:10.4g}" if x is not None else f"{'-':>10}" for x in (planned, there, measured)]
        best = there if there is not None else planned
        off = f"{best / measured - 1:+8.1%}" if best is not None and measured else f"{'-':>8}"
        return f"{name:26} {' '.join(cells)} {off}"

    whole = f"{found.periods} whole periods of checkpoints" if found.periods else "no whole period of checkpoints"
    heads = f"{'':26} {'planned':>10} {'at lengths':>10} {'measured':>10} {'off':>8}"
    return "\n".join(
        [
            heads,
            line("step, s", found.planned.step_s, at and at.step_s, found.step_s),
            line("step, median, s", found.planned.step_s, at and at.step_s, found.step_median_s),
            line("trainer's turn, s", found.planned.train_s, at and at.train_s, found.turn_s),
            line("rollout alone, s", found.planned.rollout_s, at and at.rollout_s, None),
            f"lengths of the run: prompt {found.prompt_mean:.1f}, response {found.response_mean:.1f} tokens; {found.steps} steps, {whole}; "
            f"{found.generated_tokens_per_s:,.0f} tokens/s generated; the trainer waits {found.trainer_waits:.0%} of the time",
            "factors found by the run: " + (", ".join(f"{k} {v:.2f}" for k, v in found.factors.items()) or "none"),
            *([] if found.learnt is None else [_known(found.learnt)]),
        ]
    )


def _known(by: Learnt) -> str:
    """One line."""
    known = f"with those known after {by.after_steps} steps: {by.step_s:.4g} s"
    return f"{known}; the {by.steps} steps after that: {by.measured_s:.4g} s, {by.step_s / by.measured_s - 1:+.1%}"


def run_of(config: Path, steps: int, root: Path, calibration: Path | None, changed: Sequence[str]) -> tuple[Path, int]:
    """Make a run through the daemon; its folder, and 0 or the exit code with which this process was told to end meanwhile."""
    from tests.live import LiveRun

    run = LiveRun(root)
    run.root.mkdir(parents=True, exist_ok=True)
    if calibration is not None:
        shutil.copyfile(calibration, run.root / NAME)
    settings = [part for value in changed for part in ("--set", value)]
    told = 0
    try:
        run.start(config.resolve(), "--steps", steps, *settings)
        if code := followed(run, steps):
            raise SystemExit(f"the run ended with {code}:\n{run.log.read_text()[-3000:]}")
    except SystemExit as e:
        if not isinstance(e.code, int) or not list_runs(run.root):
            raise
        told = e.code
    finally:
        run.close()
    return Path(list_runs(run.root)[-1].folder), told


def followed(run: "LiveRun", steps: int, *, say_s: float = SAY_S) -> int:
    """Exit code of the run's daemon; how far it is goes to standard error."""
    began_s = time.monotonic()
    while (spent_s := time.monotonic() - began_s) < 300 + 60.0 * steps:
        try:
            return run.end(say_s)
        except subprocess.TimeoutExpired:
            made = len(run.metrics()) if list_runs(run.root) else 0
            print(f"{made} of {steps} steps after {spent_s + say_s:.0f} s", file=sys.stderr, flush=True)
    raise SystemExit(f"the run did not end within {spent_s:.0f} s:\n{run.log.read_text()[-3000:]}")


def main() -> int:
    """Compare, after a run where a configuration is given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predicted", description=__doc__)
    parser.add_argument("what", type=Path, help="folder of a run, or a configuration")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--skip", type=int, default=SKIP, help="steps that do not count")
    parser.add_argument("--calibration", type=Path, help="file of hexctl profile; default: none")
    parser.add_argument("--root", type=Path, help="where the run is made; default: a folder that goes afterwards")
    parser.add_argument("--set", nargs="*", default=[], help="KEY=VALUE for hexctl daemon")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    end_when_told()
    with tempfile.TemporaryDirectory(prefix="hexctl-predicted-") as made:
        folder, told = given.what, 0
        if not folder.is_dir():
            folder, told = run_of(given.what, given.steps, given.root or Path(made), given.calibration, given.set)
        found = compared(folder, given.skip)
    print(table(found))
    if given.json is not None:
        given.json.write_text(json.dumps(dataclasses.asdict(found), indent=1))
    return told


if __name__ == "__main__":
    sys.exit(main())
