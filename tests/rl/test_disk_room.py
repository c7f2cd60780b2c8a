"""A disk that fills up with checkpoints: older ones make way, the newest never does, and what lacks is said."""

from pathlib import Path

import pytest

from runtime.errors import WeightsError
from runtime.rl.train.checkpoint import list_complete
from runtime.rl.train.disk_room import MARGIN_BYTES, free_bytes, make_room
from runtime.rl.weights.sealed import LARGE_BYTES, TEMPORARY, remove_sealed
from tests.rl import gang_rank
from tests.rl.test_saving import a_trainer


class Disk:
    """So many bytes in all, of which the files below a folder take theirs."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def __call__(self, folder: Path) -> int:
        return self.capacity - used(folder)


def used(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def disk_of(checkpoints: float, tmp_path: Path) -> Disk:
    """A disk for so many, beside what is always kept free."""
    trainer = a_trainer(tmp_path / "one")
    trainer.train_step(gang_rank.batch(0))
    trainer.save_checkpoint("h0")
    return Disk(round(checkpoints * used(tmp_path / "one" / "checkpoints")) + MARGIN_BYTES)


@pytest.mark.parametrize("beside", [False, True])
def test_older_checkpoints_make_way(tmp_path: Path, beside: bool) -> None:
    """A disk of two and a half: of three that are kept where there is room, one makes way before each."""
    trainer = a_trainer(tmp_path, disk_bytes=disk_of(2.5, tmp_path))
    for step in range(5):
        trainer.train_step(gang_rank.batch(step))
        if beside:
            assert trainer.begin_checkpoint(f"h{step}")
            trainer.seal_checkpoint()
        else:
            trainer.save_checkpoint(f"h{step}")
        assert [m.step for m in list_complete(tmp_path / "checkpoints")] == [*range(5)][max(0, step - 1) : step + 1]


@pytest.mark.parametrize("beside", [False, True])
def test_the_newest_one_stands_where_there_is_no_room_for_another(tmp_path: Path, beside: bool) -> None:
    trainer = a_trainer(tmp_path, disk_bytes=disk_of(1.5, tmp_path))
    trainer.train_step(gang_rank.batch(0))
    trainer.save_checkpoint("h0")
    trainer.train_step(gang_rank.batch(1))
    with pytest.raises(WeightsError, match="the disk has no room for a checkpoint") as e:
        trainer.begin_checkpoint("h1") if beside else trainer.save_checkpoint("h1")
    assert "GB free" in str(e.value.got)
    assert e.value.hint
    assert [m.step for m in list_complete(tmp_path / "checkpoints")] == [0]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["s00000000-l0"]


def test_the_newest_of_every_lineage_stays(tmp_path: Path) -> None:
    """After a fork the checkpoint that the new lineage began from may be all that can be loaded."""
    root = tmp_path / "checkpoints"
    trainer = a_trainer(tmp_path)
    for step in range(2):
        trainer.train_step(gang_rank.batch(step))
        trainer.save_checkpoint(f"h{step}")
    forked = a_trainer(tmp_path)
    forked.restore(1, lineage=1, load_lineage=0)
    for step in (2, 3):
        forked.train_step(gang_rank.batch(step))
        forked.save_checkpoint(f"h{step}")
    broken = root / "s00000009-l0"
    broken.mkdir()
    with pytest.raises(WeightsError):
        make_room(root, 1, lambda _: 0)
    assert sorted(p.name for p in root.iterdir()) == ["s00000001-l0", "s00000003-l1", broken.name]


def test_what_is_being_removed_counts_as_room(tmp_path: Path) -> None:
    """No checkpoint makes way for the while that an older one takes to go."""
    root = tmp_path / "checkpoints"
    old = root / "s00000000-l9"
    old.mkdir(parents=True)
    with (old / "tensors").open("wb") as f:
        f.truncate(LARGE_BYTES)  # a hole
    for i in range(5000):  # they take a while to go
        (old / str(i)).touch()
    trainer = a_trainer(tmp_path)
    for step in range(2):
        trainer.train_step(gang_rank.batch(step))
        trainer.save_checkpoint(f"h{step}")

    def free(folder: Path) -> int:
        return 0 if any(p.name.startswith(TEMPORARY) for p in folder.iterdir()) else 2 * LARGE_BYTES

    remove_sealed(old, beside=True)
    make_room(root, LARGE_BYTES, free)
    assert [m.step for m in list_complete(root)] == [0, 1]


def test_the_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a" / "b") == pytest.approx(free_bytes(tmp_path), rel=0.05)
