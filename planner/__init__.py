"""The planner is a function: `solve(problem) -> Solution`. No clock, no input or output, no globals.

The names below load on first use, so that `planner.errors` or `planner.units` cost nobody a solver.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.api import solve
    from planner.catalogue import CATALOGUE, device_kind
    from planner.cost import CostModel
    from planner.desk import RentalDesk, rent
    from planner.judge import violations
    from planner.market import Market
    from planner.objectives import Deadline, PerDollar, Reach, WithinBudget
    from planner.problem import Budget, Capabilities, Problem
    from planner.rental import Rental
    from planner.robust import Robust, Scenario, solve_robust
    from planner.schedulers import SCHEDULERS
    from planner.solution import Conflict, Explanation, Feasible, Infeasible, Solution

__all__ = [
    "CATALOGUE",
    "SCHEDULERS",
    "Budget",
    "Capabilities",
    "Conflict",
    "CostModel",
    "Deadline",
    "Explanation",
    "Feasible",
    "Infeasible",
    "Market",
    "PerDollar",
    "Problem",
    "Reach",
    "Rental",
    "RentalDesk",
    "Robust",
    "Scenario",
    "Solution",
    "WithinBudget",
    "device_kind",
    "rent",
    "solve",
    "solve_robust",
    "violations",
]


def __getattr__(name: str) -> object:
    home = {
        "CATALOGUE": "catalogue",
        "SCHEDULERS": "schedulers",
        "CostModel": "cost",
        "device_kind": "catalogue",
        "solve": "api",
        "violations": "judge",
        "Market": "market",
        "Rental": "rental",
        **dict.fromkeys(("RentalDesk", "rent"), "desk"),
        **dict.fromkeys(("Deadline", "PerDollar", "Reach", "WithinBudget"), "objectives"),
        **dict.fromkeys(("Robust", "Scenario", "solve_robust"), "robust"),
        **dict.fromkeys(("Budget", "Capabilities", "Problem"), "problem"),
        **dict.fromkeys(("Conflict", "Explanation", "Feasible", "Infeasible", "Solution"), "solution"),
    }
    if name not in home:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    return getattr(importlib.import_module(f"planner.{home[name]}"), name)
