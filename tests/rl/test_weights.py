"""Weight generations: written whole or not at all, read whole or refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from planner.record import replace
from runtime.errors import WeightsError
from runtime.rl.weights import collect, generation_folder, list_generations, read_generation, write_generation
from runtime.rl.weights.sealed import MANIFEST, TEMPORARY, TENSORS, sweep, tensor_sha256


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    r = torch.Generator().manual_seed(seed)
    return {
        "model.embed.weight": torch.randn(7, 4, generator=r),
        "model.norm.weight": torch.randn(4, generator=r, dtype=torch.float64),
        "lm_head.weight": torch.randn(7, 4, generator=r).bfloat16(),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
    }


def test_what_is_written_is_read_bit_by_bit(tmp_path):
    tensors = some_tensors()
    tensors["transposed"] = torch.arange(12.0).reshape(3, 4).T  # not contiguous
    ref = write_generation(tmp_path, tensors, lineage=2, version=12)
    assert (ref.lineage, ref.version, ref.path) == (2, 12, str(tmp_path / "v00000012-l2"))
    read = read_generation(ref)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    manifest = json.loads((Path(ref.path) / MANIFEST).read_text())
    assert manifest["facts"] == {"lineage": 2, "version": 12, "base": None}
    assert manifest["digest"] == ref.digest
    assert not list(tmp_path.glob(f"{TEMPORARY}*"))


def test_rollout_dtype_is_cast_at_write_and_integers_are_not(tmp_path):
    tensors = {"w": torch.randn(5, 3), "steps": torch.tensor([1, 2])}
    read = read_generation(write_generation(tmp_path, tensors, lineage=0, version=1, dtype=torch.bfloat16))
    assert torch.equal(read["w"], tensors["w"].bfloat16())
    assert read["steps"].dtype == torch.int64


def test_same_bits_again_are_the_same_generation_other_bits_are_refused(tmp_path):
    tensors = some_tensors()
    tensors["nan"] = torch.tensor([float("nan")])
    ref = write_generation(tmp_path, tensors, lineage=0, version=3)
    inode = (Path(ref.path) / TENSORS).stat().st_ino
    assert write_generation(tmp_path, tensors, lineage=0, version=3) == ref
    assert (Path(ref.path) / TENSORS).stat().st_ino == inode
    with pytest.raises(WeightsError, match="holds other weights"):
        write_generation(tmp_path, some_tensors(1), lineage=0, version=3)
    assert read_generation(ref).keys() == tensors.keys()


def test_digest_depends_on_number_name_shape_dtype_and_bits(tmp_path):
    base = {"a": torch.zeros(4)}
    variants = [
        (base, 0, 1),
        (base, 0, 2),
        (base, 1, 1),
        ({"b": torch.zeros(4)}, 0, 1),
        ({"a": torch.zeros(2, 2)}, 0, 1),
        ({"a": torch.zeros(4, dtype=torch.int32)}, 0, 1),
        ({"a": torch.tensor([0.0, 0.0, -0.0, 0.0])}, 0, 1),
    ]
    digests = {
        write_generation(tmp_path / str(i), t, lineage=lineage, version=version).digest
        for i, (t, lineage, version) in enumerate(variants)
    }
    assert len(digests) == len(variants)


def damage_missing_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def damage_missing_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def damage_missing_tensors(folder: Path) -> None:
    (folder / TENSORS).unlink()


def damage_manifest_not_json(folder: Path) -> None:
    (folder / MANIFEST).write_text("{")


def damage_manifest_of_another_form(folder: Path) -> None:
    (folder / MANIFEST).write_text("[1, 2]")


def damage_manifest_format(folder: Path) -> None:
    edit(folder, lambda m: m.update(format=99))


def damage_claimed_hash(folder: Path) -> None:
    edit(folder, lambda m: m["tensors"]["scalar"].update(sha256="0" * 64))


def damage_facts(folder: Path) -> None:
    edit(folder, lambda m: m["facts"].update(version=13))


def damage_value(folder: Path) -> None:
    rewrite(folder, lambda t: t | {"scalar": torch.tensor(3.25)})


def damage_shape(folder: Path) -> None:
    rewrite(folder, lambda t: t | {"model.embed.weight": t["model.embed.weight"].reshape(4, 7)})


def damage_dtype(folder: Path) -> None:
    rewrite(folder, lambda t: t | {"scalar": t["scalar"].double()})


def damage_extra_tensor(folder: Path) -> None:
    rewrite(folder, lambda t: t | {"extra": torch.zeros(1)})


def damage_lost_tensor(folder: Path) -> None:
    rewrite(folder, lambda t: {n: v for n, v in t.items() if n != "scalar"})


def edit(folder: Path, change) -> None:
    raw = json.loads((folder / MANIFEST).read_text())
    change(raw)
    (folder / MANIFEST).write_text(json.dumps(raw))


def rewrite(folder: Path, change) -> None:
    save_file(change(load_file(folder / TENSORS)), folder / TENSORS)


DAMAGES = [value for name, value in sorted(globals().items()) if name.startswith("damage_")]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_every_damage_is_refused(tmp_path, damage):
    ref = write_generation(tmp_path, some_tensors(), lineage=0, version=12)
    damage(Path(ref.path))
    with pytest.raises(WeightsError) as caught:
        read_generation(ref)
    assert "v00000012-l0" in str(caught.value)


@given(data=st.data())
def test_no_truncation_or_flipped_byte_passes(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("w")
    tensors = {"a": torch.arange(6.0), "b": torch.ones(3, dtype=torch.bfloat16)}
    ref = write_generation(root, tensors, lineage=0, version=1)
    file = Path(ref.path) / data.draw(st.sampled_from([MANIFEST, TENSORS]))
    body = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(body) - 1))
    if data.draw(st.booleans()):
        body = body[:at]
    else:
        body[at] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(bytes(body))
    try:
        read = read_generation(ref)
    except WeightsError:
        return
    # A byte that carries no information (white space of the manifest or of the header) may change; the tensors may not.
    assert read.keys() == tensors.keys()
    assert all(tensor_sha256(read[n]) == tensor_sha256(t) for n, t in tensors.items())


def test_a_reference_to_other_weights_is_refused(tmp_path):
    ref = write_generation(tmp_path, some_tensors(), lineage=0, version=1)
    other = write_generation(tmp_path, some_tensors(1), lineage=0, version=2)
    with pytest.raises(WeightsError, match="another digest"):
        read_generation(replace(ref, digest=other.digest))
    with pytest.raises(WeightsError, match="another number"):
        read_generation(replace(ref, version=2))
    with pytest.raises(WeightsError, match="another digest"):
        read_generation(replace(ref, path=other.path))


def test_an_unreadable_folder_in_the_way_is_replaced(tmp_path):
    ref = write_generation(tmp_path, some_tensors(), lineage=0, version=1)
    body = (Path(ref.path) / TENSORS).read_bytes()
    (Path(ref.path) / TENSORS).write_bytes(body[: len(body) // 2])
    assert write_generation(tmp_path, some_tensors(), lineage=0, version=1) == ref
    assert read_generation(ref).keys() == some_tensors().keys()


def test_list_ignores_strangers_and_orders_by_number(tmp_path):
    refs = [write_generation(tmp_path, some_tensors(v), lineage=0, version=v) for v in (10, 2, 1)]
    (tmp_path / "v00000005-l0").mkdir()
    (tmp_path / f"{TEMPORARY}v00000006-l0-abc").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    assert list_generations(tmp_path) == tuple(reversed(refs))
    assert list_generations(tmp_path / "absent") == ()


def test_collect_keeps_the_recent_the_referenced_and_always_the_newest(tmp_path):
    for v in range(8):
        write_generation(tmp_path, {"a": torch.tensor(float(v))}, lineage=0, version=v)
    gone = collect(tmp_path, 5, {1, 3})
    assert sorted(p.name for p in gone) == ["v00000000-l0", "v00000002-l0", "v00000004-l0"]
    assert [r.version for r in list_generations(tmp_path)] == [1, 3, 5, 6, 7]
    collect(tmp_path, 100)
    assert [r.version for r in list_generations(tmp_path)] == [7]
    assert collect(tmp_path / "absent", 3) == ()


def test_sweep_removes_only_what_crashes_left(tmp_path):
    ref = write_generation(tmp_path, some_tensors(), lineage=0, version=1)
    (tmp_path / f"{TEMPORARY}v00000002-l0-1234").mkdir()
    (tmp_path / f"{TEMPORARY}v00000002-l0-1234" / TENSORS).write_bytes(b"half")
    assert sweep(tmp_path) == 1
    assert [p.name for p in tmp_path.iterdir()] == [Path(ref.path).name]


def test_a_refused_write_leaves_nothing(tmp_path):
    target = generation_folder(tmp_path, lineage=0, version=1)
    with pytest.raises(OSError, match="File name too long"):
        write_generation(tmp_path / ("x" * 300), some_tensors(), lineage=0, version=1)
    # Complex numbers cannot be written as safetensors: the temporary folder must go.
    with pytest.raises(WeightsError, match="tensor b is of a dtype"):
        write_generation(
            tmp_path, {"a": torch.zeros(4), "b": torch.zeros(4, dtype=torch.complex64)}, lineage=0, version=1
        )
    assert list(tmp_path.iterdir()) == []
    assert not target.exists()
