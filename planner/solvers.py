"""One place that runs a MILP: HiGHS where `highspy` is installed, else the CBC that PuLP brings.

Nothing is written to standard output, every run has a time limit, and the answer says what is known: an incumbent at a
time-out is not called optimal, and a bound is given only where the solver tells one (docs/decisions/0011).
"""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import pulp

from planner.errors import UnknownName
from planner.record import record

SolverName = Literal["highs", "cbc"]
Status = Literal["optimal", "feasible", "infeasible", "unknown"]

_TOLERANCE = 1e-9  # of rows and integrality; the solvers' own 1e-6 is as coarse as the optima we compare


@record
class Answer:
    """What a solver says of a model. `bound` is proven: no solution is better; None where the solver does not tell."""

    status: Status
    values: Mapping[str, float]  # of the incumbent, by variable name; empty where there is none
    objective: float | None
    bound: float | None
    solver: SolverName


def available() -> tuple[SolverName, ...]:
    """The solvers that can run here, the preferred one first."""
    return ("highs", "cbc") if find_spec("highspy") is not None else ("cbc",)


def run(
    model: "pulp.LpProblem", *, time_limit_s: float, solver: SolverName | None = None, relative_gap: float = 0.0
) -> Answer:
    """Solve `model` within `time_limit_s` seconds, to `relative_gap` of its optimum.

    Raises UnknownName for a solver that is not available.
    """
    able = available()
    name = solver or able[0]
    if name not in able:
        raise UnknownName("no such MILP solver here", got=name, expected=", ".join(able))
    return (_highs if name == "highs" else _cbc)(model, time_limit_s, relative_gap)


def _highs(model: "pulp.LpProblem", time_limit_s: float, relative_gap: float) -> Answer:
    model.solve(_silent_highs(time_limit_s, relative_gap))
    info = model.solverModel.getInfo()
    sign = -1.0 if model.sense == pulp.LpMaximize else 1.0  # PuLP hands HiGHS a minimisation
    whole = any(v.cat == pulp.LpInteger for v in model.variables())
    if model.sol_status == pulp.LpSolutionInfeasible:
        return _nothing("infeasible", "highs")
    told = info.mip_dual_bound if whole else info.objective_function_value
    bound = sign * told + (model.objective.constant or 0.0) if abs(told) < 1e30 else None
    if info.primal_solution_status != 2:  # kSolutionStatusFeasible
        return Answer(status="unknown", values={}, objective=None, bound=bound if whole else None, solver="highs")
    optimal = model.sol_status == pulp.LpSolutionOptimal
    return _found(model, "optimal" if optimal else "feasible", bound if whole or optimal else None, "highs")


def _silent_highs(time_limit_s: float, relative_gap: float) -> Any:
    """PuLP's adapter around a HiGHS that is silent from its first moment.

    HiGHS writes to file descriptor 1 behind Python's back: its constructor prints a banner when it installs callbacks,
    before `msg=False` can tell it not to.
    """
    highspy: Any = import_module("highspy")

    class Silent(highspy.Highs):  # type: ignore[misc]
        def enableCallbacks(self) -> None:
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    class Adapter(pulp.HiGHS):  # type: ignore[misc]
        def createAndConfigureSolver(self, lp: Any) -> None:
            lp.solverModel = Silent()
            options = {
                "output_flag": False,
                "time_limit": float(time_limit_s),
                "mip_rel_gap": relative_gap,
                "mip_abs_gap": 0.0,
                "threads": 1,  # the same answer whatever the machine
                "primal_feasibility_tolerance": _TOLERANCE,
                "mip_feasibility_tolerance": _TOLERANCE,
            }
            for option, value in options.items():
                lp.solverModel.setOptionValue(option, value)

    return Adapter(msg=False, timeLimit=time_limit_s)


def _cbc(model: "pulp.LpProblem", time_limit_s: float, relative_gap: float) -> Answer:
    solver = pulp.COIN_CMD(
        path=pulp.PULP_CBC_CMD.pulp_cbc_path,
        msg=False,
        timeLimit=time_limit_s,
        gapRel=relative_gap,
        gapAbs=0.0,
        options=[f"primalT {_TOLERANCE}", f"integerT {_TOLERANCE}"],
    )
    model.solve(solver)
    if model.sol_status == pulp.LpSolutionInfeasible:
        return _nothing("infeasible", "cbc")
    if model.sol_status == pulp.LpSolutionOptimal:
        # CBC's answer file has no bound; within the gap asked for, the optimum is the incumbent.
        known = pulp.value(model.objective) if relative_gap == 0 else None
        return _found(model, "optimal", known, "cbc")
    if model.sol_status == pulp.LpSolutionIntegerFeasible:
        return _found(model, "feasible", None, "cbc")
    return _nothing("unknown", "cbc")


def _nothing(status: Status, solver: SolverName) -> Answer:
    return Answer(status=status, values={}, objective=None, bound=None, solver=solver)


def _found(model: "pulp.LpProblem", status: Status, bound: float | None, solver: SolverName) -> Answer:
    variables: list[Any] = model.variables()
    values = {v.name: float(v.varValue or 0.0) for v in variables}
    return Answer(status=status, values=values, objective=pulp.value(model.objective), bound=bound, solver=solver)
