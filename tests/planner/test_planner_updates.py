"""Weight updates: what is sent, how long that takes, and who waits for it."""

import pytest
from hypothesis import given

from planner.cluster import Device, Link
from planner.cost.assumptions import Assumptions
from planner.cost.context import context_of
from planner.cost.decode import ReplicaShape
from planner.cost.model import CostModel
from planner.cost.step import Offer
from planner.cost.traffic import bytes_between_regions
from planner.cost.update import delta_bytes, update_bytes, update_s
from planner.errors import InvalidInput
from planner.plan import Placement, Plan, Stage
from planner.problem import Capabilities, Problem
from planner.record import replace
from tests.planner.fleets import LINK, MIXED, SMALL, problem, problems, workload

BF16 = replace(SMALL, dtype_bytes=2)


def test_a_delta_is_the_changed_elements_and_where_they_are() -> None:
    """2 % of the elements, 2 bytes and a position of 4 each: 6 % of all weights, which are 2 bytes an element."""
    a = Assumptions()
    assert delta_bytes(BF16, a) == pytest.approx(0.06 * BF16.weight_bytes)
    assert update_bytes(BF16, 1) == BF16.weight_bytes
    assert update_bytes(BF16, 16) == pytest.approx((1 + 15 * 0.06) / 16 * BF16.weight_bytes)
    # From a third of the elements on, the whole is the shorter.
    assert delta_bytes(BF16, replace(a, delta_changed_share=1 / 3)) == pytest.approx(BF16.weight_bytes)
    assert delta_bytes(BF16, replace(a, delta_changed_share=0.5)) == BF16.weight_bytes


def test_other_types_than_bf16_are_sent_whole() -> None:
    for width in (1, 4):
        model = replace(SMALL, dtype_bytes=width)
        assert update_bytes(model, 16) == model.weight_bytes


def test_deltas_shorten_the_transfer_and_leave_the_fixed_part() -> None:
    whole, mixed = (context_of(problem(model=BF16, capabilities=Capabilities(weights_full_every=n))) for n in (1, 10))
    endless = Link(latency_s=LINK.latency_s, bytes_per_s=1e30)
    fixed = update_s(whole, "compute", endless)
    assert update_s(mixed, "compute", endless) == pytest.approx(fixed)
    moving = update_s(whole, "compute", LINK) - fixed
    assert update_s(mixed, "compute", LINK) - fixed == pytest.approx((1 + 9 * 0.06) / 10 * moving)
    with pytest.raises(InvalidInput, match="weights_full_every"):
        Capabilities(weights_full_every=0)


def _apart(p: Problem) -> Plan:
    stage = Stage(devices=("d0",), kind="compute", dp=1, tp=1, layers=p.model.layers)
    train = Placement(role="train", kind="compute", devices=("d0",), stages=(stage,))
    return Plan(placements=(train, Placement(role="rollout", kind="bandwidth", devices=("d2",), share=1.0)))


def test_deltas_save_egress_too() -> None:
    devices = tuple(
        d if d.id != "d2" else Device(id="d2", kind=d.kind, node="far", region="there") for d in MIXED.devices
    )
    p = problem(replace(MIXED, devices=devices), model=BF16)
    less = replace(p, capabilities=replace(p.capabilities, weights_full_every=16))
    home = devices[0].region
    whole, some = (bytes_between_regions(x, _apart(x))[home, "there"] for x in (p, less))
    assert whole - some == pytest.approx(BF16.weight_bytes - update_bytes(BF16, 16))


def test_in_sync_modes_no_transfer_is_hidden() -> None:
    """Overlapped or not, generation cannot begin before the weights are there."""
    for changes in ({"mode": "sync"}, {"mode": "async", "eta": 0}):
        steps = []
        for mode in ("rolling", "overlapped", "pause"):
            p = problem(workload=workload(update_mode=mode, **changes))
            found = CostModel(p).evaluate(_apart(p))
            assert found is not None
            steps.append(found.prediction.step_s)
        assert steps[0] == steps[1] == steps[2]


def test_what_lies_in_the_second_buffer_stops_a_replica_for_a_swap() -> None:
    """0.99 GB over 5 GB/s at 0.45 of it takes 0.44 s, beside generation; then 0.04 s, or what was measured, in which it stops."""
    model = replace(BF16, vocab=150_000)
    can = Capabilities(direct_updates=True)
    p = problem(model=model, capabilities=can, workload=workload(kv_on_update="keep"))
    ctx = context_of(p)
    moving = LINK.latency_s + model.weight_bytes / (0.45 * LINK.bytes_per_s)
    assert update_s(ctx, "compute", LINK) == pytest.approx(moving + 0.04)

    def offer_of(q: Problem) -> Offer:
        return CostModel(q).offers(ReplicaShape(kind="compute", tp=1), LINK)[0]

    direct = offer_of(p)
    assert (direct.pause_s, direct.transfer_s - direct.swap_s) == pytest.approx((0.04, moving))
    kinds = {**p.cluster.kinds, "compute": replace(p.cluster.kinds["compute"], swap_s=0.01)}
    assert offer_of(replace(p, cluster=replace(p.cluster, kinds=kinds))).pause_s == 0.01
    by_file = offer_of(replace(p, capabilities=Capabilities()))
    assert by_file.pause_s == by_file.transfer_s > 1.0
    # Where generation waits for the weights, it waits for their way too.
    sync = offer_of(replace(p, workload=replace(p.workload, mode="sync")))
    assert sync.pause_s == pytest.approx(moving + 0.04)


@given(problems())
def test_a_faster_way_of_updating_never_lengthens_a_step(p: Problem) -> None:
    """Deltas against whole weights; overlapped or rolling against pausing all; straight to the engines against by file."""
    cost, by_id = CostModel(p), {d.id: d for d in p.cluster.devices}
    first, *others = by_id
    stage = Stage(devices=(first,), kind=by_id[first].kind, dp=1, tp=1, layers=p.model.layers)
    train = Placement(role="train", kind=stage.kind, devices=(first,), stages=(stage,))
    plan = Plan(placements=(train, *(Placement(role="rollout", kind=by_id[d].kind, devices=(d,)) for d in others)))
    if cost.evaluate(plan) is None:
        return

    def step_s(mode: str, every: int, *, direct: bool = False) -> float:
        q = replace(p, workload=replace(p.workload, update_mode=mode))
        can = replace(q.capabilities, weights_full_every=every, direct_updates=direct)
        found = CostModel(replace(q, capabilities=can)).evaluate(plan)
        assert found is not None
        return found.prediction.step_s

    for mode in ("rolling", "overlapped", "pause"):
        assert step_s(mode, 8) <= step_s(mode, 1) * (1 + 1e-9)
        if mode != "overlapped":  # that one is as if nothing ever stopped
            assert step_s(mode, 1, direct=True) <= step_s(mode, 1) * (1 + 1e-9)
    assert step_s("overlapped", 1) <= step_s("pause", 1) * (1 + 1e-9)
    assert step_s("rolling", 1) <= step_s("pause", 1) * (1 + 1e-9)
