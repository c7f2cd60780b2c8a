"""The planner process: real children, polled without waiting, killed at their deadline."""

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from simworld import LOAD, SHAPE, cluster, toy_solve

import planner
from planner.problem import Capabilities, Problem
from planner.solution import Feasible
from runtime.planning.process import PlanningProcess, PlanningResult


def problem(count: int = 4) -> Problem:
    return Problem(cluster=cluster(count), model=SHAPE, workload=LOAD, capabilities=Capabilities.single_device_roles())


def wait(process: PlanningProcess, seconds: float = 60.0) -> PlanningResult:
    """Poll until there is a result, waiting on the pipe in between."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        result = process.poll()
        if result is not None:
            return result
        if process._pipe is not None:
            select.select([process._pipe.fileno()], [], [], 0.1)
    raise AssertionError("no result")


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_the_answer_is_that_of_the_function() -> None:
    process = PlanningProcess(solve_s=30)
    process.start(problem(), "areal-hex")
    pid = process.pid
    assert pid is not None
    result = wait(process)
    here = planner.solve(problem(), scheduler="areal-hex")
    assert isinstance(result.solution, Feasible)
    assert isinstance(here, Feasible)
    assert result.solution.plan == here.plan
    assert (result.error, process.busy) == ("", False)
    assert 0 < result.solve_s < 60
    assert gone(pid)


def test_a_scheduler_nobody_knows_is_an_error_in_words() -> None:
    process = PlanningProcess(solve_s=30)
    process.start(problem(), "no-such")
    result = wait(process)
    assert result.solution is None
    assert "no-such" in result.error


def test_cancel_kills_the_whole_group_and_another_can_start() -> None:
    process = PlanningProcess(solve_s=30)
    process.start(problem(), "areal-hex")
    first = process.pid
    process.start(problem(3), "areal-hex")
    assert first is not None
    assert gone(first)
    result = wait(process)
    assert isinstance(result.solution, Feasible)
    assert {d for p in result.solution.plan.placements for d in p.devices} <= {"d0", "d1", "d2"}


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


SLOW = (sys.executable, str(Path(__file__).with_name("slowchild.py")))


@pytest.mark.parametrize("incumbents", [0, 1])
def test_past_its_deadline_it_is_killed_and_the_last_incumbent_stands(incumbents: int) -> None:
    """A planner that never ends, with a child of its own, as a solver is."""
    clock = Clock()
    process = PlanningProcess(solve_s=5, clock=clock, command=(*SLOW, str(incumbents)))
    process.start(problem(), "toy")
    grandchild = until_it_hangs(process, incumbents)
    pid = process.pid
    assert pid is not None
    clock.now_s = 5.9
    began = time.monotonic()
    assert [process.poll() for _ in range(1000)] == [None] * 1000
    assert time.monotonic() - began < 60, "a poll never waits"
    clock.now_s = 6.1
    result = process.poll()
    assert result is not None
    assert gone(pid)
    assert wait_gone(grandchild)
    if incumbents:
        assert isinstance(result.solution, Feasible)
        assert result.solution.plan == toy_solve(problem()).plan  # type: ignore[union-attr]
        assert (result.solution.finished, result.error) == (False, "")
    else:
        assert (result.solution, result.error) == (None, "no plan within 5 s")


def until_it_hangs(process: PlanningProcess, incumbents: int) -> int:
    """Wait until the slow child has said all it ever says; answers with its own child's pid."""
    deadline = time.monotonic() + 60
    while process.pid is None or process._ready_s is None or (process.incumbent is None and incumbents):
        assert time.monotonic() < deadline
        assert process.poll() is None
        assert process._pipe is not None
        select.select([process._pipe.fileno()], [], [], 0.2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0])


def wait_gone(pid: int) -> bool:
    """A killed orphan is reaped by init, soon."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], 60)[0])
    finally:
        os.close(fd)


def test_a_child_that_is_killed_is_reported() -> None:
    process = PlanningProcess(solve_s=30)
    process.start(problem(), "areal-hex")
    assert process.pid is not None
    os.kill(process.pid, 9)
    result = wait(process)
    assert result.solution is None
    assert "ended by itself" in result.error


def test_the_child_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys; import runtime.planning.child, planner; planner.solve;"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'ray', 'textual', 'transformers'}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    assert out.stdout.strip() == "[]"
