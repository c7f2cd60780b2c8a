"""A run's own trainer, flow and engine on this machine's CPU, as little of them as possible."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.calibrated import calibrated
from planner.calibration import Calibration, KindTables, Provenance
from planner.cluster import Cluster, Device
from planner.model import load_model_spec
from planner.reached import met
from runtime.config.load import load_config
from runtime.config.problem import DEFAULT_LINK, kind_from_config, problem_from_config
from runtime.config.schema import Config
from runtime.errors import RunError
from runtime.profile.flowing import flow_turn_s
from runtime.profile.own import checkpoint_cost_s, run_engine_rates, run_trainer_rates, threads_of
from runtime.profile.steady import Course, OneGeneration, Steady, drive
from runtime.profile.turns import Turn, Turns, costs, turns
from runtime.rl.protocols import RolloutEngine
from runtime.rl.types import Lease, TrainBatch, WeightsRef
from runtime.rl.weights.generation import generation_folder

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def small(**weights: object) -> Config:
    """The local model, with batches of eight samples on an unpaced CPU."""
    config = load_config(ROOT / "configs" / "local.toml").config
    return config.model_copy(
        update={
            "algorithm": config.algorithm.model_copy(update={"prompts_per_step": 4, "responses_per_prompt": 2}),
            "sampling": config.sampling.model_copy(update={"max_running": 8}),
            "fleet": config.fleet.model_copy(update={"source": "cpu", "devices": (), "kinds": {}, "pacing": None}),
            "trainer": config.trainer.model_copy(update={"checkpoint_every_steps": 2}),
            "weights": config.weights.model_copy(update=weights),
        }
    )


def never() -> bool:
    return False


def test_turns_of_the_runs_trainer_tell_their_batch(tmp_path: Path) -> None:
    rates = run_trainer_rates(small(), CPU, seconds=0.1, quick=True, stop=never, folder=tmp_path)
    assert [(r.samples, r.rows) for r in rates] == [(8, 1), (2, 1), (8, 4)]
    spec = load_model_spec(small().model.path)
    for r in rates:
        assert (r.model, r.params, r.sequence_tokens, r.response_tokens) == (spec.name, spec.params, 17, 7)
        assert (r.attention, r.compiled, r.recompute) == ("sdpa", False, False)
        assert r.step_s is not None
        assert 1e-3 < r.step_s < 60
        assert r.checkpoint_s is not None
        assert r.checkpoint_s == rates[0].checkpoint_s, "of the run's own turns"
        assert 1e-4 < r.checkpoint_s < 60
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_checkpoint_costs_what_turns_stand_still_and_are_slower_for_it() -> None:
    def turn(seconds: float, stood_s: float = 0.0, of: int | None = None) -> Turn:
        return Turn(seconds=seconds, stood_s=stood_s, of=of)

    free = [turn(1.0)] * 4
    assert costs(free) == (1.0, 0.0)
    # The first also makes its memory. The second: 0.2 s for the copy, two turns 0.1 s slower, 0.05 s to seal it.
    first, second = [turn(9.0, 8.0, 1)], [turn(1.2, 0.2, 2), turn(1.1, 0.0, 2), turn(1.15, 0.05, 2)]
    turn_s, checkpoint_s = costs([*first, *free, *second])
    assert (turn_s, checkpoint_s) == (1.0, pytest.approx(0.45))
    assert costs([*free, *first])[1] == 8.0, "it is all there is"
    assert costs([turn(0.9, 0.2, 2), *free])[1] == 0.2, (
        "it costs what it stood still, whatever else made the turn quicker"
    )
    # While the training waits, each turn has its own: as before there was another way.
    assert costs([turn(1.5, 0.5, n) for n in range(2, 6)]) == (1.0, 0.5)


def test_a_checkpoint_that_is_written_for_longer_than_lies_between_two_is_waited_for() -> None:
    found = Turns(turn_s=0.9, checkpoint_s=0.2, write_s=6.0, rows=1.0, turns=9)
    assert checkpoint_cost_s(found, every=32, flow_s=0.1) == 0.2
    assert checkpoint_cost_s(found, every=4, flow_s=0.1) == pytest.approx(2.0)
    assert checkpoint_cost_s(Turns(turn_s=1, checkpoint_s=0, write_s=0, rows=1, turns=9), every=4, flow_s=0) is None


def test_a_publication_straight_to_engines_is_part_of_a_turn_as_far_as_one_end_goes(tmp_path: Path) -> None:
    rates = run_trainer_rates(small(path="direct"), CPU, seconds=0.1, quick=True, stop=never, folder=tmp_path)
    assert len(rates) == 3
    assert all(r.tokens_per_s > 0 for r in rates)


def test_a_disk_without_room_for_checkpoints_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(RunError, match="too full"):
        run_trainer_rates(small(), CPU, seconds=0.1, quick=True, stop=never, folder=tmp_path)


def test_flows_answers_take_time_and_none_without_a_task(tmp_path: Path) -> None:
    assert 1e-5 < flow_turn_s(small(), tmp_path, seconds=20.0, stop=never) < 10
    without = small().model_copy(update={"task": None})
    assert flow_turn_s(without, tmp_path, seconds=20.0, stop=never) == 0.0
    assert flow_turn_s(small(), tmp_path, seconds=20.0, stop=lambda: True) == 0.0


@pytest.mark.parametrize(("path", "way"), [("auto", "store"), ("direct", "direct")])
def test_the_runs_engine_is_measured_at_its_batches_and_with_new_weights_as_the_run_sends_them(
    tmp_path: Path, path: str, way: str
) -> None:
    """Prompts of 10 tokens, responses of 7 by the configuration: somebody at work has 3 or 4 of them, and what is computed anew is
    all of it but the last."""
    found = run_engine_rates(small(path=path), CPU, seconds=2.0, quick=True, stop=never, folder=tmp_path)
    decode = [r for r in found.engine if r.phase == "decode"]
    assert [(r.running, r.held) for r in decode] == [(2, 2), (8, 8)]
    assert all(11 <= r.context <= 15 for r in decode)
    (update,) = found.updates
    spec = load_model_spec(small().model.path)
    assert (update.path, update.model, update.params, update.engine) == (way, spec.name, spec.params, "torch")
    assert 1e-5 < update.swap_s < 10
    again = [r for r in found.engine if r.phase == "recompute"]
    assert all(11 <= r.context <= 15 and 4 <= r.running <= 8 and r.tokens_per_s > 10 for r in again)
    assert len(again) <= 1, "none where a busy machine hides it"
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_what_the_engine_showed_before_counts_for_as_long_as_it_lasted(tmp_path: Path) -> None:
    """A day at two seconds a step beside some tenths of a second at this machine's."""
    seen = []

    def before(engine: RolloutEngine, course: Course, ref: WeightsRef) -> list[Steady]:
        seen.append((course.running, ref.version))
        return [Steady(running=8.0, context=13.0, step_s=2.0, prefill_s=0.0, busy_s=86_400.0)]

    found = run_engine_rates(small(), CPU, seconds=1.0, quick=True, stop=never, folder=tmp_path, before=before)
    few, all_ = (r.tokens_per_s for r in found.engine if r.phase == "decode")
    assert seen == [(8, 0)]
    assert few > 5
    assert all_ == pytest.approx(4.0, rel=0.05)


def test_new_weights_that_do_not_reach_the_engine_are_told_of(tmp_path: Path) -> None:
    """Where the next generation would be written lies a link that leads nowhere."""

    def before(engine: RolloutEngine, course: Course, ref: WeightsRef) -> list[Steady]:
        generation_folder(Path(ref.path).parent, lineage=0, version=1).symlink_to("nowhere")
        return []

    found = run_engine_rates(small(), CPU, seconds=0.1, quick=True, stop=never, folder=tmp_path, before=before)
    assert [r.phase for r in found.engine if r.phase == "decode"] == ["decode", "decode"]
    assert found.updates == ()
    (note,) = found.notes
    assert note.startswith("new weights (store) did not reach the engine: ")


class Noted:
    """An engine, and the prompts that it was given."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self.prompts: set[tuple[int, ...]] = set()

    def add(self, leases: Sequence[Lease]) -> None:
        self.prompts |= {one.prompt_tokens for one in leases}
        self._engine.add(leases)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def test_no_bench_asks_for_what_an_engine_may_still_have_in_its_prefix_cache(tmp_path: Path) -> None:
    """An engine at work beside the trainer is driven several times, with weights of one generation."""
    seen: list[set[tuple[int, ...]]] = []

    def before(engine: RolloutEngine, course: Course, ref: WeightsRef) -> list[Steady]:
        for _ in range(2):
            noted: Any = Noted(engine)
            drive(noted, course, OneGeneration(ref), seconds=0.1)
            seen.append(noted.prompts)
        return []

    run_engine_rates(small(), CPU, seconds=0.1, quick=True, stop=never, folder=tmp_path, before=before)
    first, second = seen
    assert min(len(first), len(second)) >= 8
    assert not first & second


def test_a_plan_meets_the_rates_of_the_runs_engine(tmp_path: Path) -> None:
    config = small()
    rates = run_engine_rates(config, CPU, seconds=1.0, quick=True, stop=never, folder=tmp_path).engine
    assert [r.running for r in rates if r.phase == "decode"] == [2, 8]
    assert all(r.engine == "torch" and r.tokens_per_s > 1 for r in rates)
    provenance = Provenance(source="hexctl profile --quick", how="measured")
    tables = KindTables(kind="host-cpu", provenance=provenance, engine=rates)
    kind = kind_from_config(config, "host-cpu")
    cluster = Cluster(
        kinds={"host-cpu": kind},
        devices=(Device(id="d", kind="host-cpu", node="n"),),
        same_kind=DEFAULT_LINK,
        cross_kind=DEFAULT_LINK,
    )
    plain = problem_from_config(config, cluster, load_model_spec(config.model.path))
    found = calibrated(plain, Calibration(kinds=(tables,)))
    for m in met(found, found.cluster.kinds["host-cpu"], tables, "torch"):
        assert m.predicted_tokens_per_s == pytest.approx(m.measured_tokens_per_s, rel=0.01)


def test_a_trainer_that_fails_is_heard_of(tmp_path: Path) -> None:
    from runtime.paths import RunPaths
    from runtime.rl.train.factory import build_trainer

    paths = RunPaths(folder=tmp_path, short=tmp_path)

    def wrong(step: int) -> TrainBatch:
        return TrainBatch(step=step + 7, ids_hash="x", samples=())

    with pytest.raises(RunError, match="another version"):
        turns(build_trainer(small(), paths), wrong, seconds=0.1, weights=paths.weights, checkpoint_every=None)


def test_threads_are_those_of_a_run() -> None:
    assert (threads_of("run_trainer", CPU), threads_of("run_engine", CPU)) == (2, 1)
