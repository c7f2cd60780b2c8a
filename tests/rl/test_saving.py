"""Checkpoints written beside the training: the same bytes, the same memory each time, no more of it than the host has."""

import logging
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from runtime.config.schema import AlgorithmSection
from runtime.errors import RunError
from runtime.rl.model import DTYPES, DecoderConfig, build_seeded
from runtime.rl.train import checkpoint
from runtime.rl.train.checkpoint import StepFacts, list_complete
from runtime.rl.train.host_memory import available_bytes, limits_left
from runtime.rl.train.saving import HOST_SHARE, Saver, short_host
from runtime.rl.train.snapshot import Snapshot, bytes_of
from runtime.rl.train.trainer import TorchTrainer
from runtime.rl.types import CheckpointMark
from runtime.rl.weights.sealed import TensorEntry
from tests.rl import gang_rank


class Gated:
    """A disk that writes once it may, and remembers whose memory it was given."""

    def __init__(self) -> None:
        self.may, self.given = threading.Event(), list[int]()

    def __call__(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorEntry]:
        assert self.may.wait(60)
        self.given.append(min(t.data_ptr() for t in tensors.values()))
        return checkpoint.write(path, tensors)


def a_trainer(folder: Path, dtype: str = "float32", **changes: object) -> TorchTrainer:
    return TorchTrainer(
        build_seeded(DecoderConfig.from_hf(gang_rank.shapes()), 0, DTYPES[dtype]),
        algorithm=AlgorithmSection(learning_rate=1e-2),
        temperature=1.0,
        checkpoints=folder / "checkpoints",
        weights=folder / "weights",
        **changes,  # type: ignore[arg-type]
    )


def files(folder: Path) -> dict[str, bytes]:
    """Every file of all checkpoints."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_what_is_written_beside_later_steps_is_the_step_it_was_begun_after(tmp_path: Path, dtype: str) -> None:
    """Byte for byte: steps 0 and 2 are written while later ones are made, in the same memory."""
    one, two, disk = tmp_path / "one", tmp_path / "two", Gated()
    waits, beside = a_trainer(one, dtype), a_trainer(two, dtype, write=disk)
    for step in range(5):
        for trainer in (waits, beside):
            trainer.train_step(gang_rank.batch(step))
        if step in (0, 2):
            waits.save_checkpoint(f"h{step}")
            disk.may.clear()
            assert beside.begin_checkpoint(f"h{step}")
        else:
            assert list_complete(two / "checkpoints") == list_complete(one / "checkpoints")[: step // 2]
            disk.may.set()
            if step % 2:
                assert beside.seal_checkpoint() > 0
    assert files(two / "checkpoints") == files(one / "checkpoints")
    assert len(files(two / "checkpoints")) == 4
    assert len(disk.given) == 2
    assert len(set(disk.given)) == 1, "the memory was used again"
    again = a_trainer(two, dtype)
    again.restore(2, lineage=0)
    for step in (3, 4):
        again.train_step(gang_rank.batch(step))
    assert all(torch.equal(p, beside.master_parameters()[n]) for n, p in again.master_parameters().items())


def test_one_at_a_time_and_none_before_the_first_step(tmp_path: Path) -> None:
    disk = Gated()
    trainer = a_trainer(tmp_path, write=disk)
    with pytest.raises(RunError, match="no step"):
        trainer.begin_checkpoint("x")
    with pytest.raises(RunError, match="no checkpoint was begun"):
        trainer.seal_checkpoint()
    trainer.train_step(gang_rank.batch(0))
    assert not trainer.checkpoint_written
    trainer.begin_checkpoint("h0")
    for again in (trainer.begin_checkpoint, trainer.save_checkpoint):
        with pytest.raises(RunError, match="still being written"):
            again("h0")
    disk.may.set()
    trainer.seal_checkpoint()
    assert trainer.complete_checkpoints() == (CheckpointMark(step=0, ids_hash="h0"),)


def test_the_newest_complete_one_stands_while_another_is_written(tmp_path: Path) -> None:
    disk = Gated()
    trainer = a_trainer(tmp_path, write=disk)
    for step in range(6):
        disk.may.clear()
        trainer.train_step(gang_rank.batch(step))
        trainer.begin_checkpoint(f"h{step}")
        assert [m.step for m in trainer.complete_checkpoints()] == list(range(max(0, step - 3), step))
        disk.may.set()
        trainer.seal_checkpoint()


def test_a_write_that_was_dropped_or_failed_leaves_nothing_and_another_may_begin(tmp_path: Path) -> None:
    disk = Gated()
    trainer = a_trainer(tmp_path, write=disk)
    trainer.train_step(gang_rank.batch(0))
    trainer.begin_checkpoint("h0")
    trainer.drop_checkpoint()
    assert list((tmp_path / "checkpoints").iterdir()) == []
    disk.may.set()
    trainer.begin_checkpoint("h0")
    trainer.seal_checkpoint()
    assert trainer.complete_checkpoints() == (CheckpointMark(step=0, ids_hash="h0"),)
    trainer.drop_checkpoint()

    def full(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorEntry]:
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    other = a_trainer(tmp_path / "full", write=full)
    other.train_step(gang_rank.batch(0))
    other.begin_checkpoint("h0")
    with pytest.raises(OSError, match="no space left"):
        other.seal_checkpoint()
    assert list((tmp_path / "full" / "checkpoints").iterdir()) == []


def test_a_host_without_room_saves_while_the_training_waits_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = a_trainer(tmp_path, host_bytes=lambda: 1000)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            trainer.train_step(gang_rank.batch(step))
            assert not trainer.begin_checkpoint(f"h{step}")
            trainer.save_checkpoint(f"h{step}")
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.startswith("checkpoints are written while the training waits: a copy of the state takes 0.0 GB")
    assert [m.step for m in trainer.complete_checkpoints()] == [0, 1, 2]


def test_ranks_of_one_host_share_its_memory() -> None:
    assert short_host([("a", 40, 100), ("b", 85, 100)]) is None
    assert short_host([("a", 40, 100), ("a", 40, 95)]) is None
    said = short_host([("b", 10, 100), ("a", 50 * 10**9, 10**11), ("a", 50 * 10**9, 10**11)])
    assert said == "a copy of the state takes 100.0 GB, host a has 100.0 GB left"
    assert short_host([("a", 91, 100)]) is not None, f"more than {HOST_SHARE:.0%}"


def test_a_snapshot_takes_what_it_says_and_keeps_every_shape() -> None:
    r = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.randn(3, 5, generator=r),
        "b": torch.randn(7, generator=r, dtype=torch.float64),
        "c": torch.tensor(2.5),
        "d": torch.randn(4, 6, generator=r)[:, ::2],
        "e": torch.empty(0, 3),
    }
    snapshot = Snapshot(tensors)
    snapshot.take(tensors)
    before = {n: t.clone() for n, t in tensors.items()}
    for t in tensors.values():
        t.add_(1)
    for name, t in snapshot.tensors.items():
        assert (t.shape, t.dtype) == (before[name].shape, before[name].dtype)
        assert torch.equal(t, before[name])
    assert bytes_of(tensors) == 64 + 64 + 64 + 64


def test_limits_of_control_groups_of_both_versions(tmp_path: Path) -> None:
    def group(folder: str, names: tuple[str, str], most: str, used: int, cached: str) -> None:
        made = tmp_path / folder
        made.mkdir(parents=True, exist_ok=True)
        limit, use = names
        (made / limit).write_text(f"{most}\n")
        (made / use).write_text(f"{used}\n")
        (made / "memory.stat").write_text(f"anon 5\n{cached}\n")

    one, two = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
    group("user/run", two, "1000", 700, "inactive_file 200")
    group("user", two, "max", 900, "inactive_file 0")
    group(".", two, "5000", 6000, "inactive_file 0")
    group("memory/box", one, "400", 100, "total_inactive_file 50")
    group("elsewhere", two, "1", 0, "inactive_file 0")
    mine = tmp_path / "cgroup"
    mine.write_text("4:memory:/box\n3:cpuset:/elsewhere\n0::/user/run\n")
    assert limits_left(tmp_path, mine) == [350, 500, 0]
    assert limits_left(tmp_path / "none", mine) == []
    assert limits_left(tmp_path, tmp_path / "none") == []
    assert available_bytes() > 10**6


@pytest.mark.gpu
def test_a_card_is_copied_into_locked_memory(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    tensors = {n: torch.randn(1000, 1000, device="cuda") for n in "abc"}
    facts = StepFacts(lineage=0, step=0, ids_hash="h", seed=0, optimiser_steps=1)
    snapshot = Snapshot(tensors)
    assert all(t.is_pinned() for t in snapshot.tensors.values())
    saver = Saver(tmp_path / "c")
    assert saver.begin(facts, tensors)
    before = {n: t.cpu() for n, t in tensors.items()}
    for t in tensors.values():
        t.zero_()
    saver.seal()
    Saver(tmp_path / "d").save(facts, before)
    assert files(tmp_path / "c") == files(tmp_path / "d")
    address = snapshot.tensors["a"]
    del snapshot
    assert not address.is_pinned()
