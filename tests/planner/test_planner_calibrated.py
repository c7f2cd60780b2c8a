"""Kinds from measured rates: a paced device is recovered from its engine and trainer, a card gets two efficiencies."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.calibrated import MOST, calibrated, kernels_of, line
from planner.calibration import Calibration, EngineRate, KindTables, Provenance, TrainerRate
from planner.cost.decode import ReplicaShape, prefill_s
from planner.cost.model import CostModel
from planner.cost.network import Spread, local_link
from planner.cost.training import StageShape, TrainerShape
from planner.model import load_model_spec
from planner.problem import Problem
from planner.record import replace
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
