"""The snapshot against figures worked out by hand; what is unknown is None, never 0."""

import pytest
from values import NOW_S, device, fleet, flow, observed, replica, solved, started, status, stored, trainer

from planner.cluster import DeviceKind
from planner.override import Override
from planner.record import replace
from runtime.api import codec
from runtime.api.wire import DeviceRow, RunView, Snapshot
from runtime.core.belief import believe
from runtime.core.event import MilestoneReached, RunEnded, RunEndRequested
from runtime.core.fleet_event import DeviceBecameHostBound, DeviceJoined, DeviceLost, UnitDied
from runtime.core.fold import fold
from runtime.core.limits import Limits, Memory
from runtime.core.observation import DeviceSample, DeviceSeen, Observation
from runtime.core.plan_event import OverrideSet
from runtime.core.snapshot import Facts, snapshot
from runtime.core.state import ClusterState
from runtime.core.view import fleet_power_w, kwh_per_mtok, usd_per_mtok

RUN = RunView(
    id="run-1", name="run", folder="/runs/run-1", state="starting", label="paced", started_at_s=0.0, consent="auto",
    hexctl_version="0", daemon_pid=1,
)  # fmt: skip
UP = (*started("t0", "a"), *started("r0", "b"))


def kind(price: float | None) -> DeviceKind:
    return DeviceKind(
        name="k", peak_flops=1e12, hbm_bytes_per_s=1e11, memory_bytes=8e9, link_bytes_per_s=1e9, price_usd_per_h=price,
        paced=True,
    )  # fmt: skip


def take(state: ClusterState, obs: Observation | None, price: float | None = 1.5, kinds: object = None) -> Snapshot:
    facts = Facts(run=RUN, kinds=kinds or {"k": kind(price)}, groups_per_batch=8)  # type: ignore[arg-type]
    memory = Memory()
    if obs is not None:
        _, memory = believe(obs, state, memory, Limits(), NOW_S)
    return snapshot(facts, state, obs, memory, seq=1, now_s=NOW_S, next_=None, events=(), series={})


def rows(s: Snapshot) -> dict[str, DeviceRow]:
    return {d.id: d for d in s.devices}


def up() -> tuple[ClusterState, Observation]:
    state = fleet("a", "b", "c", plan=solved("a", "b"), more=UP)
    obs = observed(
        device("a"),
        device("b", util_share=0.5),
        device("c"),
        replica("r0", "b"),
        trainer("a"),
        of_flow=flow(status("r0")),
    )
    return state, obs


def test_money_is_for_all_devices_that_are_there_over_trained_tokens() -> None:
    state, obs = up()
    s = take(state, obs)
    assert s.flow is not None
    # three devices at $1.50, one idle: $4.50/h; 200 trained tokens/s are 0.72 Mtok/h
    assert s.flow.usd_per_h == pytest.approx(4.5)
    assert s.flow.usd_per_mtok == pytest.approx(4.5 / 0.72)
    assert s.flow.queue_batches == 2.0
    assert rows(s)["c"].usd_per_h == 1.5
    assert rows(s)["b"].usd_per_mtok == pytest.approx(1.5 / 0.36)  # 100 tokens/s


def test_the_refill_shown_is_that_of_the_slowest_replica_that_serves() -> None:
    state, obs = up()
    told = {"a": ("serve", 0.1), "b": ("serve", 0.4), "c": ("drain", 9.0), "d": ("serve", None)}
    several = flow(*(replace(status(n), order=order, refill_s=s) for n, (order, s) in told.items()))
    shown = [take(state, replace(obs, flow=f)).flow for f in (several, flow(status("d")))]
    assert [None if f is None else f.refill_s for f in shown] == [0.4, None]


def test_a_lost_device_is_not_paid_for() -> None:
    state, obs = up()
    state = fold(state, stored(DeviceLost(device="c", reason="fallen off the bus")))
    s = take(state, obs)
    assert s.flow is not None
    assert s.flow.usd_per_h == pytest.approx(3.0)
    assert (rows(s)["c"].status, rows(s)["c"].note, rows(s)["c"].usd_per_h) == ("LOST", "fallen off the bus", None)


def test_without_prices_dollars_are_none_and_a_free_fleet_costs_0() -> None:
    state, obs = up()
    none = take(state, obs, price=None)
    assert none.flow is not None
    assert (none.flow.usd_per_h, none.flow.usd_per_mtok) == (None, None)
    assert {d.usd_per_h for d in none.devices} == {None}
    assert none.problems == ()
    free = take(state, obs, price=0.0)
    assert free.flow is not None
    assert (free.flow.usd_per_h, free.flow.usd_per_mtok) == (0.0, 0.0)


def test_a_price_that_is_missing_for_one_kind_hides_the_sum_and_says_so() -> None:
    state, obs = up()
    state = fold(state, stored(DeviceJoined(device="d", kind="other", node="n0", index=3)))
    s = take(state, obs, kinds={"k": kind(1.5), "other": replace(kind(None), name="other")})
    assert s.flow is not None
    assert s.flow.usd_per_h is None
    assert s.problems == ("no price for kind other: dollars are not shown",)


@pytest.mark.parametrize(("usd", "rate"), [(None, 10.0), (1.0, None), (1.0, 0.0)])
def test_no_price_or_no_rate_is_no_figure(usd: float | None, rate: float | None) -> None:
    assert usd_per_mtok(usd, rate) is None


def test_energy_per_million_tokens_by_hand() -> None:
    """900 W at 2,500 tokens/s: 400 s and 360 kJ a million tokens, which is 0.1 kWh."""
    assert kwh_per_mtok(900.0, 2500.0) == pytest.approx(0.1)
    assert kwh_per_mtok(None, 2500.0) is kwh_per_mtok(900.0, 0.0) is kwh_per_mtok(900.0, None) is None


def test_power_is_summed_only_when_every_device_that_is_there_says_it() -> None:
    def seen(id_: str, power_w: float | None, *, present: bool | None = True) -> DeviceSeen:
        sample = DeviceSample(power_w=power_w)
        return DeviceSeen(id=id_, kind="k", node="n0", index=0, present=present, sample=sample, age_s=1.0)

    assert fleet_power_w([seen("a", 300.0), seen("b", 250.5)]) == 550.5
    assert fleet_power_w([seen("a", 300.0), seen("b", None)]) is None
    assert fleet_power_w([seen("a", 300.0), seen("b", None, present=False)]) == 300.0
    assert fleet_power_w([]) is None


def test_predicted_stands_beside_measured() -> None:
    row = rows(take(*up()))["b"]
    assert (row.role, row.replica, row.tokens_per_s, row.predicted_tokens_per_s) == ("rollout", "r0", 100.0, 100.0)
    assert (row.version, row.digest, row.running, row.slots, row.pid) == (3, "9f3c", 8, 16, 11)
    idle = rows(take(*up()))["c"]
    assert (idle.role, idle.replica, idle.tokens_per_s, idle.predicted_tokens_per_s) == ("idle", None, None, None)


def test_status_says_the_gravest() -> None:
    state, obs = up()
    assert {i: r.status for i, r in rows(take(state, obs)).items()} == {"a": "ok", "b": "ok", "c": "ok"}
    cordoned = fold(state, stored(OverrideSet(override=Override(device="c", kind="cordon"), rev=1)))
    assert rows(take(cordoned, obs))["c"].status == "cordoned"
    bound = fold(state, stored(DeviceBecameHostBound(device="b", lag_share=0.2)))
    assert rows(take(bound, obs))["b"].status == "HOST-BOUND"
    hung = fold(state, stored(UnitDied(unit="r0", epoch=1, reason="last exchange 20 s ago", hung=True)))
    assert (rows(take(hung, obs))["b"].status, rows(take(hung, obs))["b"].note) == ("HUNG", "last exchange 20 s ago")
    aged = replace(obs, devices=(device("a"), device("b", age_s=9.0), device("c")))
    assert rows(take(state, aged))["b"].status == "STALE"
    draining = replace(obs, replicas=(replica("r0", "b", phase="draining"),))
    assert rows(take(state, draining))["b"].status == "draining"


def test_before_anything_answers_nothing_is_invented() -> None:
    s = take(fleet("a", "b"), None)
    assert (s.flow, s.plan, s.flow_age_s, s.resident_bytes) == (None, None, None, None)
    assert s.run.state == "starting"
    assert all(d.util_share is None and d.tokens_per_s is None and d.age_s is None for d in s.devices)


def test_the_run_says_how_it_fares() -> None:
    state, obs = up()
    state = fold(state, stored(MilestoneReached(name="in service", detail="")))
    assert take(state, obs).run.state == "running"
    state = fold(state, stored(RunEndRequested(reason="down")))
    assert take(state, obs).run.state == "stopping"
    assert take(fold(state, stored(RunEnded(reason="down"))), obs).run.state == "finished"


def test_it_goes_over_the_wire() -> None:
    s = take(*up())
    assert codec.decode(Snapshot, codec.encode(s)) == s
