"""A whole RL run in virtual time, over the same policies as the runtime. Pure; everything it says is simulated.

`simulate(problem, plan, options) -> SimulatedRun`. Names load on first use.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.sim.churn import Change, read_changes
    from runtime.sim.lengths import LengthModel
    from runtime.sim.options import CHURN_POLICIES, ChurnPolicy, Costs, Options, SimulatedRun
    from runtime.sim.report import simulate
    from runtime.sim.timeline import Timeline

__all__ = [
    "CHURN_POLICIES",
    "Change",
    "ChurnPolicy",
    "Costs",
    "LengthModel",
    "Options",
    "SimulatedRun",
    "Timeline",
    "read_changes",
    "simulate",
]


def __getattr__(name: str) -> object:
    home = {
        **dict.fromkeys(("Change", "read_changes"), "churn"),
        **dict.fromkeys(("CHURN_POLICIES", "ChurnPolicy", "Costs", "Options", "SimulatedRun"), "options"),
        "LengthModel": "lengths",
        "simulate": "report",
        "Timeline": "timeline",
    }
    if name not in home:
        raise AttributeError(f"module 'runtime.sim' has no attribute {name!r}")
    return getattr(importlib.import_module(f"runtime.sim.{home[name]}"), name)
