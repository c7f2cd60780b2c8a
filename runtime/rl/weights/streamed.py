"""Sealed folders whose tensors come one at a time: the host never holds more than the one that is being written."""

import hashlib
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from planner.record import replace
from runtime.errors import WeightsError
from runtime.rl.types import WeightsRef
from runtime.rl.weights.generation import KIND, generation_folder
from runtime.rl.weights.sealed import (
    TENSORS,
    Manifest,
    TensorEntry,
    begin_sealed,
    finish_sealed,
    manifest_of,
    read_manifest,
    read_tensors,
    remove_sealed,
)
from runtime.rl.weights.tensor_file import PORTION_BYTES, TensorFile, TensorShape, bytes_of

SIDE_BY_SIDE_BYTES = 2**20  # below, changing threads costs more than it saves


def write_tensors(
    path: Path,
    layout: Mapping[str, TensorShape],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    portion_bytes: int = PORTION_BYTES,
) -> dict[str, TensorEntry]:
    """Write `tensors`, which come in the order of `layout`, to `path` and sync it, by portions; returns what a manifest says of each.

    Hashing of a large tensor and writing it run side by side. WeightsError when a tensor is not what the layout says.
    """
    entries: dict[str, TensorEntry] = {}
    with TensorFile(path, layout, portion_bytes=portion_bytes) as file, ThreadPoolExecutor(1) as hasher:
        for (name, expected), (found, tensor) in zip(layout.items(), tensors, strict=True):
            if (name, expected.shape, expected.dtype) != (found, tuple(tensor.shape), tensor.dtype):
                got = (found, tuple(tensor.shape), tensor.dtype)
                raise WeightsError(
                    "a tensor is not as announced", where=str(path), got=got, expected=f"{name} {expected}"
                )
            flat = bytes_of(tensor)
            digest = hasher.submit(hashlib.sha256, flat) if flat.nbytes >= SIDE_BY_SIDE_BYTES else None
            file.write(flat)
            sha256 = hashlib.sha256(flat) if digest is None else digest.result()
            entries[name] = TensorEntry(
                shape=expected.shape,
                dtype=str(expected.dtype).removeprefix("torch."),
                sha256=sha256.hexdigest(),
            )
    return entries


def write_generation_stream(
    root: Path, layout: Mapping[str, TensorShape], tensors: Iterable[tuple[str, Tensor]], *, lineage: int, version: int
) -> WeightsRef:
    """`runtime.rl.weights.write_generation` of tensors that come one at a time, in the order of `layout`. All are taken, also
    where the generation is there already."""
    folder = generation_folder(root, lineage=lineage, version=version)
    temporary = begin_sealed(folder)
    try:
        entries = write_tensors(temporary / TENSORS, layout, tensors)
        manifest = manifest_of(entries, kind=KIND, facts={"lineage": lineage, "version": version, "base": None})
        ref = WeightsRef(lineage=lineage, version=version, path=str(folder), digest="")
        present = _present(folder)
        if present is None:
            finish_sealed(temporary, folder, manifest)
            return replace(ref, digest=manifest.digest)
        if present.tensors != manifest.tensors:
            raise WeightsError(
                "a generation of this number holds other weights",
                where=str(folder),
                hint="a restored run that diverges needs a new lineage",
            )
        return replace(ref, digest=present.digest)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _present(folder: Path) -> Manifest | None:
    """The manifest of a whole generation that reads; a folder that does not is removed. None when there is none."""
    if not folder.exists():
        return None
    try:
        manifest = read_manifest(folder, kind=KIND)
        read_tensors(folder, manifest)
    except WeightsError:
        remove_sealed(folder)
        return None
    return manifest
