"""Replay spot traces under the three churn policies, in simulation: `python -m benchmarks.spot_traces FOLDER [--write FILE]`.

FOLDER holds `t_s,capacity` and `t_s,event,node` tables of real fleets. Each machine has one GPU; the fleet has as many places
as the trace ever has machines at once, and a machine that comes takes the first free place. A replay begins when the trace
first reaches its median capacity (before, there is no plan to keep) and lasts to its end. Where a trace is there in both
forms, the events are replayed. Everything is simulated: rates are the cost model's, what changes cost are the assumptions of
`runtime.sim.options.Costs`.
"""

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Collection
from pathlib import Path

import planner
from planner.catalogue import CATALOGUE
from planner.cluster import Cluster, Device, Link
from planner.model import load_model_spec
from planner.problem import Budget, Capabilities, Problem
from planner.record import record, replace
from planner.solution import Feasible
from planner.workload import Lengths, Workload
from runtime.sim import Change, ChurnPolicy, Costs, Options, SimulatedRun, simulate

MODELS = Path(__file__).resolve().parents[1] / "configs" / "models"
ETHERNET = Link(latency_s=1e-4, bytes_per_s=1.25e9)  # 10 Gbit/s, what one-GPU instances get
SEED = 20251128
BUDGET = Budget(evaluations=60, mip_seconds=1.0)
POLICIES: tuple[tuple[str, ChurnPolicy, Costs], ...] = (
    ("elastic", "elastic", Costs()),
    ("checkpoint-restart", "checkpoint-restart", Costs()),
    (
        "checkpoint-restart, joins ignored, checkpoint each step",
        "checkpoint-restart",
        Costs(restart_on_join=False, checkpoint_steps=1),
    ),
    ("static", "static", Costs()),
)


@record
class Trace:
    """Machines there over time: the first `initial` of `places` at 0, and changes after."""

    name: str
    places: int
    initial: int
    changes: tuple[Change, ...]
    capacity: tuple[tuple[float, int], ...]  # from each time on
    lasts_s: float
    largest_loss: int


def read_trace(path: Path) -> Trace:
    """A trace from its median capacity on, machines in places."""
    rows = list(csv.DictReader(path.read_text().splitlines()))
    moves = _moves(rows)
    steps: list[tuple[float, int]] = []
    for at_s, came, gone in moves:
        now = (steps[-1][1] if steps else 0) + len(came) - len(gone)
        steps.append((at_s, now))
    whole = path.with_name(path.name.replace("_events", ""))  # says until when nothing more happened
    last = (
        max(steps[-1][0], *(float(r["t_s"]) for r in csv.DictReader(whole.read_text().splitlines())))
        if whole.exists()
        else steps[-1][0]
    )
    spans = [
        (end - begin, c) for (begin, c), (end, _) in zip(steps, [*steps[1:], (last, 0)], strict=True) if end > begin
    ]
    median = statistics.median(c for span, c in spans for _ in range(max(1, round(span / 60))))
    begin = next(i for i, (_, c) in enumerate(steps) if c >= median)
    return _placed(path.stem, moves, begin, last)


def _moves(rows: list[dict[str, str]]) -> list[tuple[float, list[str], list[str]]]:
    """(time, machines that came, machines that went), one entry a moment."""
    out: dict[float, tuple[list[str], list[str]]] = {}
    if "capacity" in rows[0]:
        standing: list[str] = []
        serial = 0
        for r in rows:
            wanted, (came, gone) = int(r["capacity"]), out.setdefault(float(r["t_s"]), ([], []))
            while len(standing) < wanted:
                standing.append(f"m{serial}")
                came.append(standing[-1])
                serial += 1
            while len(standing) > wanted:
                gone.append(standing.pop(0))  # the oldest: the trace does not say which
    else:
        for r in rows:
            came, gone = out.setdefault(float(r["t_s"]), ([], []))
            (came if r["event"] == "add" else gone).append(r["node"])
    return [(t, *out[t]) for t in sorted(out)]


def _placed(name: str, moves: list[tuple[float, list[str], list[str]]], begin: int, last: float) -> Trace:
    place: dict[str, int] = {}
    free: list[int] = []
    places, initial = 0, 0
    began = moves[begin][0]
    changes: list[Change] = []
    capacity: list[tuple[float, int]] = []
    largest = 0
    for i, (at_s, came, gone) in enumerate(moves):
        left = sorted(place.pop(m) for m in gone if m in place)
        free = sorted(free + left)
        taken = []
        for m in came:
            if not free:
                free.append(places)
                places += 1
            place[m] = free.pop(0)
            taken.append(place[m])
        if i == begin:
            # Places are numbered anew, so that those there at the start are the first ones.
            order = {old: new for new, old in enumerate(sorted(place.values()))}
            spare = {old: len(order) + k for k, old in enumerate(sorted(free))}
            place = {m: order[p] for m, p in place.items()}
            free, initial = sorted(spare.values()), len(order)
            capacity.append((0.0, initial))
        elif i > begin:
            both = set(left) & set(taken)  # a machine replaced at once is a loss and a join
            largest = max(largest, len(left))
            if left:
                changes.append(Change(at_s=at_s - began, event="remove", nodes=tuple(f"n{p}" for p in left)))
            if taken:
                late = 1e-3 if both else 0.0
                changes.append(Change(at_s=at_s - began + late, event="add", nodes=tuple(f"n{p}" for p in taken)))
            capacity.append((at_s - began, len(place)))
    return Trace(
        name=name, places=places, initial=initial, changes=tuple(changes), capacity=tuple(capacity),
        lasts_s=last - began, largest_loss=largest,
    )  # fmt: skip


def problem_of(trace: Trace) -> Problem:
    """A small model on one-GPU machines: T4 where the trace's name says g4dn, else V100."""
    kind = "T4" if "g4dn" in trace.name else "V100-16"
    return Problem(
        cluster=Cluster(
            kinds={kind: CATALOGUE[kind]},
            devices=tuple(Device(id=f"n{i}/gpu0", kind=kind, node=f"n{i}") for i in range(trace.places)),
            same_kind=ETHERNET,
            cross_kind=ETHERNET,
        ),
        model=load_model_spec(MODELS / "qwen2.5-0.5b.json"),
        workload=Workload(
            prompts_per_step=128,
            responses_per_prompt=16,
            prompt=Lengths(mean_tokens=128, max_tokens=512),
            response=Lengths(mean_tokens=1024, cv=0.8, max_tokens=4096),
            eta=4,
            proximal_forward=True,
        ),
        capabilities=Capabilities(trainer="fsdp", rollout_max_tp=1, rollout_max_pp=1, train_max_tp=1, train_max_pp=1),
        seed=SEED,
    )


class Ideal:
    """What a planner that is always right and changes that cost nothing would predict, by capacity."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._known: dict[int, float] = {}

    def tokens_per_s(self, machines: int) -> float:
        """The predicted rate of the plan for that many machines; 0 where there is none."""
        if machines not in self._known:
            devices = self._problem.cluster.devices[:machines]
            fewer = replace(self._problem, cluster=replace(self._problem.cluster, devices=devices))
            found = planner.solve(fewer, budget=BUDGET) if devices else None
            self._known[machines] = found.prediction.tokens_per_s if isinstance(found, Feasible) else 0.0
        return self._known[machines]

    def tokens(self, trace: Trace) -> float:
        """Over the whole trace."""
        ends = [*(t for t, _ in trace.capacity[1:]), trace.lasts_s]
        return sum((end - t) * self.tokens_per_s(c) for (t, c), end in zip(trace.capacity, ends, strict=True))


def replay(trace: Trace, name: str, policy: ChurnPolicy, costs: Costs) -> SimulatedRun:
    """One trace under one policy."""
    away = tuple(f"n{i}" for i in range(trace.initial, trace.places))
    first = (Change(at_s=0.0, event="remove", nodes=away),) if away else ()
    problem = problem_of(trace)
    plan = None
    if policy == "static":  # made for the machines there at the start; it keeps its places
        devices = problem.cluster.devices[: trace.initial]
        fewer = replace(problem, cluster=replace(problem.cluster, devices=devices))
        found = planner.solve(fewer, budget=BUDGET)
        plan = found.plan if isinstance(found, Feasible) else None
    options = Options(
        steps=None, until_s=trace.lasts_s, seed=SEED, budget=BUDGET, changes=(*first, *trace.changes),
        churn_policy=policy, costs=costs,
    )  # fmt: skip
    started = time.perf_counter()
    run = simulate(problem, plan, options)
    print(
        f"{trace.name} {name}: {run.tokens_per_s:,.0f} tokens/s, {time.perf_counter() - started:.1f} s", file=sys.stderr
    )
    return run


def table(folder: Path, only: Collection[str] = ()) -> str:
    """All traces of a folder as a markdown table; `only`: the policies to replay, all without."""
    paths = sorted(folder.glob("*.csv"))
    chosen = [p for p in paths if p.stem.endswith("_events") or not p.with_name(f"{p.stem}_events.csv").exists()]
    lines = [
        "| trace | machines | hours | changes | largest loss | policy | tokens/s | of ideal | $/Mtok | trainer works | redone | wasted |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for path in chosen:
        trace = read_trace(path)
        ideal = Ideal(problem_of(trace)).tokens(trace)
        sizes = [c for _, c in trace.capacity]
        for name, policy, costs in (p for p in POLICIES if not only or p[0] in only):
            run = replay(trace, name, policy, costs)
            done = run.trained_tokens + run.masked_tokens
            at_work = run.trainer_s["training"] / run.time_s if run.time_s else 0.0
            wasted = sum(run.wasted_tokens.values())
            lines.append(
                f"| {trace.name.removesuffix('_events')} | {min(sizes)}-{max(sizes)} | {trace.lasts_s / 3600:.1f} "
                f"| {len(trace.changes)} | {trace.largest_loss} | {name} | {run.tokens_per_s:,.0f} "
                f"| {done / ideal if ideal else 0:.2f} | {'-' if run.usd_per_mtok is None else f'{run.usd_per_mtok:.2f}'} "
                f"| {100 * at_work:.0f} % | {100 * run.redone_tokens / max(1, run.generated_tokens):.2f} % "
                f"| {100 * wasted / max(1, run.generated_tokens):.1f} % |"
            )
    return "\n".join(lines) + "\n"


def with_table(page: str, rows: str) -> str:
    """The page with these rows in place of its first table, or after what it says where it has none."""
    lines = page.splitlines(keepends=True)
    begin = next((i for i, line in enumerate(lines) if line.startswith("|")), None)
    if begin is None:
        return page + rows
    end = next((i for i in range(begin, len(lines)) if not lines[i].startswith("|")), len(lines))
    return "".join(lines[:begin]) + rows + "".join(lines[end:])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spot_traces", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", type=Path, help="put the table there too, in place of the one it has")
    parser.add_argument("--policy", action="append", default=[], choices=[p[0] for p in POLICIES], help="default: all")
    given = parser.parse_args()
    text = table(given.folder, given.policy)
    print(text)
    if given.write is not None:
        page = given.write.read_text() if given.write.exists() else ""
        given.write.write_text(with_table(page, text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
