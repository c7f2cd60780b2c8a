"""Checkpoints: whatever a crash leaves behind, the last complete one is found and loads."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planner.record import replace
from runtime.errors import WeightsError
from runtime.rl.train.checkpoint import LARGE_BYTES, TrainerState, checkpoint_folder, list_complete, load, save
from runtime.rl.types import CheckpointMark
from runtime.rl.weights.sealed import MANIFEST, TEMPORARY, TENSORS


def a_state(step: int, *, lineage: int = 0, size: int = 3) -> TrainerState:
    r = torch.Generator().manual_seed(step)

    def some() -> dict[str, torch.Tensor]:
        return {"model.a.weight": torch.randn(size, 2, generator=r), "model.b.weight": torch.randn(4, generator=r)}

    return TrainerState(
        lineage=lineage,
        step=step,
        ids_hash=f"ids-{step}",
        seed=5,
        optimiser_steps=step + 1,
        params=some(),
        exp_avg=some(),
        exp_avg_sq=some(),
    )


def mark(step: int, lineage: int = 0) -> CheckpointMark:
    return CheckpointMark(step=step, ids_hash=f"ids-{step}", lineage=lineage)


def same(a: TrainerState, b: TrainerState) -> bool:
    if (a.lineage, a.step, a.ids_hash, a.seed, a.optimiser_steps) != (
        b.lineage,
        b.step,
        b.ids_hash,
        b.seed,
        b.optimiser_steps,
    ):
        return False
    return all(
        getattr(a, g).keys() == getattr(b, g).keys()
        and all(torch.equal(t, getattr(b, g)[n]) for n, t in getattr(a, g).items())
        for g in ("params", "exp_avg", "exp_avg_sq")
    )


def test_a_checkpoint_loads_as_it_was_saved(tmp_path):
    folder = save(tmp_path, a_state(11))
    assert folder == checkpoint_folder(tmp_path, lineage=0, step=11)
    assert list_complete(tmp_path) == (mark(11),)
    assert same(load(tmp_path, lineage=0, step=11), a_state(11))


def test_three_are_kept_a_lineage(tmp_path):
    save(tmp_path, a_state(0, lineage=1))
    for step in range(6):
        save(tmp_path, a_state(step))
    assert list_complete(tmp_path) == (mark(3), mark(4), mark(5), mark(0, lineage=1))


def test_a_lineage_with_three_of_its_own_needs_no_earlier_one(tmp_path):
    save(tmp_path, a_state(0))
    for step in range(1, 4):
        save(tmp_path, a_state(step, lineage=1))
        assert (mark(0) in list_complete(tmp_path)) == (step < 3)


def test_the_same_step_again_replaces_the_attempt(tmp_path):
    save(tmp_path, a_state(3))
    save(tmp_path, replace(a_state(3), ids_hash="other", params=a_state(9).params))
    assert list_complete(tmp_path) == (CheckpointMark(step=3, ids_hash="other"),)


@given(data=st.data())
def test_killed_at_any_point_of_a_write_the_one_before_stands(tmp_path_factory, data):
    """A write is: a temporary folder, a growing tensors file, a growing manifest, a rename. Stop after any of it."""
    root = tmp_path_factory.mktemp("c")
    save(root, a_state(4))
    whole = save(root, a_state(5))
    tensors, manifest = (whole / TENSORS).read_bytes(), (whole / MANIFEST).read_bytes()
    shutil.rmtree(whole)
    cut = data.draw(st.integers(0, len(tensors) + len(manifest)))
    # Before the rename under the temporary name; the final name stands for a disk that reordered rename and data.
    folder = whole if data.draw(st.booleans()) else root / f"{TEMPORARY}{whole.name}-0"
    folder.mkdir()
    (folder / TENSORS).write_bytes(tensors[:cut])
    if cut >= len(tensors):
        (folder / MANIFEST).write_bytes(manifest[: cut - len(tensors)])
    complete = folder == whole and cut >= len(tensors) + len(manifest) - 1  # the last byte is white space or a brace
    if not complete:
        assert list_complete(root) == (mark(4),)
        assert same(load(root, lineage=0, step=4), a_state(4))
    # The step is made again over the remains.
    save(root, a_state(5))
    assert list_complete(root) == (mark(4), mark(5))
    assert same(load(root, lineage=0, step=5), a_state(5))


def test_garbage_is_ignored_and_named(tmp_path, caplog):
    save(tmp_path, a_state(1))
    checkpoint_folder(tmp_path, lineage=0, step=7).mkdir()
    broken = save(tmp_path, a_state(2))
    body = bytearray((broken / TENSORS).read_bytes())
    body[-1] ^= 1
    (broken / TENSORS).write_bytes(bytes(body))
    moved = save(tmp_path, a_state(3))
    moved.rename(checkpoint_folder(tmp_path, lineage=0, step=4))
    (tmp_path / "readme").write_text("not a checkpoint")
    with caplog.at_level(logging.WARNING):
        assert list_complete(tmp_path) == (mark(1),)
    named = " ".join(r.getMessage() for r in caplog.records)
    assert all(name in named for name in ("s00000007-l0", "s00000002-l0", "s00000004-l0"))


def test_a_large_file_is_checked_to_its_last_byte(tmp_path):
    """Several threads share its tensors."""
    big = {f"t{i}": torch.full((2**20,), float(i)) for i in range(5)}
    state = replace(a_state(1), params=big, exp_avg=big, exp_avg_sq=big)
    folder = save(tmp_path, state)
    path = folder / TENSORS
    assert path.stat().st_size > LARGE_BYTES
    assert list_complete(tmp_path) == (mark(1),)
    with path.open("r+b") as f:
        f.seek(-1, 2)
        last = f.read(1)
        f.seek(-1, 2)
        f.write(bytes([last[0] ^ 1]))
    assert list_complete(tmp_path) == ()


def test_loading_what_is_not_there_or_not_whole_is_refused(tmp_path):
    with pytest.raises(WeightsError, match="s00000000-l0"):
        load(tmp_path, lineage=0, step=0)
    folder = save(tmp_path, a_state(1))
    folder.rename(checkpoint_folder(tmp_path, lineage=0, step=2))
    with pytest.raises(WeightsError, match="another step"):
        load(tmp_path, lineage=0, step=2)
    lacking = replace(a_state(8), exp_avg={})
    save(tmp_path, lacking)
    with pytest.raises(WeightsError, match="lacks moments"):
        load(tmp_path, lineage=0, step=8)


def test_a_weights_folder_is_no_checkpoint(tmp_path):
    from runtime.rl.weights import write_generation

    ref = write_generation(tmp_path, {"a": torch.ones(2)}, lineage=0, version=1)
    Path(ref.path).rename(checkpoint_folder(tmp_path, lineage=0, step=0))
    assert list_complete(tmp_path) == ()


def test_listing_an_absent_folder_is_empty(tmp_path):
    assert list_complete(tmp_path / "absent") == ()
