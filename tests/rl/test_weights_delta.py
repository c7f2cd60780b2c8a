"""Deltas between generations: the same bits and the same digest as whole ones, whoever reads them from wherever."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from planner.record import replace
from runtime.errors import WeightsError
from runtime.rl.types import WeightsRef
from runtime.rl.weights import ChainReader, GenerationWriter, collect, delta, list_generations, read_generation
from runtime.rl.weights.delta import _places, _read_places
from runtime.rl.weights.generation import DELTA_KIND, KIND, _look
from runtime.rl.weights.sealed import TENSORS

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
Tensors = dict[str, Tensor]


def first(generator: torch.Generator, size: int = 300) -> Tensors:
    made = {f"w{i}": torch.randn(size, 3, generator=generator).to(DTYPES[i % 3]) for i in range(3)}
    return made | {"one": torch.randn((), generator=generator), "none": torch.zeros(0, 4), "still": torch.ones(50)}


def moved(tensors: Tensors, share: float, generator: torch.Generator) -> Tensors:
    """Every element changes with probability `share`; some to the same number with other bits."""
    new: Tensors = {}
    for name, tensor in tensors.items():
        if name == "still":
            new[name] = tensor
            continue
        mask = torch.rand(tensor.shape, generator=generator) < share
        fresh = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        fresh = torch.where(torch.rand(tensor.shape, generator=generator) < 0.1, -torch.zeros_like(tensor), fresh)
        fresh = torch.where(torch.rand(tensor.shape, generator=generator) < 0.05, fresh * float("nan"), fresh)
        new[name] = torch.where(mask, fresh, tensor)
    return new


def same_bits(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype
        and a[n].shape == b[n].shape
        and torch.equal(
            a[n].contiguous().reshape(-1).view(torch.uint8), b[n].contiguous().reshape(-1).view(torch.uint8)
        )
        for n in a
    )


def is_delta(ref: WeightsRef) -> bool:
    return _look(Path(ref.path)).file.kind == DELTA_KIND


@given(
    count=st.integers(0, 5000),
    share=st.floats(0, 1),
    seed=st.integers(0, 1000),
    edge=st.sampled_from(["", "first", "last"]),
)
@settings(max_examples=150, deadline=None)
def test_places_come_back_and_take_the_shorter_way(count: int, share: float, seed: int, edge: str) -> None:
    changed = np.random.default_rng(seed).random(count) < share**4  # mostly sparse, as updates are
    if edge and count:
        changed[0 if edge == "first" else -1] = True
    coded = _places(np.flatnonzero(changed), changed)
    assert coded.size <= 1 + -(-count // 8), "never more than the bitmap"
    assert np.array_equal(_read_places(coded, count, int(changed.sum())), np.flatnonzero(changed))


def test_places_by_hand() -> None:
    changed = np.zeros(10_000, bool)
    changed[[0, 1, 256, 1000]] = True  # unchanged before each: 0, 0, 254, 743 = 2 * 255 + 233
    assert _places(np.flatnonzero(changed), changed).tolist() == [1, 0, 0, 254, 255, 255, 233]


@given(seed=st.integers(0, 10_000), share=st.floats(0, 1), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_delta_gives_the_bits_once_or_twice_applied(seed: int, share: float, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = first(generator, data.draw(st.integers(1, 400)))
    new = moved(old, share, generator)
    changes = delta.encode(old, new)
    assert changes is not None
    assert "still#at" not in changes
    mine = {n: t.clone() for n, t in old.items()}
    delta.apply(mine, changes)
    assert same_bits(mine, new)
    delta.apply(mine, changes)
    assert same_bits(mine, new)


@given(
    seed=st.integers(0, 10_000),
    shares=st.lists(st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.9]), min_size=1, max_size=9),
    full_every=st.integers(1, 5),
    reads=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_every_reader_of_a_chain_has_the_bits_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, seed: int, shares: list[float], full_every: int, reads: st.DataObject
) -> None:
    """Readers that follow, that join late, that miss some; digests as of generations written whole."""
    root, whole = tmp_path_factory.mktemp("deltas"), tmp_path_factory.mktemp("whole")
    generator = torch.Generator().manual_seed(seed)
    versions = [first(generator)]
    for share in shares:
        versions.append(moved(versions[-1], share, generator))
    writer = GenerationWriter(root, full_every=full_every)
    refs = [writer.write(t, lineage=0, version=v) for v, t in enumerate(versions)]
    for v, tensors in enumerate(versions):
        alone = GenerationWriter(whole, full_every=full_every).write(tensors, lineage=0, version=v)
        assert not is_delta(alone)
        assert alone.digest == refs[v].digest
    assert not is_delta(refs[0])
    run = 0  # deltas in a row
    for ref in refs:
        run = run + 1 if is_delta(ref) else 0
        assert run < full_every
    if full_every > 1 and max(shares) <= 0.1:
        assert is_delta(refs[1])
    follower, sparse = ChainReader(), ChainReader()
    for v, ref in enumerate(refs):
        assert same_bits(follower(ref), versions[v])
        if reads.draw(st.booleans(), label=f"reads {v}"):
            assert same_bits(sparse(ref), versions[v])
        assert same_bits(read_generation(ref), versions[v])
    back = reads.draw(st.integers(0, len(refs) - 1), label="goes back to")
    assert same_bits(follower(refs[back]), versions[back])


def chain(root: Path, count: int = 5, full_every: int = 4) -> tuple[list[WeightsRef], list[Tensors]]:
    generator = torch.Generator().manual_seed(1)
    versions = [first(generator)]
    for _ in range(count - 1):
        versions.append(moved(versions[-1], 0.02, generator))
    writer = GenerationWriter(root, full_every=full_every)
    return [writer.write(t, lineage=0, version=v) for v, t in enumerate(versions)], versions


def test_a_chain_is_as_long_as_asked_and_small(tmp_path: Path) -> None:
    refs, _ = chain(tmp_path, 9)
    assert [is_delta(r) for r in refs] == [False, True, True, True, False, True, True, True, False]
    bytes_of = [(Path(r.path) / TENSORS).stat().st_size for r in refs]
    assert max(bytes_of[1:4]) < 0.2 * bytes_of[0]


def test_changes_that_are_nearly_everything_are_written_whole(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    one = first(generator)
    writer = GenerationWriter(tmp_path, full_every=8)
    writer.write(one, lineage=0, version=0)
    assert not is_delta(writer.write(moved(one, 0.9, generator), lineage=0, version=1))


def test_a_gap_another_lineage_or_another_writer_begin_with_a_whole_one(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    one = first(generator)
    writer = GenerationWriter(tmp_path, full_every=8)
    writer.write(one, lineage=0, version=0)
    assert not is_delta(writer.write(one, lineage=0, version=2))
    assert not is_delta(writer.write(one, lineage=1, version=3))
    assert is_delta(writer.write(one, lineage=1, version=4))
    assert not is_delta(GenerationWriter(tmp_path, full_every=8).write(one, lineage=1, version=5))


@pytest.mark.parametrize("spoilt", [0, 1, 2])
@pytest.mark.parametrize("how", ["cut", "flipped", "gone", "another"])
def test_a_chain_with_a_bad_link_is_refused_and_who_holds_what_follows_goes_on(
    tmp_path: Path, spoilt: int, how: str
) -> None:
    refs, versions = chain(tmp_path)
    follower = ChainReader()
    follower(refs[2])
    file = Path(refs[spoilt].path) / TENSORS
    data = bytearray(file.read_bytes())
    file.chmod(0o600)
    match how:
        case "cut":
            file.write_bytes(data[: len(data) // 2])
        case "flipped":
            data[-3] ^= 4
            file.unlink()
            file.write_bytes(data)
        case "gone":
            shutil.rmtree(refs[spoilt].path)
        case "another":
            file.unlink()
            file.write_bytes((Path(refs[3].path) / TENSORS).read_bytes())
    for late in refs[spoilt:4]:
        with pytest.raises(WeightsError):
            read_generation(late)
        with pytest.raises(WeightsError):
            ChainReader()(late)
    assert same_bits(follower(refs[3]), versions[3]), "one delta is all it needs"
    assert same_bits(read_generation(refs[4]), versions[4]), "the next whole one mends it"


def test_a_wrong_base_is_refused_by_the_hash_of_what_comes_of_it(tmp_path: Path) -> None:
    refs, _ = chain(tmp_path)
    generator = torch.Generator().manual_seed(9)
    shutil.rmtree(refs[0].path)
    GenerationWriter(tmp_path, full_every=4).write(first(generator), lineage=0, version=0)
    with pytest.raises(WeightsError, match="another digest"):
        read_generation(refs[1])
    with pytest.raises(WeightsError, match="another number"):
        read_generation(replace(refs[1], version=7))


def test_what_a_delta_rests_on_is_not_collected(tmp_path: Path) -> None:
    refs, versions = chain(tmp_path, 7)
    assert collect(tmp_path, 3) == ()
    assert same_bits(read_generation(refs[3]), versions[3])
    gone = collect(tmp_path, 5)
    assert [p.name for p in gone] == [Path(r.path).name for r in refs[:4]]
    assert [r.version for r in list_generations(tmp_path)] == [4, 5, 6]
    assert same_bits(read_generation(refs[6]), versions[6])


def test_writing_a_version_again_gives_the_same_reference(tmp_path: Path) -> None:
    refs, versions = chain(tmp_path)
    again = GenerationWriter(tmp_path, full_every=4)
    assert [again.write(t, lineage=0, version=v) for v, t in enumerate(versions)] == refs
    assert [is_delta(r) for r in refs[1:4]] == [True] * 3, "and leaves it as it is"
    with pytest.raises(WeightsError, match="other weights"):
        again.write(versions[0], lineage=0, version=1)
    (Path(refs[2].path) / TENSORS).unlink()
    assert GenerationWriter(tmp_path, full_every=4).write(versions[2], lineage=0, version=2) == refs[2]
    assert same_bits(read_generation(refs[2]), versions[2])


def test_without_deltas_generations_are_as_they_were(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    writer = GenerationWriter(tmp_path)
    one = first(generator)
    refs = [writer.write(one, lineage=0, version=v) for v in range(3)]
    assert {_look(Path(r.path)).file.kind for r in refs} == {KIND}
    assert "full_every" not in _look(Path(refs[0].path)).whole.facts
    reader = ChainReader()
    reader(refs[0])
    assert reader._held is None, "no host memory is kept for deltas that never come"


def test_a_version_that_engines_got_directly_has_their_digest_as_a_delta_too(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    writer = GenerationWriter(tmp_path, full_every=4)
    one = first(generator)
    writer.write(one, lineage=0, version=0, fingerprint="f0")
    two = moved(one, 0.01, generator)
    ref = writer.write(two, lineage=0, version=1, fingerprint="f1")
    assert is_delta(ref)
    assert ref.digest == "f1"
    assert same_bits(read_generation(ref), two)
