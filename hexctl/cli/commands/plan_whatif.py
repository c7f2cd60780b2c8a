"""`hexctl plan --what-if` and `--explain`: the same problem solved again with something changed."""

import time
from collections.abc import Callable
from typing import Any

from hexctl.cli.exits import Exit, error
from hexctl.cli.options import answer, stdout_kept_pure
from hexctl.cli.render.plan import (
    explanation_document,
    explanation_text,
    infeasible_text,
    plan_document,
    plan_text,
    what_if_document,
    what_if_text,
)
from hexctl.cli.solving import solve as search
from hexctl.cli.stopping import Stop
from planner.problem import Budget, Problem
from planner.solution import Infeasible, Solution

Timed = Callable[[Problem], tuple[Solution, float]]

_EACH_S = 5.0  # of a re-solve, at most
_EACH = Budget(evaluations=40, mip_seconds=1.0)


def answer_what_if(problem: Problem, changes: str, solve: Timed, output: str) -> int:
    """Figures before and after, and what the difference is worth."""
    from planner.whatif import parse, what_if

    with stdout_kept_pure():
        found = what_if(problem, parse(changes), lambda p: solve(p)[0])
    answer(output, what_if_document(found), what_if_text(found))
    return Exit.INFEASIBLE if isinstance(found.after, Infeasible) else Exit.FINE


def answer_explained(problem: Problem, solve: Timed, output: str, stop: Stop) -> int:
    """The plan, what holds it back and what single changes would give: all of the re-solves together take as long as a plan may."""
    from planner.sensitivity import actions, held_back_by

    with stdout_kept_pure():
        solution, solve_s = solve(problem)
        if not isinstance(solution, Infeasible):
            stop.again()
            pressures = held_back_by(problem, solution.plan)
            # A throughput plan is asked what it could gain; what to rent is another question.
            told = actions(problem, solution, lambda p: _again(p, stop), should_stop=stop)
    document = plan_document(solution, solve_s)
    if isinstance(solution, Infeasible):
        return answer_infeasible(solution, document, output)
    text = plan_text(solution, solve_s) + "\n\n" + explanation_text(pressures, told)
    answer(output, {**document, **explanation_document(pressures, told)}, text)
    return Exit.FINE


def answer_infeasible(solution: Infeasible, document: dict[str, Any], output: str) -> int:
    """No plan: the limits that cannot hold together on stderr, the document where one was asked for."""
    if output == "json":
        answer(output, document, "")
    error(infeasible_text(solution), hint="change one of them in the configuration, or --set it to try")
    return Exit.INFEASIBLE


def _again(problem: Problem, stop: Stop) -> Solution:
    end = time.monotonic() + _EACH_S
    return search(problem, "hex", budget=_EACH, should_stop=lambda: stop() or time.monotonic() > end)[0]
