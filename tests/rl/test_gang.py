"""A trainer of several ranks: real processes over Gloo. It does what the trainer of one process does, also over deaths."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.rl.train.checkpoint import TrainerState, list_complete, load
from runtime.rl.types import CheckpointMark
from runtime.rl.weights import list_generations, read_generation
from runtime.rl.weights.sealed import TEMPORARY
from tests.rl import gang_rank
from tests.rl.gang_world import plan, run

pytestmark = [pytest.mark.timeout(600)]
HALVES, THIRDS = (0.5, 0.5), (0.5, 0.2, 0.3)


def state(made: dict[str, Any], step: int) -> TrainerState:
    return load(Path(made["folder"]) / "checkpoints", lineage=0, step=step)


def farthest(a: TrainerState, b: TrainerState) -> float:
    """Largest difference of a parameter or a moment."""
    assert a.tensors.keys() == b.tensors.keys()
    return max(float((a.tensors[n].double() - b.tensors[n].double()).abs().max()) for n in a.tensors)


def alone(made: dict[str, Any]) -> list[dict[str, float]]:
    """The same in this process, on one rank."""
    return gang_rank.lead(gang_rank.build(made, None), made)


def ran(made: dict[str, Any]) -> list[dict[str, float]]:
    codes, said = run(made)
    assert codes == [0] * len(codes), said
    return json.loads(Path(made["out"]).read_text())


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Three steps on one rank in float32, and their figures."""
    made = plan(tmp_path_factory.mktemp("one"), shares=(1.0,), until=3)
    return made, alone(made)


def test_two_ranks_do_what_one_does_and_one_and_three_go_on_from_them(tmp_path, straight):
    one, one_figures = straight
    two = plan(tmp_path / "two", shares=HALVES)
    figures = ran(two)
    assert farthest(state(two, 0), state(one, 0)) < 1e-6
    assert farthest(state(two, 1), state(one, 1)) < 1e-5
    for found, expected in zip(figures, one_figures, strict=False):
        for name in expected.keys() - {"gradients_s", "step_s", "micro_batches"}:
            assert found[name] == pytest.approx(expected[name], abs=1e-5), name
    folder = Path(two["folder"]) / "checkpoints" / "s00000001-l0"
    assert sorted(f.name for f in folder.iterdir()) == ["manifest.json", *(f"tensors-{r}.safetensors" for r in (0, 1))]
    (ref,) = list_generations(Path(two["folder"]) / "weights")
    for name, tensor in read_generation(ref).items():
        assert torch.equal(tensor, state(two, 1).params[name])

    # Any number of ranks takes the checkpoint of two.
    three, again = (plan(tmp_path / name, shares=THIRDS, restore=1, until=3) for name in ("three", "again"))
    for made in (three, again):
        shutil.copytree(Path(two["folder"]) / "checkpoints", Path(made["folder"]) / "checkpoints")
    ran(three)
    alone(again)
    by_three, by_one = state(three, 2), state(again, 2)
    assert farthest(by_three, by_one) < 1e-6
    assert farthest(by_one, state(one, 2)) < 1e-5
    assert by_three.facts == by_one.facts


def test_shares_as_unequal_as_they_may_be_change_nothing_in_float64(tmp_path):
    one, three = (
        plan(tmp_path / "a", shares=(1.0,), dtype="float64"),
        plan(tmp_path / "b", shares=THIRDS, dtype="float64"),
    )
    alone(one)
    ran(three)
    assert farthest(state(one, 1), state(three, 1)) < 1e-9


def test_a_bfloat16_model_keeps_float32_shards(tmp_path):
    one, two = (
        plan(tmp_path / "a", shares=(1.0,), dtype="bfloat16"),
        plan(tmp_path / "b", shares=HALVES, dtype="bfloat16"),
    )
    expected, found = alone(one), ran(two)
    assert {t.dtype for t in state(two, 1).tensors.values()} == {torch.float32}
    assert found[0]["loss"] == pytest.approx(expected[0]["loss"], abs=0.01)
    assert found[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=0.05)
    (ref,) = list_generations(Path(two["folder"]) / "weights")
    assert {t.dtype for t in read_generation(ref).values()} == {torch.bfloat16}


@pytest.mark.parametrize("method", ["train_step", "save_checkpoint"])
def test_a_rank_that_is_killed_ends_all_and_the_step_is_made_again(tmp_path, straight, method):
    """The second step dies with rank 1, in mid-step or in mid-checkpoint; the next gang goes on from what is whole."""
    one, _ = straight
    made = plan(tmp_path, shares=HALVES, dies=1, dies_in=method)
    codes, said = run(made)
    assert codes[1] == -9
    assert codes[0] == 1, said
    assert "Connection closed" in said or "lost the others" in said
    root = Path(made["folder"]) / "checkpoints"
    assert list_complete(root) == (CheckpointMark(step=0, ids_hash="h0"),)
    again = plan(tmp_path, shares=HALVES, epoch=2, restore=0)
    ran(again)
    assert farthest(state(again, 1), state(one, 1)) < 1e-5
    assert list(root.glob(f"{TEMPORARY}*")) == []


def test_two_ranks_write_beside_the_next_step_what_they_write_while_it_waits(tmp_path):
    waits, beside = (
        plan(tmp_path / name, shares=HALVES, until=3, beside=beside)
        for name, beside in (("waits", False), ("beside", True))
    )
    for made in (waits, beside):
        ran(made)
    for step in range(3):
        name = Path("checkpoints") / f"s{step:08d}-l0"
        one, two = (Path(made["folder"]) / name for made in (waits, beside))
        assert sorted(f.name for f in two.iterdir()) == sorted(f.name for f in one.iterdir())
        assert all((two / f.name).read_bytes() == f.read_bytes() for f in one.iterdir())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_disk_is_full_beside_the_training_ends_all_and_leaves_nothing(tmp_path, rank):
    made = plan(tmp_path, shares=HALVES, beside=True, full=rank)
    codes, said = run(made)
    assert codes == [1, 1], said
    assert "No space left" in said or "no space left" in said
    assert list_complete(tmp_path / "checkpoints") == ()
    again = plan(tmp_path, shares=HALVES, epoch=2, beside=True)
    ran(again)
    assert [m.step for m in list_complete(tmp_path / "checkpoints")] == [0, 1]
    assert list((tmp_path / "checkpoints").glob(f"{TEMPORARY}*")) == []


def test_who_does_not_come_is_named(tmp_path):
    codes, said = run(plan(tmp_path, shares=THIRDS, absent=[1], meet_s=10.0))
    assert codes == [1, 0, 1]
    assert "rank 1 (dev1) missing after 10 s" in said
