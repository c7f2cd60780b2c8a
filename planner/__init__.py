"""The planner is a function: `solve(problem) -> Solution`. No clock, no input or output, no globals.

The names below load on first use, so that `planner.errors` or `planner.units` cost nobody a solver.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.api import solve
    from planner.catalogue import CATALOGUE, device_kind
    from planner.cost import CostModel
    from planner.judge import violations
    from planner.problem import Budget, Capabilities, Problem
    from planner.schedulers import SCHEDULERS
    from planner.solution import Conflict, Explanation, Feasible, Infeasible, Solution

__all__ = [
    "CATALOGUE",
    "SCHEDULERS",
    "Budget",
    "Capabilities",
    "Conflict",
    "CostModel",
    "Explanation",
    "Feasible",
    "Infeasible",
    "Problem",
    "Solution",
    "device_kind",
    "solve",
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
        **dict.fromkeys(("Budget", "Capabilities", "Problem"), "problem"),
        **dict.fromkeys(("Conflict", "Explanation", "Feasible", "Infeasible", "Solution"), "solution"),
    }
    if name not in home:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    return getattr(importlib.import_module(f"planner.{home[name]}"), name)
