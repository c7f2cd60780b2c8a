"""Late answers of the planner, by hand in virtual time: the daemon's loop and the simulator's turns keep and drop the same ones."""

import pytest

from runtime.core.needing import Need
from runtime.core.solved import PlanCause
from runtime.sim.turns import Turns


def begun(turns: Turns, now_s: float) -> Need:
    need = turns.begin(now_s)
    assert need is not None
    return need


@pytest.mark.parametrize(
    ("later", "stands"), [("join", True), ("drift", True), ("loss", False), ("quarantine", False), ("operator", False)]
)
def test_which_reasons_throw_a_planning_away(later: PlanCause, stands: bool) -> None:
    turns = Turns(None)
    turns.needs("loss", "lost b", 0.0)
    assert turns.begin(0.4) is None, "losses are gathered for half a second"
    first = begun(turns, 0.5)
    turns.needs(later, "later", 2.0)
    assert turns.stands(first) is stands


def test_a_join_meanwhile_is_planned_for_once_the_answer_is_there() -> None:
    """Lost at 0, asked at 0.5, joined at 2.0, answered at 5.5: the answer counts, and the join's turn has come by then."""
    turns = Turns(None)
    turns.needs("loss", "lost b", 0.0)
    first = begun(turns, 0.5)
    assert 5.0 in turns.needs("join", "c came", 2.0)
    assert turns.begin(5.0) is None, "the planner is busy"
    assert turns.stands(first)
    turns.end(first)
    second = begun(turns, 5.5)
    assert "c came" in second.reasons
    turns.end(second)
    assert turns.begin(99.0) is None


def test_a_loss_meanwhile_begins_anew_and_its_old_answer_never_counts() -> None:
    turns = Turns(None)
    turns.needs("join", "c came", 0.0)
    first = begun(turns, 3.0)
    turns.needs("loss", "lost b", 4.0)
    assert not turns.stands(first)
    second = begun(turns, 4.5)
    assert {*second.reasons} == {"c came", "lost b"}
    assert not turns.stands(first)
    assert turns.stands(second)
