"""`hex` beside the baseline schedulers on random fleets, and how fast each scheduler gets to its plan. All modelled.

`python -m benchmarks.bench_baselines [FLEETS]` writes benchmarks/results.baselines.json (every fleet, every figure)
and benchmarks/results.baselines.svg (tokens/s over evaluations and seconds of search, all schedulers, one fleet of 64
GPUs). Fleets are drawn from a seed: 8 to 64 devices of one to four kinds of the catalogue in machines of 2, 4 or 8,
in one region; models of 0.5B to 14B where a plan exists. Schedulers that draw at random get a budget of
`EVALUATIONS`.
"""

import importlib.util
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import planner
from planner.catalogue import CATALOGUE
from planner.cluster import Cluster, Device, Link
from planner.cost.model import CostModel
from planner.model import load_model_spec
from planner.problem import Budget, Problem
from planner.schedulers import SCHEDULERS
from planner.search import Search
from planner.solution import Feasible
from planner.workload import Lengths, Workload

HERE = Path(__file__).resolve().parent
MODELS = HERE.parent / "configs" / "models"
JSON = HERE / "results.baselines.json"
SEED, FLEETS, EVALUATIONS = 20251128, 100, 400
SHAPES = ("qwen2.5-0.5b", "r1-distill-qwen-1.5b", "r1-distill-qwen-7b", "r1-distill-qwen-14b")
OTHERS = ("verl", "areal", "streamrl", "random", "deap")
KINDS = tuple(k for k in CATALOGUE.values() if not k.paced and k.name != "host-cpu")
INSIDE, ACROSS = Link(latency_s=2e-5, bytes_per_s=5e9), Link(latency_s=5e-5, bytes_per_s=1.5e9)


def fleet(rng: random.Random, devices: int) -> Cluster:
    """About that many devices of one to four kinds; every machine has one kind."""
    kinds = rng.sample(KINDS, rng.randint(1, 4))
    found: list[Device] = []
    while len(found) < devices:
        kind, size, node = rng.choice(kinds), rng.choice((2, 4, 8)), f"n{len(found)}"
        size = min(size, devices - len(found))
        found += [Device(id=f"{node}/gpu{i}", kind=kind.name, node=node, index=i) for i in range(size)]
    return Cluster(kinds={k.name: k for k in kinds}, devices=tuple(found), same_kind=INSIDE, cross_kind=ACROSS)


def problems(fleets: int) -> Sequence[Problem]:
    """The random problems: async GRPO, the largest model drawn for which `hex` has a plan."""
    rng = random.Random(SEED)
    models = [load_model_spec(MODELS / f"{n}.json") for n in SHAPES]
    out: list[Problem] = []
    while len(out) < fleets:
        mean = rng.choice((500, 2000, 6000))
        work = Workload(
            prompts_per_step=rng.choice((64, 256, 512)),
            responses_per_prompt=rng.choice((8, 16)),
            prompt=Lengths(mean_tokens=256, max_tokens=1024),
            response=Lengths(mean_tokens=mean, cv=rng.choice((0.3, 0.8)), max_tokens=mean * 5),
            eta=rng.choice((1, 4)),
        )
        cluster, size = fleet(rng, rng.randint(8, 64)), rng.randrange(len(models))
        for model in models[size::-1]:
            p = Problem(cluster=cluster, model=model, workload=work, seed=len(out))
            if isinstance(planner.solve(p, scheduler="hex", budget=Budget(evaluations=1)), Feasible):
                out.append(p)
                break
    return out


def installed() -> Sequence[str]:
    """The baselines that can run here."""
    return [s for s in OTHERS if s != "deap" or importlib.util.find_spec("deap") is not None]


def _offered(p: Problem, name: str, budget: Budget) -> float | None:
    """tokens/s of the best plan a scheduler offers, None where it offers none. `hex` is asked as users ask it; the others
    directly, since `solve` answers with a plan found otherwise where a scheduler has none."""
    if name == "hex":
        found = planner.solve(p, scheduler=name, budget=budget)
        return found.prediction.tokens_per_s if isinstance(found, Feasible) else None
    search = Search(CostModel(p), budget)
    SCHEDULERS[name](search)
    return None if search.best is None else search.best.prediction.tokens_per_s


def compare(fleets: int, evaluations: int = EVALUATIONS) -> list[dict[str, Any]]:
    """One row a fleet: what it is, and tokens/s (None: no plan) and seconds by scheduler."""
    rows: list[dict[str, Any]] = []
    for i, p in enumerate(problems(fleets)):
        kinds = [d.kind for d in p.cluster.devices]
        row: dict[str, Any] = {
            "fleet": {k: kinds.count(k) for k in dict.fromkeys(kinds)},
            "model": p.model.name,
            "tokens_per_s": {},
            "seconds": {},
        }
        for name in ("hex", *installed()):
            started = time.perf_counter()
            found = _offered(p, name, Budget(evaluations=evaluations))
            row["seconds"][name] = round(time.perf_counter() - started, 3)
            row["tokens_per_s"][name] = found
        rows.append(row)
        print(f"fleet {i + 1}/{fleets}: {row}", file=sys.stderr)
    return rows


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """hex / baseline in tokens/s by scheduler; `worst` is hex's worst, below 1 where it is beaten."""
    out: dict[str, dict[str, float]] = {}
    for name in installed():
        pairs = [(r["tokens_per_s"]["hex"], r["tokens_per_s"][name]) for r in rows]
        found = sorted(ours / other for ours, other in pairs if ours and other)
        if found:
            out[name] = {
                "median": statistics.median(found),
                "p10": found[round(0.1 * (len(found) - 1))],
                "p90": found[round(0.9 * (len(found) - 1))],
                "worst": found[0],
                "fleets": float(len(found)),
                "no_plan": float(sum(other is None for _, other in pairs)),
                "median_s": statistics.median(r["seconds"][name] for r in rows),
            }
    return out


def efficiency(evaluations: int = 5 * EVALUATIONS, gpus: int = 64) -> dict[str, list[tuple[int, float, float]]]:
    """(evaluations, seconds, tokens/s) at every incumbent of every scheduler; a quarter H800, half H20, the rest A100."""
    names = ("H800",) * (gpus // 4) + ("H20",) * (gpus // 2) + ("A100-80",) * (gpus // 4)
    devices = tuple(Device(id=f"d{i}", kind=k, node=f"n{i // 8}", index=i % 8) for i, k in enumerate(names))
    kinds = {k: CATALOGUE[k] for k in names}
    p = Problem(
        cluster=Cluster(kinds=kinds, devices=devices, same_kind=INSIDE, cross_kind=ACROSS),
        model=load_model_spec(MODELS / "r1-distill-qwen-7b.json"),
        workload=Workload(
            prompts_per_step=512,
            responses_per_prompt=16,
            prompt=Lengths(mean_tokens=256, max_tokens=1024),
            response=Lengths(mean_tokens=4000, cv=0.8, max_tokens=27648),
        ),
    )
    out: dict[str, list[tuple[int, float, float]]] = {}
    for name in SCHEDULERS:
        if name == "exhaustive" or (name in OTHERS and name not in installed()):
            continue
        seen: list[tuple[int, float, float]] = []
        started = time.perf_counter()

        def note(x: Feasible, seen: list[tuple[int, float, float]] = seen, started: float = started) -> None:
            seen.append((x.evaluations, round(time.perf_counter() - started, 3), x.prediction.tokens_per_s))

        found = planner.solve(p, scheduler=name, budget=Budget(evaluations=evaluations), on_incumbent=note)
        if isinstance(found, Feasible):
            note(found)
        out[name] = seen
    return out


COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#edae49", "#6c4ab6", "#00798c", "#8d6a4f", "#555555", "#c060a0")


def drawn(record: Mapping[str, Sequence[tuple[int, float, float]]]) -> str:
    """tokens/s over evaluations and over seconds, both logarithmic, as an SVG of steps; one colour a scheduler."""
    top = max(y for points in record.values() for *_, y in points) * 1.05
    parts = [
        *_panel({n: [(float(e), y) for e, _, y in ps] for n, ps in record.items()}, 60, 1.0, "evaluations", top),
        *_panel({n: [(s, y) for _, s, y in ps] for n, ps in record.items()}, 480, 0.01, "s of search", top),
    ]
    for i, name in enumerate(record):
        parts.append(f'<text x="870" y="{40 + 18 * i}" fill="{COLOURS[i % len(COLOURS)]}">{name}</text>')
    parts.append(f'<text x="60" y="20">modelled tokens/s, up to {top / 1.05:,.0f}</text>')
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 360" font-family="sans-serif" font-size="13">'
        + f'<rect width="960" height="360" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _panel(
    record: Mapping[str, Sequence[tuple[float, float]]], left: int, first: float, unit: str, top: float
) -> list[str]:
    """Axes and steps of one panel, 360 wide; the axis begins at `first`."""
    last = max(2 * first, *(x for points in record.values() for x, _ in points))

    def at(x: float, rate: float) -> str:
        along = left + 360 * math.log10(max(x, first) / first) / math.log10(last / first)
        return f"{along:.1f},{330 - 300 * rate / top:.1f}"

    out = [
        f'<path d="M{left} 30V330H{left + 360}" fill="none" stroke="#888"/>',
        f'<text x="{left}" y="350">{first:g}</text>',
        f'<text x="{left + 360}" y="350" text-anchor="end">{last:,.0f} {unit} (log)</text>',
    ]
    for i, points in enumerate(record.values()):
        steps: list[str] = []
        for (_, before), (x, y) in zip([(0.0, points[0][1]), *points], points, strict=False):
            steps += [at(x, before), at(x, y)]
        steps.append(at(last, points[-1][1]))
        colour = COLOURS[i % len(COLOURS)]
        out.append(f'<polyline points="{" ".join(steps)}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return out


def run(fleets: int = FLEETS, evaluations: int = EVALUATIONS, to: Path = JSON, gpus: int = 64) -> dict[str, float]:
    """Compare, record, write; the ratios."""
    rows = compare(fleets, evaluations)
    table, record = ratios(rows), efficiency(5 * evaluations, gpus)
    machine = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    report = {"machine": machine, "modelled": True, "ratios": table, "efficiency": record, "fleets": rows}
    to.write_text(json.dumps(report, indent=1) + "\n")
    to.with_suffix(".svg").write_text(drawn(record))
    return {f"hex_over_{name}.{key}": value for name, found in table.items() for key, value in found.items()}


if __name__ == "__main__":
    for key, value in run(int(sys.argv[1]) if len(sys.argv) > 1 else FLEETS).items():
        print(f"{key:32} {value:10.3f}")
