"""The fold is total and deterministic; the store's codec loses nothing."""

from hypothesis import given
from hypothesis import strategies as st
from values import fleet, solved, started, stored

from planner.override import Override
from runtime.api import codec
from runtime.core.event import EVENT_TYPES, Event
from runtime.core.fleet_event import DeviceJoined, DeviceLost, StepOrdered, UnitDied
from runtime.core.fold import fold
from runtime.core.plan_event import OverrideSet, PlanAdopted, PlanKept, PlanProposed
from runtime.core.state import ClusterState
from runtime.core.words import words

NAMES = st.sampled_from(["a", "b", "r0", "t0"])
PLANS = st.sampled_from([solved("a", "b", rev=1), solved("b", "a", rev=2), solved(None, "a+b", rev=3)])
OVERRIDES = st.builds(
    Override,
    device=NAMES,
    kind=st.sampled_from(["cordon", "drain", "pin"]),
    role=st.sampled_from(["train", "rollout", "idle", None]),
)
SPECIAL = {
    StepOrdered: st.builds(
        lambda verb, kind, unit, epoch: StepOrdered(
            id=f"{verb}-{kind}:{unit}:{epoch}", unit=unit, epoch=epoch, devices=("a",), plan_rev=1
        ),
        st.sampled_from(["start", "drain", "stop"]),
        st.sampled_from(["replica", "trainer"]),
        NAMES,
        st.integers(1, 3),
    ),
    OverrideSet: st.builds(OverrideSet, override=OVERRIDES, rev=st.integers(0, 9)),
    PlanAdopted: st.builds(PlanAdopted, solved=PLANS, need_rev=st.integers(0, 5)),
    PlanProposed: st.builds(
        PlanProposed, solved=PLANS, expires_at_s=st.floats(0, 9), gain_share=st.none() | st.floats(0, 1)
    ),
}


def any_of(event_type: type) -> st.SearchStrategy[Event]:
    """Events of a type with names that meet each other."""
    if event_type in SPECIAL:
        return SPECIAL[event_type]
    fields = event_type.__dataclass_fields__
    named = {k: NAMES for k in fields if k in ("device", "unit")}
    if "devices" in fields:
        named["devices"] = st.just(("a",))
    return st.builds(event_type, **named)


EVENTS = st.lists(st.one_of([any_of(t) for t in EVENT_TYPES.values()]), max_size=30)


@given(EVENTS, st.data())
def test_total_deterministic_and_splittable_anywhere(events: list[Event], data: st.DataObject) -> None:
    log = stored(*events)
    whole = fold(ClusterState(), log)
    cut = data.draw(st.integers(0, len(log)))
    assert fold(fold(ClusterState(), log[:cut]), log[cut:]) == whole


@given(EVENTS)
def test_every_event_survives_the_codec_and_has_words(events: list[Event]) -> None:
    for e in events:
        assert repr(codec.decode(type(e), codec.encode(e))) == repr(e)  # repr: NaN is not equal to itself
        said = words(e, lambda d: d.upper())
        assert said.message
        assert said.level in ("info", "warning", "error")


def test_a_need_outlives_an_answer_that_did_not_know_of_it() -> None:
    state = fleet("a", "b", plan=solved("a", "b"))
    assert state.need is None
    state = fold(state, stored(DeviceLost(device="b", reason="gone")))
    first = state.need
    assert first is not None
    state = fold(state, stored(DeviceJoined(device="c", kind="k", node="n0", index=2)))
    late = fold(state, stored(PlanAdopted(solved=solved("a", rev=2), need_rev=first.rev)))
    assert late.need is not None
    assert late.need.reasons == ("n0/gpu1 lost", "n0/gpu2 joined")
    assert late.need.rev == first.rev + 1
    assert fold(late, stored(PlanKept(trigger="", solve_s=0, need_rev=first.rev + 1))).need is None


def test_an_epoch_never_goes_back() -> None:
    state = fleet("a", "b", more=started("r0", "b", epoch=4))
    again = fold(state, stored(*started("r0", "b", epoch=3)))
    assert again.units["r0"].epoch == 4
    stale = fold(state, stored(UnitDied(unit="r0", epoch=3, reason="late news")))
    assert stale.units["r0"].status == "serving"


def test_a_healthy_minute_forgives_failures() -> None:
    state = fleet("a", "b", more=started("r0", "b"), at_s=0.0)
    state = fold(state, stored(UnitDied(unit="r0", epoch=1, reason="x"), at_s=59.0))
    state = fold(state, stored(*started("r0", "b", epoch=2), at_s=60.0))
    state = fold(state, stored(UnitDied(unit="r0", epoch=2, reason="x"), at_s=70.0))
    assert state.devices["b"].failures == 2
    state = fold(state, stored(*started("r0", "b", epoch=3), at_s=80.0))
    state = fold(state, stored(UnitDied(unit="r0", epoch=3, reason="x"), at_s=140.0))
    assert state.devices["b"].failures == 1


def test_a_new_override_replaces_the_old_of_its_kind_only() -> None:
    def said(kind: str, role: str | None = None) -> OverrideSet:
        return OverrideSet(override=Override(device="a", kind=kind, role=role), rev=1)  # type: ignore[arg-type]

    state = fold(fleet("a", "b"), stored(said("pin", "train"), said("cordon"), said("drain"), said("pin", "idle")))
    assert [(o.kind, o.role) for o in state.overrides] == [("drain", None), ("pin", "idle")]
