"""Devices that are parts of cards: kernels share the card, the host's work does not, and rates measured beside each other say
themselves how."""

import json
from pathlib import Path

import pytest
from fleets import LINK, SMALL, kind, problem, workload
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planner_reached import measured, on, on_card, one

from planner import Budget, Feasible, solve, violations
from planner.calibrated import ASSUMED_TURN_S, assumed, calibrated, rates_from
from planner.calibration import Calibration, EngineRate, TrainerRate
from planner.catalogue import CATALOGUE
from planner.cluster import Cluster, Device, DeviceKind, part_name, whole_of
from planner.cost.context import context_of
from planner.cost.decode import ReplicaShape, decode_step_s, prefill_s
from planner.cost.model import CostModel
from planner.cost.network import Spread
from planner.cost.training import StageShape, TrainerShape
from planner.problem import Capabilities, Problem
from planner.record import replace
from planner.workload import Lengths

HALF = "H200 1/2"


def halved(problem: Problem) -> Problem:
    """The problem on one H200 in halves."""
    half = CATALOGUE["H200"].in_parts(2)
    devices = tuple(Device(id=f"GPU-a:{i}of2", kind=HALF, node="n") for i in (1, 2))
    return replace(problem, cluster=replace(problem.cluster, kinds={HALF: half}, devices=devices))


def on_one(k: DeviceKind, capabilities: Capabilities | None = None) -> Problem:
    devices = tuple(Device(id=f"d{i}", kind=k.name, node="n") for i in range(2))
    fleet = Cluster(kinds={k.name: k}, devices=devices, same_kind=LINK, cross_kind=LINK)
    return problem(fleet, model=SMALL, workload=workload(), capabilities=capabilities or Capabilities())


def decode_s(p: Problem, running: int) -> float:
    [k] = p.cluster.kinds
    return decode_step_s(context_of(p), ReplicaShape(kind=k, tp=1), running)


def trained_s(p: Problem) -> float:
    [k] = p.cluster.kinds
    stage = StageShape(kind=k, dp=1, tp=1, layers=p.model.layers, spread=Spread(nodes=1, local=LINK))
    cost = CostModel(p).trainer(TrainerShape(stages=(stage,)))
    assert cost is not None
    return cost.train_s


def test_a_decode_step_of_half_a_card_by_hand() -> None:
    """0.99 GB of weights at 0.8 x 2 TB/s are 0.62 ms of kernels, and attention 0.01; 24 layers of 20 us and a sample's 20 us are
    0.50 ms of the host. Half a card takes 1.26 + 0.50 ms, not 2.26."""
    whole = kind("own")
    assert decode_s(on_one(whole), 1) == pytest.approx(0.63e-3 + 0.50e-3, rel=0.01)
    assert decode_s(on_one(whole.in_parts(2)), 1) == pytest.approx(1.26e-3 + 0.50e-3, rel=0.01)
    assert decode_s(on_one(whole.in_parts(4)), 1) == pytest.approx(2.52e-3 + 0.50e-3, rel=0.01)


@pytest.mark.parametrize("running", [1, 64, 256])
def test_kernels_of_half_an_h200_take_twice_as_long_and_the_host_as_long_as_ever(running: int) -> None:
    whole, half = on(on_card(), decode_floor_s=1e-4), on(halved(on_card()), decode_floor_s=1e-4)
    host_s = 30 * 1e-4 + running * 2e-5
    assert decode_s(half, running) - host_s == pytest.approx(2 * (decode_s(whole, running) - host_s))
    once = prefill_s(context_of(whole), ReplicaShape(kind="H200", tp=1), 1000, 1e6)
    assert prefill_s(context_of(half), ReplicaShape(kind=HALF, tp=1), 1000, 1e6) == pytest.approx(2 * once)


def test_a_training_step_of_half_a_card_keeps_its_floors_and_its_fixed_part() -> None:
    """Two rows of 30 layers with a floor of 1 ms, and 0.1 s a step: 0.16 s of a step are the host's."""
    figures = {"train_floor_s": 1e-3, "train_fixed_s": 0.1, "launch_s": 0.0}
    whole, half = on(on_card(), **figures), on(halved(on_card()), **figures)
    bare = {"train_floor_s": 0.0, "train_fixed_s": 0.0, "launch_s": 0.0}
    assert trained_s(whole) == pytest.approx(trained_s(on(whole, **bare)) + 0.16)
    assert trained_s(half) == pytest.approx(2 * trained_s(on(whole, **bare)) + 0.16)


@settings(max_examples=15)
@given(st.integers(1, 2), st.integers(2, 3), st.floats(0.0, 3e-3), st.floats(0.0, 0.5))
def test_hex_finds_the_best_plan_on_parts(cards: int, parts: int, floor_s: float, fixed_s: float) -> None:
    part = replace(CATALOGUE["H200"].in_parts(parts), train_floor_s=floor_s, train_fixed_s=fixed_s)
    devices = tuple(Device(id=f"d{i}", kind=part.name, node="n") for i in range(cards * parts))
    base = on_one(part, Capabilities.single_device_roles())
    p = replace(base, cluster=replace(base.cluster, devices=devices))
    best = solve(p, scheduler="exhaustive", budget=Budget(evaluations=10**9))
    found = solve(p, scheduler="hex")
    assert isinstance(best, Feasible)
    assert isinstance(found, Feasible)
    assert violations(found.plan, p) == ()
    assert found.prediction.step_s == pytest.approx(best.prediction.step_s, rel=1e-6)
    assert best.prediction.tokens_per_s <= found.bound_tokens_per_s * (1 + 1e-6)


def decode_rates(p: Problem, step_s: dict[int, float]) -> tuple[EngineRate, ...]:
    """An engine whose decode steps of so many samples took so long."""
    return tuple(
        EngineRate(phase="decode", model="own", params=p.model.params, tp=1, running=n, context=204,
                   tokens_per_s=n / s, engine="vllm")
        for n, s in step_s.items()
    )  # fmt: skip


def turns(slower: float = 1.0) -> tuple[TrainerRate, ...]:
    """A trainer's turns that took so many times as long as the model has them of a whole card with a fixed 0.1 s."""
    true = on(on_card(), train_fixed_s=0.1, train_floor_s=1e-3, launch_s=0.0)
    found = one(true, 128, 2), one(true, 32, 1), one(true, 128, 8)
    return tuple(replace(r, tokens_per_s=r.tokens_per_s / slower) for r in found)


STEPS = {16: 2.0e-3, 64: 4.0e-3, 256: 12.0e-3}  # of an engine alone
BESIDE = {16: 2.6e-3, 64: 5.0e-3, 256: 14.0e-3}  # of one beside a trainer


def test_rates_of_parts_beside_each_other_are_met_and_need_no_share() -> None:
    """What a part was measured at beside the other is what it gets: no second share comes on top."""
    p = halved(on_card())
    card = measured(*decode_rates(p, STEPS), *turns())
    own = measured(*decode_rates(p, BESIDE), *turns(1.3), kind=HALF)
    both = Calibration(kinds=(*card.kinds, *own.kinds))
    found = calibrated(p, both, "vllm")
    assert rates_from(p, both, "vllm") == {HALF: HALF}
    assert found.cluster.kinds[HALF].card_share == 1.0
    for running, seconds in BESIDE.items():
        at = replace(context_of(found), m=replace(context_of(found).m, context=204.0))
        step = decode_step_s(at, ReplicaShape(kind=HALF, tp=1), running) / found.cluster.kinds[HALF].rollout_efficiency
        assert step == pytest.approx(seconds, rel=1e-3)
    alone = calibrated(on_card(), card, "vllm")
    assert trained_s(found) == pytest.approx(1.3 * trained_s(alone), rel=0.02)


def test_a_part_of_which_one_role_was_measured_is_as_its_card() -> None:
    p = halved(on_card())
    card = measured(*decode_rates(p, STEPS), *turns())
    for some in (decode_rates(p, BESIDE), turns(1.3)):
        both = Calibration(kinds=(*card.kinds, *measured(*some, kind=HALF).kinds))
        assert rates_from(p, both, "vllm") == {HALF: "H200"}
        assert calibrated(p, both, "vllm").cluster == calibrated(p, card, "vllm").cluster
    assert rates_from(p, None, "vllm") == {}
    assert rates_from(p, Calibration(), "vllm") == {}


def test_what_corrects_steps_of_a_card_corrects_those_of_its_parts_as_much() -> None:
    """Steps that no floor and efficiency meet: the correction is one of the card, and halving comes on top of it."""
    p, odd = on_card(), {16: 2.0e-3, 64: 1.0e-2, 256: 1.1e-2}
    card = measured(*decode_rates(p, odd))
    whole, half = calibrated(p, card, "vllm"), calibrated(halved(p), card, "vllm")
    plain = {name: replace(found, calibration=None) for name, found in (("H200", whole), (HALF, half))}
    for running in (16, 64, 256):
        assert decode_s(whole, running) != pytest.approx(decode_s(plain["H200"], running), rel=0.02)
        fix = decode_s(whole, running) / decode_s(plain["H200"], running)
        assert decode_s(half, running) == pytest.approx(fix * decode_s(plain[HALF], running), rel=0.02)


READINGS = Path(__file__).resolve().parents[1] / "benchmarks" / "readings"


def read_step_s(name: str) -> float:
    """Mean seconds of steps 5 to 30 of a run of SmolLM2 with 125 tokens a sample."""
    steps = [json.loads(line) for line in (READINGS / name).read_text().splitlines()][5:31]
    return (steps[-1]["time_unix_s"] - steps[0]["time_unix_s"]) / (len(steps) - 1)


def run_of_smollm2(parts: int) -> Feasible:
    """The plan of that run, with nothing measured: on two H200, or on one in two parts."""
    p = on_card(mode="async", eta=4, response=Lengths(mean_tokens=125, cv=0.5, max_tokens=192),
                prompt=Lengths(mean_tokens=102, max_tokens=400))  # fmt: skip
    can = replace(p.capabilities, rollout_max_running=256, direct_updates=True)
    found = solve(assumed(replace(p if parts == 1 else halved(p), capabilities=can), "vllm"))
    assert isinstance(found, Feasible)
    return found


def test_the_turn_of_the_other_part_is_what_two_readings_leave() -> None:
    """Seconds that a step takes longer on one card than on two, less what half the card for kernels explains, over its decode steps
    at 256 running."""
    one_card, two = run_of_smollm2(2), run_of_smollm2(1)
    decode_steps = 128 * 125 / 256
    explained = one_card.prediction.step_s - two.prediction.step_s - decode_steps * ASSUMED_TURN_S
    longer = read_step_s("live-smollm2-1xh200.jsonl") - read_step_s("learn-smollm2-2xh200.jsonl")
    assert (longer - explained) / decode_steps == pytest.approx(ASSUMED_TURN_S, rel=0.2)


def test_with_nothing_measured_the_step_on_parts_is_predicted_as_well_as_that_of_two_cards() -> None:
    """0.80 s on one card and 0.58 s on two; both are predicted too fast."""
    for parts, name in ((2, "live-smollm2-1xh200.jsonl"), (1, "learn-smollm2-2xh200.jsonl")):
        assert 0.7 < run_of_smollm2(parts).prediction.step_s / read_step_s(name) < 1.25


def test_names_of_parts() -> None:
    assert (part_name("H200", 1), part_name("H200", 2)) == ("H200", HALF)
    assert CATALOGUE["H200"].in_parts(2).name == HALF
    for card, parts in (("H200", 1), ("H200", 8), ("A100 40GB", 2), ("my card 1/x", 1)):
        assert whole_of(part_name(card, parts)) == (card, parts)
