"""Plans of many problems: each solved once, side by side, remembered in a file for as long as the planner stays as it is."""

import hashlib
import inspect
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.papers.fleets import FIRST_PRINCIPLES
from planner.bound import upper_bound
from planner.cost.assumptions import Assumptions
from planner.cost.model import CostModel
from planner.problem import Budget, Problem
from planner.record import record, replace
from planner.schedulers import SCHEDULERS
from planner.search import Search

PLANNER = Path(__file__).resolve().parents[2] / "planner"
EVALUATIONS: Mapping[str, int] = {"hex": 200, "hetrl": 200}  # others: the planner's own budget
EVERY_S = 20.0  # between two lines of progress


@record
class Ask:
    """One plan wanted."""

    problem: Problem
    scheduler: str = "hex"
    assumptions: Assumptions = FIRST_PRINCIPLES

    @property
    def key(self) -> str:
        """Equal for equal questions."""
        return hashlib.sha256(repr((self.problem, self.scheduler, self.assumptions)).encode()).hexdigest()[:24]


@record
class Outcome:
    """What the best plan found comes to. Modelled, not measured."""

    tokens_per_s: float
    step_s: float
    train_s: float
    rollout_s: float
    update_s: float
    even_tokens_per_s: float | None  # the same plan with equal shares for all replicas
    train: dict[str, int]  # devices by kind that do anything but generate
    rollout: dict[str, int]  # devices by kind that generate
    gap: float | None = None  # below the proven bound; None: of a scheduler that was not asked for one


def solve(ask: Ask) -> Outcome | None:
    """The best plan of a scheduler itself; None where it offers none. (`planner.solve` would add a plan found otherwise where the
    scheduler has none, and takes no assumptions.) As there, `hex` goes on from where the proof of the bound stopped."""
    budget = Budget(evaluations=EVALUATIONS.get(ask.scheduler, Budget().evaluations))
    search = Search(CostModel(ask.problem, ask.assumptions), budget)
    bound = upper_bound(search.cost, lambda: False) if ask.scheduler == "hex" else None
    SCHEDULERS[ask.scheduler](search)
    if search.best is None:
        return None
    p, plan = search.best.prediction, search.best.plan
    even = search.cost.evaluate(replace(plan, even_shares=True))
    sides: dict[str, dict[str, int]] = {"train": {}, "rollout": {}}
    for placement in plan.placements:
        side = sides["rollout" if placement.role == "rollout" else "train"]
        for d in placement.devices:
            kind = search.cost.places[d].kind
            side[kind] = side.get(kind, 0) + 1
    return Outcome(
        tokens_per_s=p.tokens_per_s,
        step_s=p.step_s,
        train_s=p.train_s,
        rollout_s=p.rollout_s,
        update_s=p.update_s,
        even_tokens_per_s=None if even is None else even.prediction.tokens_per_s,
        train=sides["train"],
        rollout=sides["rollout"],
        gap=None if bound is None else max(0.0, 1 - p.tokens_per_s / bound.tokens_per_s),
    )


class Solves:
    """Questions and their answers."""

    def __init__(self, *, jobs: int = 1, cache: Path | None = None) -> None:
        self._jobs, self._cache = jobs, cache
        self._known: dict[str, Outcome | None] = {}
        self.digest = planner_digest()
        if cache is not None and cache.is_file():
            kept = json.loads(cache.read_text())
            if kept["planner"] == self.digest:
                self._known = {k: None if v is None else Outcome(**v) for k, v in kept["outcomes"].items()}

    def prepare(self, asks: Iterable[Ask]) -> None:
        """Find all answers that are not known yet, with progress on stderr."""
        todo = {key: a for a in asks if (key := a.key) not in self._known}
        if not todo:
            return
        started = said = time.monotonic()
        with ProcessPoolExecutor(self._jobs) as pool:
            futures = {pool.submit(solve, a): key for key, a in todo.items()}
            for done, future in enumerate(as_completed(futures), start=1):
                self._known[futures[future]] = future.result()
                now = time.monotonic()
                if now - said > EVERY_S or done == len(todo):
                    said = now
                    print(f"  {done}/{len(todo)} plans, {now - started:.0f} s", file=sys.stderr, flush=True)
                    self._save()

    def remember(self, ask: Ask, outcome: Outcome | None) -> None:
        """Take an answer as given."""
        self._known[ask.key] = outcome

    def of(self, ask: Ask) -> Outcome | None:
        """The answer, found now where it was not prepared."""
        key = ask.key
        if key not in self._known:
            self._known[key] = solve(ask)
        return self._known[key]

    def _save(self) -> None:
        if self._cache is not None:
            kept: dict[str, Any] = {"planner": self.digest, "outcomes": {}}
            for key, o in self._known.items():
                kept["outcomes"][key] = None if o is None else {f: getattr(o, f) for f in Outcome.__slots__}  # type: ignore[attr-defined]
            part = self._cache.with_suffix(".part")
            part.write_text(json.dumps(kept))
            os.replace(part, self._cache)


def planner_digest() -> str:
    """Of every source and table of the planner, and of how it is asked here: another digest, other answers."""
    found = hashlib.sha256(f"{dict(EVALUATIONS)} {inspect.getsource(solve)}".encode())
    for path in sorted(p for p in PLANNER.rglob("*") if p.suffix in (".py", ".json", ".csv")):
        found.update(path.read_bytes())
    return found.hexdigest()
