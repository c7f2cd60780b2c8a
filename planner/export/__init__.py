"""A plan as launch settings of systems that people run today. Pure: text out, nothing is written or started.

One module a target; each says which release its keys are from. A target expresses less than a plan can say: what
is lost is named in `Exported.notes`.
"""

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from planner.errors import UnknownName
from planner.export.exported import Exported
from planner.plan import Plan
from planner.problem import Problem
from planner.solution import Feasible

__all__ = ["EXPORTERS", "Exported", "export", "exporter"]

Exporter = Callable[[Feasible | Plan, Problem], Exported]

# target: module that exports to it; imported on use, so that naming the targets costs nobody a cost model
EXPORTERS: Mapping[str, str] = MappingProxyType(
    {
        "areal": "planner.export.areal",
        "openrlhf": "planner.export.openrlhf",
        "prime-rl": "planner.export.prime_rl",
        "verl": "planner.export.verl",
    }
)


def exporter(target: str) -> Exporter:
    """The exporter of that name; UnknownName where there is none."""
    if target not in EXPORTERS:
        raise UnknownName("no such export target", got=target, expected=", ".join(EXPORTERS))
    found: Exporter = importlib.import_module(EXPORTERS[target]).export
    return found


def export(target: str, plan: Feasible | Plan, problem: Problem) -> Exported:
    """The settings with which `target` comes nearest to the plan, and what they do not say of it.

    Raises UnknownName for an unknown target, InvalidInput for a plan without a trainer, without replicas or with
    devices that two placements share.
    """
    return exporter(target)(plan, problem)
