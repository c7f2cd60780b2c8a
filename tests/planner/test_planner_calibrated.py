"""Kinds from measured rates: a paced device is recovered from its engine and trainer, a card gets efficiencies and a floor."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.calibrated import ASSUMED_TURN_S, LEAST, MOST, bounded_line, calibrated, kernels_of, line
from planner.calibration import Calibration, EngineRate, KindTables, Provenance, TrainerRate, decode
from planner.calibration.sizes import REFERENCE_MODELS
from planner.catalogue import CATALOGUE
from planner.cluster import Device, DeviceKind
from planner.cost.context import context_of
from planner.cost.decode import ReplicaShape, decode_step_s, prefill_s
from planner.cost.model import CostModel
from planner.cost.network import Spread, local_link
from planner.cost.training import StageShape, TrainerShape
from planner.model import load_model_spec
from planner.problem import Problem
from planner.record import replace
from planner.workload import Lengths
from runtime.config.load import load_config
from runtime.config.problem import cluster_from_config, problem_from_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def problem_of(name: str) -> Problem:
    config = load_config(CONFIGS / f"{name}.toml").config
    return problem_from_config(config, cluster_from_config(config), load_model_spec(Path(config.model.path)))


LOCAL = problem_of("local")
PACED = Provenance(source="hexctl profile", how="paced")


def rates(step_s: float, sample_s: float, prefill: float, train: float) -> KindTables:
    """What a paced device of those speeds shows."""
    engine = tuple(
        EngineRate(
            phase="decode", model="m", params=1, tp=1, running=n, context=14, tokens_per_s=n / (step_s + sample_s * n)
        )
        for n in (8, 32, 128)
    )
    first = EngineRate(phase="prefill", model="m", params=1, tp=1, running=128, context=10, tokens_per_s=prefill)
    trainer = TrainerRate(
        model="m", params=1, devices=1, sequence_tokens=17, micro_batch=8, recompute=False, tokens_per_s=train
    )
    return KindTables(kind="wide", provenance=PACED, engine=(*engine, first), trainer=(trainer,))


def step_s(problem: Problem, name: str) -> float:
    cluster = problem.cluster
    spread = Spread(nodes=1, local=local_link(cluster, cluster.kinds[name]))
    stage = StageShape(kind=name, dp=1, tp=1, layers=problem.model.layers, spread=spread)
    cost = CostModel(problem).trainer(TrainerShape(stages=(stage,)))
    assert cost is not None
    return cost.train_s


@settings(max_examples=25, deadline=None)
@given(st.floats(0.02, 0.5), st.floats(0.0, 2e-3), st.floats(1e4, 1e5), st.floats(300, 3000))
def test_a_paced_kind_is_recovered_from_its_rates(step: float, sample: float, prefill: float, train: float) -> None:
    found = calibrated(LOCAL, Calibration(kinds=(rates(step, sample, prefill, train),)))
    model = CostModel(found)
    for running in (8, 32, 128):
        level = model.level(ReplicaShape(kind="wide", tp=1), running)
        each = prefill_s(model.context, ReplicaShape(kind="wide", tp=1), model.moments.prompt, model.moments.prompt2)
        # One rate of compute serves prefill and what a sample adds to a step: the slower of the two.
        assert each == pytest.approx(model.moments.prompt * max(1 / prefill, sample), rel=0.1)
        truth = step + max(sample, 1 / prefill) * running + running * each / model.moments.response
        assert running / level.rate_tokens_per_s == pytest.approx(truth, rel=0.05)
    floor = 4 * found.model.layers * found.cluster.kinds["wide"].launch_s  # passes over the layers, whatever the speed
    target = model.context.batch_tokens / train
    assert step_s(found, "wide") == pytest.approx(max(target, floor), rel=0.05)
    assert found.cluster.kinds["fast"] == LOCAL.cluster.kinds["fast"]


def test_a_card_never_takes_the_figures_of_a_paced_device_nor_the_other_way_round() -> None:
    measured = replace(rates(0.1, 0.0, 3e4, 2e3), provenance=Provenance(source="hexctl profile", how="measured"))
    assert calibrated(LOCAL, Calibration(kinds=(measured,))) is LOCAL
    cards = problem_of("h100-7")
    assert calibrated(cards, Calibration(kinds=(replace(rates(0.1, 0.0, 3e4, 2e3), kind="H100"),))) is cards
    assert calibrated(cards, Calibration()) is cards


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_a_card_gets_the_efficiencies_its_engine_and_trainer_reached(share: float) -> None:
    cards = problem_of("h100-7")
    modelled = calibrated(cards, Calibration(kinds=(card(1.0, 1.0),))).cluster.kinds["H100"]
    found = calibrated(cards, Calibration(kinds=(card(share, share),))).cluster.kinds["H100"]
    assert found.rollout_efficiency == pytest.approx(modelled.rollout_efficiency * share)
    assert found.train_efficiency < modelled.train_efficiency or share == 1.0
    fast = calibrated(cards, Calibration(kinds=(card(1e6, 1.0),))).cluster.kinds["H100"]
    assert fast.rollout_efficiency == MOST


def card(decode: float, train: float) -> KindTables:
    engine = EngineRate(
        phase="decode", model="reference-0.6b", params=1, tp=1, running=64, context=700, tokens_per_s=9000.0 * decode
    )
    trainer = TrainerRate(
        model="reference-0.6b", params=1, devices=1, sequence_tokens=1024, micro_batch=4, recompute=False,
        tokens_per_s=40_000.0 * train,
    )  # fmt: skip
    return KindTables(
        kind="H100",
        provenance=Provenance(source="hexctl profile", how="measured"),
        engine=(engine,),
        trainer=(trainer,),
    )


@given(st.floats(0.0, 10.0), st.floats(0.0, 1.0), st.lists(st.floats(1.0, 200.0), min_size=2, max_size=6, unique=True))
def test_a_line_is_recovered(a: float, b: float, xs: list[float]) -> None:
    if a + b < 1e-3 or max(xs) - min(xs) < 1.0:
        return
    found_a, found_b = line([(x, a + b * x) for x in xs])
    for x in xs:
        assert found_a + found_b * x == pytest.approx(a + b * x, rel=1e-6)
    assert math.isfinite(found_a)
    assert found_b >= 0


def test_rates_of_our_engine_count_once_and_those_of_others_stay_where_they_are() -> None:
    """The model of the problem is of a reference size: the efficiency must not come on top of a correction of its own."""
    cards = problem_of("h100-7")
    small = load_model_spec(CONFIGS / "models" / "qwen3-0.6b.json")
    cards = replace(cards, model=replace(small, dtype_bytes=2))
    ours = Calibration(kinds=(card(0.3, 1.0),))
    ours = Calibration(
        kinds=tuple(replace(t, engine=tuple(replace(e, params=small.params) for e in t.engine)) for t in ours.kinds)
    )
    kept = kernels_of(ours)
    assert kept.kinds[0].engine == ()
    found = calibrated(replace(cards, calibration=kept), ours)
    plain = CostModel(cards).level(ReplicaShape(kind="H100", tp=1), 64)
    level = CostModel(found).level(ReplicaShape(kind="H100", tp=1), 64)
    reached = found.cluster.kinds["H100"].rollout_efficiency
    assert level.rate_tokens_per_s == pytest.approx(plain.rate_tokens_per_s * reached)
    other = replace(ours.kinds[0], provenance=Provenance(source="vLLM on a desk", how="measured"))
    assert kernels_of(Calibration(kinds=(other,))).kinds == (other,)
    assert calibrated(cards, Calibration(kinds=(other,))) is cards


READINGS = Path(__file__).parent / "readings" / "h200.json"  # `hexctl profile` on a machine with two H200
RUNNING = (1, 16, 64, 256)


def two_h200(calibration: Calibration | None) -> Problem:
    """configs/local.toml on that machine, with one role a device as `hexctl up` runs it."""
    config = load_config(CONFIGS / "local.toml").config
    devices = tuple(Device(id=f"g{i}", kind="H200", node="n0", index=i) for i in range(2))
    cluster = replace(cluster_from_config(config), devices=devices, kinds={"H200": CATALOGUE["H200"]})
    problem = problem_from_config(config, cluster, load_model_spec(Path(config.model.path)), calibration=calibration)
    return problem if calibration is not None else bare(problem)


def bare(problem: Problem) -> Problem:
    """The problem without the floors that are assumed of cards nobody measured."""
    kinds = {
        n: replace(k, decode_floor_s=0.0, train_floor_s=0.0, train_fixed_s=0.0)
        for n, k in problem.cluster.kinds.items()
    }
    return replace(problem, cluster=replace(problem.cluster, kinds=kinds))


def at(problem: Problem, name: str, context: int) -> CostModel:
    """The cost model at a measured point: a reference model whose samples have that mean context."""
    prompt = Lengths(mean_tokens=context - 1, max_tokens=context)
    workload = replace(problem.workload, prompt=prompt, response=Lengths(mean_tokens=2, max_tokens=2))
    return CostModel(replace(problem, model=REFERENCE_MODELS[name], workload=workload))


def decoded(problem: Problem, kind: str, name: str, running: int, context: int = 600) -> float:
    """Predicted tokens/s of decode steps alone."""
    model = at(problem, name, context).context
    step = decode_step_s(model, ReplicaShape(kind=kind, tp=1), running)
    return running / step * problem.cluster.kinds[kind].rollout_efficiency


def host_bound(problem: Problem, kind: str, floor_s: float, efficiency: float) -> Calibration:
    """What an engine shows whose layers cost `floor_s` on top of the kernels, which reach `efficiency`."""
    points = []
    for name in ("reference-0.6b", "reference-1.7b"):
        for n in RUNNING:
            work = n / decoded(problem, kind, name, n)
            step = REFERENCE_MODELS[name].layers * floor_s + work / efficiency
            points.append(
                EngineRate(phase="decode", model=name, params=1, tp=1, running=n, context=600, tokens_per_s=n / step)
            )
    provenance = Provenance(source="hexctl profile", how="measured")
    return Calibration(kinds=(KindTables(kind=kind, provenance=provenance, engine=tuple(points)),))


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(["h100-7", "two h200"]), st.floats(0.0, 0.01), st.floats(0.05, 1.0))
def test_rates_of_a_floor_and_work_are_reproduced(where: str, floor_s: float, efficiency: float) -> None:
    problem, kind = (problem_of(where), "H100") if where == "h100-7" else (two_h200(None), "H200")
    measured = host_bound(problem, kind, floor_s, efficiency)
    found = calibrated(problem, measured)
    for r in measured.kinds[0].engine:
        assert decoded(found, kind, r.model, r.running) == pytest.approx(r.tokens_per_s, rel=0.15)
    fitted = found.cluster.kinds[kind]
    assert fitted.decode_floor_s / fitted.rollout_efficiency == pytest.approx(floor_s, rel=0.05, abs=1e-6)
    assert fitted.rollout_efficiency <= 1.0


def test_a_floor_worked_by_hand() -> None:
    """A step of 28 layers takes 28 x 1 ms and twice its modelled kernels: efficiency 1/2, and a floor that is 1 ms once whole
    steps are divided by it."""
    problem = two_h200(None)
    found = calibrated(problem, host_bound(problem, "H200", 1e-3, 0.5)).cluster.kinds["H200"]
    assert found.rollout_efficiency == pytest.approx(0.5, rel=0.01)
    assert found.decode_floor_s == pytest.approx(0.5e-3, rel=0.01)
    assert calibrated(problem, host_bound(problem, "H200", 0.0, 1.0)).cluster.kinds["H200"].decode_floor_s < 1e-9
    # The two layers of the local model then cost 2 ms a step, on top of what they did.
    model, shape = CostModel(problem).context, ReplicaShape(kind="H200", tp=1)
    quick = replace(problem, cluster=replace(problem.cluster, kinds={"H200": found}))
    before, after = decode_step_s(model, shape, 64), decode_step_s(CostModel(quick).context, shape, 64)
    assert after / found.rollout_efficiency == pytest.approx(2e-3 + 2 * before, rel=0.01)


def test_a_kind_without_curves_gets_a_floor_too() -> None:
    problem = two_h200(None)
    own = replace(CATALOGUE["H200"], name="own")
    devices = tuple(replace(d, kind="own") for d in problem.cluster.devices)
    problem = replace(problem, cluster=replace(problem.cluster, kinds={"own": own}, devices=devices))
    measured = host_bound(problem, "own", 1e-3, 0.5)
    found = calibrated(problem, measured)
    for r in measured.kinds[0].engine:
        assert decoded(found, "own", r.model, r.running) == pytest.approx(r.tokens_per_s, rel=0.01)


def test_slopes_stay_in_their_bounds() -> None:
    # Steps of 3 whatever the work: with a slope of at least 1 the floor takes the rest, 3 - 1 and 3 - 2 in the mean.
    assert bounded_line([(1.0, 3.0), (2.0, 3.0)], 1.0, 64.0) == (pytest.approx(1.5), 1.0)
    assert bounded_line([(1.0, 5.0), (2.0, 7.0)], 1.0, 64.0) == (pytest.approx(3.0), pytest.approx(2.0))
    assert bounded_line([(1.0, 0.1), (2.0, 0.2)], 1.0, 64.0) == (0.0, 1.0)


@given(
    st.lists(st.tuples(st.floats(1e-3, 10.0), st.floats(1e-3, 10.0)), min_size=2, max_size=8, unique_by=lambda p: p[0])
)
def test_a_floor_is_never_longer_than_the_longest_step(points: list[tuple[float, float]]) -> None:
    a, b = bounded_line(points, 1 / MOST, 1 / LEAST)
    assert 0 <= a <= max(y for _, y in points) * (1 + 1e-9)
    assert 1 / MOST <= b <= 1 / LEAST


def test_rates_of_one_batch_say_nothing_of_a_floor() -> None:
    cards = problem_of("h100-7")
    assert calibrated(cards, Calibration(kinds=(card(0.1, 1.0),))).cluster.kinds["H100"].decode_floor_s == 0.0


def test_the_readings_of_two_h200_predict_a_small_model_there() -> None:
    """A run of the local model on that machine decoded 17,131 tokens/s with about 92 of 128 running. Kernels alone say 49,000
    (2.9 times as many), one efficiency of the reference models 2,300 (an eighth)."""
    measured = decode(READINGS.read_text(encoding="utf-8"))
    before, after = two_h200(None), two_h200(measured)
    for running in (92, 128):
        plain = CostModel(before).level(ReplicaShape(kind="H200", tp=1), running).rate_tokens_per_s
        level = CostModel(after).level(ReplicaShape(kind="H200", tp=1), running).rate_tokens_per_s
        assert plain > 2 * 17_131
        assert 17_131 / 2 < level < 17_131 * 2
    kind = after.cluster.kinds["H200"]
    assert 1.3e-3 < kind.decode_floor_s < 2.3e-3  # the steps of 64 and 256 running take 1.4 and 2.3 ms a layer
    # The reference models themselves: 0.6B was slower than 1.7B there, which no floor and work can explain.
    for r in measured.kinds[0].engine:
        if r.phase == "decode" and r.running >= 64:
            assert decoded(after, "H200", r.model, r.running, r.context) == pytest.approx(r.tokens_per_s, rel=0.4)


def in_halves(problem: Problem) -> Problem:
    """The problem's cards as halves of as many cards."""
    kinds = {k.in_parts(2).name: k.in_parts(2) for k in problem.cluster.kinds.values()}
    devices = tuple(replace(d, kind=f"{d.kind} 1/2") for d in problem.cluster.devices)
    return replace(problem, cluster=replace(problem.cluster, kinds=kinds, devices=devices))


def test_half_a_card_is_what_the_card_was_measured_at_with_half_of_it_for_kernels() -> None:
    """A calibration of the card holds for its halves: kernels get half of the card, what the host does (floors, samplers) takes as long
    as ever, and a decode step waits for the other half's turn."""
    cards, rates_of_it = problem_of("h100-7"), Calibration(kinds=(card(0.5, 0.5),))
    whole, half = calibrated(cards, rates_of_it), calibrated(in_halves(cards), rates_of_it)
    [a], [b] = whole.cluster.kinds.values(), half.cluster.kinds.values()
    assert (b.name, b.base, b.card_share) == ("H100 1/2", "H100", 0.5)
    assert b.rollout_efficiency == pytest.approx(a.rollout_efficiency)
    assert b.train_efficiency == pytest.approx(a.train_efficiency, rel=0.02)  # half the memory, other micro-batches
    assert b.memory_bytes == a.memory_bytes / 2
    step_a, step_b, host = step_of(whole, a.name), step_of(half, b.name), host_s(whole, a)
    assert 0 < host < step_a
    turn = ASSUMED_TURN_S * b.rollout_efficiency  # which divides the whole step
    assert step_b - host - turn == pytest.approx(2 * (step_a - host))


def step_of(problem: Problem, kind: str) -> float:
    return decode_step_s(context_of(problem), ReplicaShape(kind=kind, tp=1), 32)


def host_s(problem: Problem, kind: DeviceKind) -> float:
    """Of a decode step of 32 samples: a floor for each layer and 20 us a sample."""
    return problem.model.layers * kind.decode_floor_s + 32 * 2e-5


def test_a_slow_half_is_still_of_its_card() -> None:
    h100 = CATALOGUE["H100"]
    half = h100.in_parts(2)
    slow = half.at(0.5, "H100 1/2 at 0.50")
    assert (slow.base, slow.measured_as, slow.card_share, slow.train_efficiency) == ("H100", "H100 1/2", 0.5, 0.5)
    assert (half.peak_flops, half.hbm_bytes_per_s) == (h100.peak_flops / 2, h100.hbm_bytes_per_s / 2)
    kernels = ("peak_flops", "hbm_bytes_per_s", "card_share")
    assert [getattr(half.undivided(), n) for n in kernels] == [getattr(h100, n) for n in kernels]
    assert h100.undivided() is h100
