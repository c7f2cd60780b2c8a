"""Weight generations: version v of lineage l, as replicas load it.

A generation is written once and never changed. Its digest is what a replica reports after loading it, and takes traffic
only then. `base` is always None: every generation is a full snapshot.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from runtime.errors import WeightsError
from runtime.rl.types import WeightsRef
from runtime.rl.weights.sealed import describe, read_manifest, read_tensors, remove_sealed, write_sealed

KIND = "weights"
_NAME = re.compile(r"^v(\d{8})-l(\d+)$")


def generation_folder(root: Path, *, lineage: int, version: int) -> Path:
    """Where a generation lives below `root`."""
    return root / f"v{version:08d}-l{lineage}"


def write_generation(
    root: Path,
    tensors: Mapping[str, Tensor],
    *,
    lineage: int,
    version: int,
    dtype: torch.dtype | None = None,
    fingerprint: str | None = None,
) -> WeightsRef:
    """Write `tensors` as generation (lineage, version), floating-point ones cast to `dtype` (the rollout's) when given.
    `fingerprint`: the digest by which engines know it that got it directly; it becomes the reference's.

    Writing the same bits again returns the same reference; an unreadable folder in the way is replaced. WeightsError when
    a readable generation of that number holds other bits: generations are immutable.
    """
    folder = generation_folder(root, lineage=lineage, version=version)
    cast = {n: t.to(dtype) if dtype is not None and t.is_floating_point() else t for n, t in tensors.items()}
    facts = {"lineage": lineage, "version": version, "base": None}
    manifest = describe(cast, kind=KIND, facts=facts if fingerprint is None else {**facts, "fingerprint": fingerprint})
    ref = WeightsRef(lineage=lineage, version=version, path=str(folder), digest=fingerprint or manifest.digest)
    if folder.exists():
        try:
            present = read_manifest(folder, kind=KIND)
            read_tensors(folder, present)
        except WeightsError:
            remove_sealed(folder)
        else:
            if present.digest == manifest.digest:
                return ref
            raise WeightsError(
                "a generation of this number holds other weights",
                where=str(folder),
                hint="a restored run that diverges needs a new lineage",
            )
    write_sealed(folder, cast, manifest)
    return ref


def read_generation(ref: WeightsRef) -> dict[str, Tensor]:
    """The tensors of `ref` on the CPU, every hash checked.

    Raises WeightsError when anything is missing, truncated, of another number or does not match; nothing is returned
    in part.
    """
    folder = Path(ref.path)
    manifest = read_manifest(folder, kind=KIND)
    if ref.digest not in (manifest.digest, manifest.facts.get("fingerprint")):
        raise WeightsError(
            "the generation has another digest", where=ref.path, got=manifest.digest, expected=ref.digest
        )
    number = (manifest.facts.get("lineage"), manifest.facts.get("version"))
    if number != (ref.lineage, ref.version):
        expected = str((ref.lineage, ref.version))
        raise WeightsError("the generation has another number", where=ref.path, got=number, expected=expected)
    if manifest.facts.get("base") is not None:
        raise WeightsError("the generation is a delta", where=ref.path, expected="a full snapshot")
    return read_tensors(folder, manifest)


def list_generations(root: Path) -> tuple[WeightsRef, ...]:
    """Generations whose manifest verifies, by (lineage, version). Tensors are checked only when read."""
    found: list[WeightsRef] = []
    for folder in root.iterdir() if root.is_dir() else ():
        match = _NAME.match(folder.name)
        if match is None:
            continue
        try:
            digest = read_manifest(folder, kind=KIND).digest
        except WeightsError:
            continue
        found.append(WeightsRef(lineage=int(match[2]), version=int(match[1]), path=str(folder), digest=digest))
    return tuple(sorted(found, key=lambda r: (r.lineage, r.version)))


def collect(root: Path, keep_from_version: int, referenced: Iterable[int] = ()) -> tuple[Path, ...]:
    """Remove generations of versions below `keep_from_version`, except those in `referenced` and the newest of all.

    Returns the folders removed. Works on names alone, so that unreadable leftovers go too.
    """
    keep = set(referenced)
    folders: list[tuple[int, int, Path]] = []
    for folder in root.iterdir() if root.is_dir() else ():
        match = _NAME.match(folder.name)
        if match is not None:
            folders.append((int(match[2]), int(match[1]), folder))
    folders.sort()
    gone = [path for _, version, path in folders[:-1] if version < keep_from_version and version not in keep]
    for path in gone:
        remove_sealed(path)
    return tuple(gone)
