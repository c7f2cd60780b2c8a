"""Changes to a problem, and plans before and after."""

import pytest
from fleets import FLEET_OF_FIVE, MIXED, problem, problems
from hypothesis import given, settings

from planner import Feasible, Infeasible, Problem, Solution, solve
from planner.errors import InvalidInput
from planner.override import Override
from planner.record import replace
from planner.whatif import Change, apply, parse, what_if


def by_hex(p: Problem) -> Solution:
    return solve(p, scheduler="hex")


def changed(text: str, p: Problem | None = None) -> Problem:
    return apply(p or problem(), parse(text))


def test_every_change_changes_what_it_says() -> None:
    p = problem()
    more = changed("add=10xL40S@far, add=1xcompute").cluster
    assert [d.kind for d in more.devices[4:]] == ["L40S"] * 10 + ["compute"]
    assert [d.node for d in more.devices[4:]] == ["new0"] * 8 + ["new1"] * 2 + ["new2"]
    assert {d.region for d in more.devices[4:14]} == {"far"}
    assert more.devices[14].region == "local"
    assert more.kinds["L40S"].name == "L40S"
    assert len({d.id for d in more.devices}) == 15
    assert [d.id for d in changed("remove=a").cluster.devices] == ["d2", "d3"]
    assert [d.id for d in changed("remove=d1").cluster.devices] == ["d0", "d2", "d3"]
    assert [d.id for d in changed("remove=1xbandwidth").cluster.devices] == ["d0", "d1", "d2"]
    w = changed("eta=9,kv=keep,update=pause").workload
    assert (w.eta, w.kv_on_update, w.update_mode) == (9, "keep", "pause")
    assert changed("price.compute=1.2").cluster.kinds["compute"].price_usd_per_h == 1.2
    assert changed("price.compute=1.2").cluster.devices == p.cluster.devices
    assert parse("eta=8")[0] == Change(key="eta", value="8")
    assert str(parse("eta=8")[0]) == "eta=8"


def test_overrides_of_removed_devices_go_with_them() -> None:
    p = problem(overrides=(Override(device="d0", kind="cordon"), Override(device="d2", kind="cordon")))
    assert [o.device for o in changed("remove=a", p).overrides] == ["d2"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "KEY=VALUE"),
        ("add", "KEY=VALUE"),
        ("eta=", "KEY=VALUE"),
        ("grow=2", "unknown change"),
        ("add=8", "COUNTxKIND"),
        ("add=0xH20", "COUNTxKIND"),
        ("add=100001xH20", "at most 100,000"),
        ("add=8xH21", "no such device kind"),
        ("remove=node9", "nothing to remove"),
        ("remove=3xcompute", "nothing to remove"),
        ("remove=0xcompute", "nothing to remove"),
        ("remove=1xH20", "nothing to remove"),
        ("remove=a,remove=a", "nothing to remove"),
        ("eta=-1", "whole number"),
        ("eta=two", "whole number"),
        ("kv=drop", "unknown value of kv"),
        ("update=never", "unknown value of update"),
        ("price.H20=1", "not in the fleet"),
        ("price.compute=cheap", "USD an hour"),
        ("price.compute=-1", "USD an hour"),
        ("price.compute=nan", "USD an hour"),
    ],
)
def test_a_change_that_makes_no_sense_is_one_clear_error(text: str, word: str) -> None:
    with pytest.raises(InvalidInput, match=word):
        changed(text)


def test_the_gain_is_predicted_and_its_limits_are_proven() -> None:
    found = what_if(problem(FLEET_OF_FIVE), parse("add=2xbandwidth"), by_hex)
    assert isinstance(found.before, Feasible)
    assert isinstance(found.after, Feasible)
    assert found.gain == pytest.approx(
        found.after.prediction.tokens_per_s / found.before.prediction.tokens_per_s - 1, rel=1e-12
    )
    assert found.gain is not None
    assert found.gain >= 0
    assert found.proven is not None
    least, most = found.proven
    assert least <= found.gain <= most


@settings(max_examples=10)
@given(problems(most=4, least=2))
def test_the_optimum_gains_what_is_proven(p: Problem) -> None:
    """Brute force on both sides lies between the limits proven with the plans and bounds of hex."""
    changes = parse("eta=8,kv=keep")
    found = what_if(p, changes, by_hex)
    if found.proven is None:
        assert isinstance(found.before, Infeasible)
        assert found.gain is None
        return
    a, b = solve(p, scheduler="exhaustive"), solve(apply(p, changes), scheduler="exhaustive")
    assert isinstance(a, Feasible)
    assert isinstance(b, Feasible)
    true = b.prediction.tokens_per_s / a.prediction.tokens_per_s - 1
    assert found.proven[0] - 1e-6 <= true <= found.proven[1] + 1e-6


def test_a_price_changes_dollars_and_nothing_else() -> None:
    found = what_if(problem(MIXED), parse("price.compute=10,price.bandwidth=4"), by_hex)
    assert isinstance(found.before, Feasible)
    assert isinstance(found.after, Feasible)
    assert found.gain == 0
    assert found.after.prediction.usd_per_mtok == pytest.approx(2 * (found.before.prediction.usd_per_mtok or 0))
    assert replace(found.after.prediction, usd_per_h=None, usd_per_mtok=None) == replace(
        found.before.prediction, usd_per_h=None, usd_per_mtok=None
    )
