"""A file of tensors: the library reads what we write, and it is on disk portion by portion."""

import os
import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from runtime.errors import WeightsError
from runtime.rl.weights.sealed import LARGE_BYTES, TEMPORARY, remove_sealed, wait_removed
from runtime.rl.weights.tensor_file import TensorFile, TensorShape, bytes_of, write_file

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
]


@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 9), st.sampled_from([*DTYPES, torch.uint8, torch.bool])), max_size=8
    )
)
@settings(max_examples=50, deadline=None)
def test_the_library_reads_what_is_written(
    shapes: list[tuple[int, int, torch.dtype]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    generator = torch.Generator().manual_seed(len(shapes))
    tensors = {f"t{i}": torch.randint(0, 2, (a, b), generator=generator).to(d) for i, (a, b, d) in enumerate(shapes)}
    tensors["scalar"] = torch.tensor(1.5)
    path = tmp_path_factory.mktemp("f") / "tensors.safetensors"
    write_file(path, tensors)
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


@pytest.mark.parametrize("portion", [1, 7, 64, 10_000])
def test_portions_of_any_size_make_the_same_file(tmp_path: Path, portion: int) -> None:
    tensors = {"a": torch.arange(50, dtype=torch.int32), "b": torch.arange(7, dtype=torch.uint8)}
    layout = {n: TensorShape(shape=tuple(t.shape), dtype=t.dtype) for n, t in tensors.items()}
    with TensorFile(tmp_path / "f", layout, portion_bytes=portion) as file:
        for tensor in tensors.values():
            file.write(bytes_of(tensor))
    write_file(tmp_path / "whole", tensors)
    assert (tmp_path / "f").read_bytes() == (tmp_path / "whole").read_bytes()


def test_no_more_than_two_portions_are_ever_on_their_way(tmp_path: Path) -> None:
    written: list[tuple[int, int]] = []  # before and after a sync

    def sync(descriptor: int) -> None:
        before = os.fstat(descriptor).st_size
        os.fsync(descriptor)
        written.append((before, os.fstat(descriptor).st_size))

    tensor = torch.arange(100_000, dtype=torch.uint8)
    layout = {"a": TensorShape(shape=tuple(tensor.shape), dtype=tensor.dtype)}
    with TensorFile(tmp_path / "f", layout, portion_bytes=1000, sync=sync) as file:
        file.write(bytes_of(tensor))
    header = len((tmp_path / "f").read_bytes()) - 100_000
    assert len(written) == 101, "each portion, and what is left at the end"
    for number, (before, after) in enumerate(written[:-1], start=1):
        assert before >= number * 1000
        assert after <= header + (number + 1) * 1000


def test_a_full_disk_is_an_error_whichever_portion_meets_it() -> None:
    full = Path("/dev/full")
    if not (full.exists() and stat.S_ISCHR(full.stat().st_mode)):
        pytest.skip("no /dev/full here")
    layout = {"a": TensorShape(shape=(1000,), dtype=torch.uint8)}
    for portion in (10, 10_000):
        with pytest.raises(OSError, match="No space left"), TensorFile(full, layout, portion_bytes=portion) as file:
            file.write(bytes_of(torch.zeros(1000, dtype=torch.uint8)))


def test_a_large_folder_is_out_of_sight_at_once_and_gone_soon(tmp_path: Path) -> None:
    folder = tmp_path / "v1"
    folder.mkdir()
    with (folder / "tensors").open("wb") as f:
        os.truncate(f.fileno(), LARGE_BYTES)  # a hole: large for whoever asks, nothing on the disk
    remove_sealed(folder, beside=True)
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(TEMPORARY)] == []
    wait_removed()
    assert list(tmp_path.iterdir()) == []


def test_complex_numbers_are_refused_before_there_is_a_file(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="complex64"):
        write_file(tmp_path / "f", {"a": torch.zeros(2, dtype=torch.complex64)})
    assert list(tmp_path.iterdir()) == []
