"""Sealed folders: tensors and a manifest that vouches for them. Complete or absent, never half.

    <name>/manifest.json        format, facts of the owner, per tensor: shape, dtype, sha256; digest over all of it
    <name>/tensors.safetensors

Written under a hidden temporary name, fsynced, renamed last. The manifest is written after the tensors, so a folder
whose manifest verifies is whole. Weight generations and checkpoints are both sealed folders. No pickle anywhere.
"""

import hashlib
import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from planner.record import record
from runtime.errors import WeightsError
from runtime.rl.weights.tensor_file import bytes_of, write_file

MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"
TEMPORARY = ".new-"  # prefix of a folder being written; a crash may leave one, nobody reads it
FORMAT = 1
LARGE_BYTES = 2**28  # of a folder
REMOVED_S = 60.0
_removing: list[threading.Thread] = []  # of this process


@record
class TensorEntry:
    """What the manifest says of one tensor."""

    shape: tuple[int, ...]
    dtype: str  # torch's name without "torch."
    sha256: str  # of the raw little-endian bytes, row-major


@record
class Manifest:
    """A decoded manifest whose digest matches its own content. The tensors are not checked by reading it."""

    kind: str
    facts: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    digest: str


def tensor_sha256(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes on the CPU, row-major."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def describe(tensors: Mapping[str, Tensor], *, kind: str, facts: Mapping[str, Any]) -> Manifest:
    """The manifest that these tensors would be sealed with; writes nothing."""
    entries = {
        name: TensorEntry(
            shape=tuple(tensors[name].shape),
            dtype=str(tensors[name].dtype).removeprefix("torch."),
            sha256=tensor_sha256(tensors[name]),
        )
        for name in sorted(tensors)
    }
    return manifest_of(entries, kind=kind, facts=facts)


def write_sealed(folder: Path, tensors: Mapping[str, Tensor], manifest: Manifest) -> None:
    """Write `folder` (which must not exist) with `tensors`, sealed by the manifest `describe` made of them.

    Raises OSError when the disk refuses; the temporary folder is then removed and `folder` does not exist.
    """
    temporary = begin_sealed(folder)
    try:
        write_file(temporary / TENSORS, tensors)
        finish_sealed(temporary, folder, manifest)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def begin_sealed(folder: Path) -> Path:
    """A temporary folder that `finish_sealed` makes `folder` of. Whoever begins removes it when what follows fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f"{TEMPORARY}{folder.name}-{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    return temporary


def finish_sealed(temporary: Path, folder: Path, manifest: Manifest) -> None:
    """Seal what `temporary` holds (every file synced) and rename it to `folder`, which must not exist."""
    with (temporary / MANIFEST).open("w") as f:
        json.dump(encode_manifest(manifest), f, indent=1, sort_keys=True)
        f.flush()
        os.fsync(f.fileno())
    _sync(temporary)
    temporary.rename(folder)
    _sync(folder.parent)


def manifest_of(entries: Mapping[str, TensorEntry], *, kind: str, facts: Mapping[str, Any]) -> Manifest:
    """The manifest over tensors that are described already."""
    found = {name: entries[name] for name in sorted(entries)}
    return Manifest(kind=kind, facts=dict(facts), tensors=found, digest=_digest(kind, facts, found))


def read_manifest(folder: Path, *, kind: str | tuple[str, ...]) -> Manifest:
    """Decode and check a folder's manifest; WeightsError when it is missing, garbled or of another kind."""
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_bytes())
    except OSError as e:
        raise WeightsError("cannot read the manifest", where=str(path), got=e.strerror) from e
    except ValueError as e:
        raise WeightsError("the manifest is not JSON", where=str(path), got=str(e)) from e
    manifest = decode_manifest(raw, path)
    kinds = (kind,) if isinstance(kind, str) else kind
    if manifest.kind not in kinds:
        expected = " or ".join(kinds)
        raise WeightsError("the folder is of another kind", where=str(path), got=manifest.kind, expected=expected)
    return manifest


def decode_manifest(raw: Any, path: Path) -> Manifest:
    """The inverse of `encode_manifest`; WeightsError when it does not decode or its digest does not match it."""
    manifest = _decode(raw, path)
    found = _digest(manifest.kind, manifest.facts, manifest.tensors)
    if found != manifest.digest:
        raise WeightsError(
            "the manifest's digest does not match it", where=str(path), got=found, expected=manifest.digest
        )
    return manifest


def read_tensors(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The folder's tensors on the CPU, every one checked; WeightsError for anything missing, extra or different."""
    path = folder / TENSORS
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError, ValueError) as e:
        raise WeightsError("cannot read the tensors", where=str(path), got=str(e)) from e
    if tensors.keys() != manifest.tensors.keys():
        odd = sorted(tensors.keys() ^ manifest.tensors.keys())
        raise WeightsError("file and manifest name different tensors", where=str(path), got=odd[:4])
    for name, entry in manifest.tensors.items():
        tensor = tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != entry.shape or dtype != entry.dtype:
            got, expected = (tuple(tensor.shape), dtype), str((entry.shape, entry.dtype))
            raise WeightsError(f"tensor {name} has another shape or dtype", where=str(path), got=got, expected=expected)
        found = tensor_sha256(tensor)
        if found != entry.sha256:
            raise WeightsError(
                f"tensor {name} does not match its hash", where=str(path), got=found, expected=entry.sha256
            )
    return tensors


def remove_sealed(folder: Path, *, beside: bool = False) -> None:
    """Remove a folder: first renamed out of sight, so that no reader ever lists a half-removed one.

    `beside`: a large one is given back to the disk by a thread, as some GB take seconds (`wait_removed`); what a death leaves of
    it goes with `sweep`."""
    hidden = folder.parent / f"{TEMPORARY}gone-{uuid.uuid4().hex[:8]}"
    folder.rename(hidden)
    if beside and sum(p.stat().st_size for p in hidden.iterdir()) >= LARGE_BYTES:
        thread = threading.Thread(target=shutil.rmtree, args=(hidden, True), name="remove", daemon=True)
        thread.start()
        _removing[:] = [t for t in _removing if t.is_alive()] + [thread]
    else:
        shutil.rmtree(hidden, ignore_errors=True)


def wait_removed(seconds: float = REMOVED_S) -> None:
    """Until all that is removed beside is given back to the disk, or so long."""
    deadline_s = time.monotonic() + seconds
    for thread in _removing:
        thread.join(max(0.0, deadline_s - time.monotonic()))


def sweep(root: Path) -> int:
    """Remove what crashes left under temporary names. Only the folder's one writer may call it. Returns how many."""
    left = [p for p in root.glob(f"{TEMPORARY}*") if p.is_dir()]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return len(left)


def _digest(kind: str, facts: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> str:
    body = {
        "kind": kind,
        "facts": facts,
        "tensors": {n: [list(e.shape), e.dtype, e.sha256] for n, e in entries.items()},
    }
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def encode_manifest(manifest: Manifest) -> dict[str, Any]:
    """As JSON values."""
    tensors = {n: {"shape": list(e.shape), "dtype": e.dtype, "sha256": e.sha256} for n, e in manifest.tensors.items()}
    return {
        "format": FORMAT,
        "kind": manifest.kind,
        "facts": manifest.facts,
        "tensors": tensors,
        "digest": manifest.digest,
    }


def _decode(raw: Any, path: Path) -> Manifest:
    try:
        if raw["format"] != FORMAT:
            raise WeightsError("unknown manifest format", where=str(path), got=raw["format"], expected=str(FORMAT))
        entries = {
            str(name): TensorEntry(
                shape=tuple(int(n) for n in e["shape"]), dtype=str(e["dtype"]), sha256=str(e["sha256"])
            )
            for name, e in raw["tensors"].items()
        }
        return Manifest(kind=str(raw["kind"]), facts=dict(raw["facts"]), tensors=entries, digest=str(raw["digest"]))
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise WeightsError("the manifest does not decode", where=str(path), got=repr(e)) from e


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
