"""Finding the library, and which cards a program may see."""

import ctypes
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.telemetry.library import CANDIDATES, candidates, is_stub, load_first, mapped_path
from runtime.telemetry.nvml import NvmlProblem
from runtime.telemetry.visible import visible

UUIDS = ("GPU-aa11", "GPU-ab22", "GPU-cc33")


@pytest.mark.parametrize("present", CANDIDATES)
def test_the_one_name_that_is_there_is_found(present: str) -> None:
    def load(name: str) -> str:
        if name != present:
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")
        return "loaded"

    assert load_first(candidates(None), load) == (present, "loaded")


def test_nothing_there_names_everything_tried() -> None:
    with pytest.raises(NvmlProblem) as caught:
        load_first(("/nowhere/libnvidia-ml.so.1", "/nowhere/else.so"), ctypes.CDLL)
    assert caught.value.state == "no-library"
    assert "/nowhere/libnvidia-ml.so.1" in caught.value.message
    assert "/nowhere/else.so" in caught.value.message


def test_an_override_is_tried_alone() -> None:
    assert candidates("/opt/x.so") == ("/opt/x.so",)


def test_a_text_file_is_no_library(tmp_path: Path) -> None:
    fake = tmp_path / "libnvidia-ml.so.1"
    fake.write_text("not ELF")
    with pytest.raises(NvmlProblem):
        load_first((str(fake),), ctypes.CDLL)


def test_the_stub_is_told_by_its_real_path() -> None:
    maps = (
        "7f00-7f01 r-xp 00000000 08:01 42    /usr/lib/x86_64-linux-gnu/libc.so.6\n"
        "7f02-7f03 r-xp 00000000 08:01 43    /usr/local/cuda/targets/x86_64-linux/lib/stubs/libnvidia-ml.so\n"
    )
    assert is_stub(mapped_path(maps))
    assert not is_stub(mapped_path(maps.replace("/stubs", "")))
    assert mapped_path("") == ""


@pytest.mark.parametrize(
    ("variable", "seen"),
    [
        (None, UUIDS),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0", ("GPU-aa11",)),
        ("2,0", ("GPU-cc33", "GPU-aa11")),
        (" 1 , 2 ", ("GPU-ab22", "GPU-cc33")),
        ("0,7,1", ("GPU-aa11",)),
        ("0,-1,1", ("GPU-aa11",)),
        ("0,0", ()),
        ("GPU-cc33", ("GPU-cc33",)),
        ("GPU-c", ("GPU-cc33",)),
        ("GPU-a", ()),
        ("GPU-cc33,GPU-zz", ("GPU-cc33",)),
        ("GPU-cc33,2", ()),
        ("MIG-1234", ()),
        ("--1", ()),
        ("0,--1,1", ("GPU-aa11",)),
        ("\u00b2", ()),  # a digit to Python, none to CUDA
        ("all", ()),
    ],
)
def test_visible_devices_as_cuda_reads_them(variable: str | None, seen: tuple[str, ...]) -> None:
    assert visible(variable, UUIDS) == seen


@given(st.text(alphabet="0123-,GPUabc ", max_size=30))
def test_whatever_is_written_only_real_cards_come_out(variable: str) -> None:
    seen = visible(variable, UUIDS)
    assert set(seen) <= set(UUIDS)
    assert len(seen) == len(set(seen))


def test_an_index_is_a_cards_and_an_instance_has_its_name() -> None:
    """Instances lie behind their card in PCI order; CUDA counts cards."""
    here = ("GPU-aa11", "MIG-1", "MIG-2", "GPU-ab22")
    assert visible("1", here) == ("GPU-ab22",)
    assert visible("2", here) == ()
    assert visible("MIG-2", here) == ("MIG-2",)
    assert visible(None, here) == here
