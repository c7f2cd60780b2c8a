"""`hexctl simulate`: a whole run in virtual time. Reads a configuration and nothing else: no daemon, no torch, no Ray."""

import gc
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hexctl.cli.commands.plan import problem_of
from hexctl.cli.exits import Exit, Progress, error
from hexctl.cli.main import COMMANDS
from hexctl.cli.options import answer, calibration_option, load, output_option, set_option, stdout_kept_pure, text_of
from hexctl.cli.render.plan import infeasible_text
from hexctl.cli.render.simulate import simulated_document, simulated_text
from hexctl.cli.solving import solve
from hexctl.cli.stopping import stop_after
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from planner.problem import Problem
    from runtime.sim import Change, LengthModel, Options, Timeline


@click.command(
    help=COMMANDS["simulate"][1]
    + " Needs no GPU; every figure is simulated.\n\nCONFIG is a file or the name of a shipped one."
)
@click.argument("config", metavar="CONFIG")
@click.option(
    "--steps", type=click.IntRange(min=1), default=100, show_default=True, help="Optimiser steps to simulate."
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the lengths; default: run.seed.")
@click.option("--scheduler", metavar="NAME", help="Another scheduler than planner.scheduler of the configuration.")
@click.option(
    "--trace", metavar="FILE", help="Machines that come and go: a table t_s,capacity or t_s,event,node[,factor]."
)
@click.option(
    "--policy",
    type=click.Choice(["elastic", "static", "checkpoint-restart"]),
    default="elastic",
    show_default=True,
    help="What becomes of a change: repair and migrate, wait for the device, or start again from a checkpoint.",
)
@click.option(
    "--lengths",
    metavar="SPEC",
    help="Response lengths: lognormal:MEAN,CV, exponential:MEAN, constant:MEAN, or a file with one length a line.",
)
@click.option(
    "--growth", type=float, default=0.0, metavar="SHARE", help="Answers grow by that share of the mean at each step."
)
@click.option("--timeline", metavar="FILE", help="Write a timeline that ui.perfetto.dev opens (Chrome trace JSON).")
@calibration_option
@set_option
@output_option
def simulate(
    *,
    config: str,
    steps: int,
    seed: int | None,
    scheduler: str | None,
    trace: str | None,
    policy: str,
    lengths: str | None,
    growth: float,
    timeline: str | None,
    calibration: str | None,
    settings: tuple[str, ...],
    output: str,
) -> int:
    from runtime.config.drift import drift_rule
    from runtime.sim import Options, Timeline
    from runtime.sim.physics import with_lengths

    loaded = load(config, settings)
    problem = problem_of(loaded.config, calibration)
    response = _lengths(lengths, growth, problem)
    options = Options(
        steps=steps,
        seed=loaded.config.run.seed if seed is None else seed,
        scheduler=scheduler or loaded.config.planner.scheduler,
        stale=loaded.config.algorithm.stale_policy,
        response=response,
        changes=_changes(trace, problem),
        churn_policy=policy,  # type: ignore[arg-type]
        drift=drift_rule(loaded.config),
    )
    drawn = Timeline(f"hexctl simulate {loaded.path.stem}, simulated") if timeline else None
    if response is not None:
        problem = with_lengths(problem, response)
    return _run(problem, options, drawn, timeline, output=output, name=loaded.config.run.name)


def _run(
    problem: "Problem", options: "Options", drawn: "Timeline | None", timeline: str | None, *, output: str, name: str
) -> int:
    from planner.solution import Infeasible
    from runtime.sim import simulate as run

    if timeline:
        Path(timeline).open("a").close()  # a file that cannot be written is told before the simulation, not after it
    progress, began = Progress(), time.monotonic()
    with stdout_kept_pure(), stop_after(float("inf")) as stop:
        plan = None
        if not options.changes:
            solution, _ = solve(problem, options.scheduler, should_stop=stop)
            if isinstance(solution, Infeasible):
                error(infeasible_text(solution), hint="change one of them in the configuration, or --set it to try")
                return Exit.INFEASIBLE
            plan = solution.plan

        def say(step: int, virtual_s: float) -> None:
            progress.tick(f"simulated: step {step} of {options.steps}, {virtual_s / 3600:,.2f} h of virtual time")

        gc.freeze()  # what is there by now stays to the end: nobody need look at it again and again
        try:
            found = run(problem, plan, options, timeline=drawn, should_stop=stop, on_progress=say)
        finally:
            progress.done()
    if timeline and drawn is not None:
        Path(timeline).write_text(json.dumps(drawn.document()))
    wall_s = time.monotonic() - began
    answer(output, simulated_document(found, name, wall_s), simulated_text(found, name, wall_s))
    if stop.interrupted:
        return Exit.INTERRUPTED
    return Exit.INFEASIBLE if found.ended.startswith("waits") else Exit.FINE


def _lengths(spec: str | None, growth: float, problem: "Problem") -> "LengthModel | None":
    """The response lengths of `--lengths` and `--growth`; None: what the configuration says."""
    from planner.record import replace
    from runtime.sim.lengths import LengthModel, from_workload, listed

    assumed = problem.workload.response
    if not math.isfinite(growth):
        raise ConfigError("not a share", where="--growth", got=growth, expected='a number such as "0.001"')
    if spec is None:
        return replace(from_workload(assumed), growth_per_step=growth) if growth else None
    family, colon, figures = spec.partition(":")
    if not colon:
        return listed(_listed(spec), growth_per_step=growth)
    try:
        numbers = [float(x) for x in figures.split(",")]
    except ValueError:
        numbers = []
    if family not in ("lognormal", "exponential", "constant") or len(numbers) != (2 if family == "lognormal" else 1):
        raise ConfigError(
            "not a length distribution",
            where="--lengths",
            got=spec,
            expected="lognormal:MEAN,CV, exponential:MEAN, constant:MEAN or a file",
        )
    if not 0 < numbers[0] <= assumed.max_tokens or not all(0 <= x < math.inf for x in numbers):
        raise ConfigError(
            "not lengths that can be drawn", where="--lengths", got=spec,
            expected=f"a mean above 0 and at most {assumed.max_tokens} (lengths.response_max), a cv of 0 or more",
        )  # fmt: skip
    return LengthModel(
        family=family,  # type: ignore[arg-type]
        mean_tokens=numbers[0],
        cv=numbers[1] if family == "lognormal" else 0.0,
        max_tokens=assumed.max_tokens,
        growth_per_step=growth,
    )


def _listed(path: str) -> list[int]:
    text = text_of(path, option="--lengths")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not lines:
        raise ConfigError("no lengths in it", where=path, expected="one length in tokens a line")
    for number, line in enumerate(lines, 1):
        if not line.isdecimal() or int(line) < 1:
            raise ConfigError(
                "not a length in tokens", where=f"{path}, length {number}", got=line, expected="1 or more"
            )
    return [int(line) for line in lines]


def _changes(trace: str | None, problem: "Problem") -> "tuple[Change, ...]":
    from runtime.sim import read_changes

    if trace is None:
        return ()
    nodes = tuple(dict.fromkeys(d.node for d in problem.cluster.devices))
    return read_changes(text_of(trace, option="--trace"), nodes, where=trace)
