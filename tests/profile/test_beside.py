"""A run's trainer and engine at work beside each other, in processes of their own, on this machine's CPU."""

import time
from pathlib import Path

import psutil
import pytest
import torch
from test_own import small

from runtime.errors import RunError
from runtime.profile.agenda import Machine, Order, OwnRun
from runtime.profile.beside import EngineTask, Pace, batch_tokens, engine_at_work, measured_beside
from runtime.profile.measure import measure
from runtime.profile.turns import WARM_TURNS

CPU = torch.device("cpu")
TASK = EngineTask(seconds=2.0, quick=True)


def never() -> bool:
    return False


def test_an_engine_that_does_not_come_up_is_heard_of(tmp_path: Path) -> None:
    config = small()
    wrong = config.model_copy(update={"model": config.model.model_copy(update={"tokenizer": "nowhere"})})
    with pytest.raises(RunError) as caught:
        measured_beside(wrong, CPU, TASK, trainer_s=0.1, stop=never, folder=tmp_path)
    assert "nowhere" in str(caught.value)


@pytest.mark.kill
def test_an_engine_that_dies_at_last_does_not_take_the_trainers_points_along(tmp_path: Path) -> None:
    notes: list[str] = []
    phases: list[str] = []

    def phase(text: str) -> None:
        phases.append(text)
        if text == "the engine beside the trainer":
            (engine,) = [c for c in psutil.Process().children() if "runtime.profile.beside" in c.cmdline()]
            engine.kill()

    found = measured_beside(
        small(), CPU, TASK, trainer_s=0.1, stop=never, folder=tmp_path, phase=phase, note=notes.append
    )
    assert phases == ["the engine comes up", "the trainer beside the engine", "the engine beside the trainer"]
    assert list(found) == ["trainer"]
    assert len(found["trainer"]) == 3
    assert notes == ["the engine: the engine was not measured in time"]
    assert list(tmp_path.iterdir()) == []


def test_told_to_stop_it_measures_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    assert measured_beside(small(), CPU, TASK, trainer_s=0.1, stop=lambda: True, folder=tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


def test_the_trainer_beside_a_measured_engine_begins_a_turn_a_batch(tmp_path: Path) -> None:
    """Warm turns come at once; the engine is asked when they are over, and later ones wait for their time or for its answer."""
    with engine_at_work(small(), TASK, tmp_path) as engine:
        engine.wait_ready(never)
        assert engine.tokens_per_s > 1
        pace, began = Pace(engine, 0.2), time.monotonic()
        for step in range(WARM_TURNS + 3):
            pace(step)
            assert engine.done.is_set() or time.monotonic() - began >= 0.2 * (step - WARM_TURNS)
        assert engine.done.wait(120)
        last = time.monotonic()
        pace(10_000)
        assert time.monotonic() - last < 60, "nobody waits for an engine that was measured"
        assert engine.tables()["engine"]


def test_a_batch_is_the_runs() -> None:
    assert batch_tokens(small()) == 8 * small().lengths.response_mean


def test_both_roles_are_measured_while_the_other_works(tmp_path: Path) -> None:
    run = OwnRun(model="m", engine="torch", params=1e6)
    order = Order(quick=True, run=run, only=("run_beside",))
    found = measure(Machine(host="here", cores=2), order, config=small(), today="2026-01-02", folder=tmp_path)
    assert found.notes == ()
    [tables] = found.tables
    assert (tables.kind, tables.provenance.device) == ("host-cpu", "CPU")
    assert [(r.samples, r.rows) for r in tables.trainer] == [(8, 1), (2, 1), (8, 4)]
    assert [r.running for r in tables.engine if r.phase == "decode"] == [2, 8]
    assert all(r.tokens_per_s > 1 for r in (*tables.trainer, *tables.engine))
    assert [u.path for u in tables.updates] == ["store"]
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
