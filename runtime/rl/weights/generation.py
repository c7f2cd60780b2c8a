"""Weight generations: version v of lineage l, as replicas load it.

A generation is written once and never changed. Its digest is what a replica reports after loading it, and takes traffic
only then. On disk it is whole, or what changed since the version before (`delta`); its digest is the same either way.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planner.record import record
from runtime.errors import WeightsError
from runtime.rl.types import WeightsRef
from runtime.rl.weights import delta
from runtime.rl.weights.sealed import (
    Manifest,
    decode_manifest,
    describe,
    encode_manifest,
    read_manifest,
    read_tensors,
    remove_sealed,
    tensor_sha256,
    write_sealed,
)

KIND, DELTA_KIND = "weights", "weights-delta"
MOST_SHARE = 0.6  # of the whole generation's bytes; a delta that is larger is not worth its chain
_NAME = re.compile(r"^v(\d{8})-l(\d+)$")
_log = logging.getLogger(__name__)


@record
class _Found:
    """A folder as its manifest describes it."""

    whole: Manifest  # of the generation's tensors, whatever is on disk
    file: Manifest  # of the tensors on disk
    base: WeightsRef | None  # what a delta is against

    @property
    def digests(self) -> tuple[Any, ...]:
        """By which it may be asked for."""
        return self.whole.digest, self.whole.facts.get("fingerprint")


def generation_folder(root: Path, *, lineage: int, version: int) -> Path:
    """Where a generation lives below `root`."""
    return root / f"v{version:08d}-l{lineage}"


class GenerationWriter:
    """Writes the generations of one trainer: every `full_every`-th whole, between them what changed, where that is less."""

    def __init__(self, root: Path, *, full_every: int = 1) -> None:
        self._root, self._full_every = root, full_every
        self._last: tuple[WeightsRef, dict[str, Tensor]] | None = None  # written here; none are kept without deltas
        self._since_full = 0

    def write(
        self,
        tensors: Mapping[str, Tensor],
        *,
        lineage: int,
        version: int,
        dtype: torch.dtype | None = None,
        fingerprint: str | None = None,
    ) -> WeightsRef:
        """Write `tensors` as generation (lineage, version), floating-point ones cast to `dtype` (the rollout's) when given.
        `fingerprint`: the digest by which engines know it that got it directly; it becomes the reference's.

        Writing the same bits again returns the same reference; an unreadable folder in the way is replaced. WeightsError
        when a readable generation of that number holds other bits: generations are immutable.
        """
        folder = generation_folder(self._root, lineage=lineage, version=version)
        cast = {n: t.to(dtype) if dtype is not None and t.is_floating_point() else t for n, t in tensors.items()}
        facts: dict[str, Any] = {"lineage": lineage, "version": version, "base": None}
        if fingerprint is not None:
            facts["fingerprint"] = fingerprint
        if self._full_every > 1:
            facts["full_every"] = self._full_every  # readers keep what they read: the next one may be a delta
            cast = {n: t.detach().to("cpu", copy=True).contiguous() for n, t in cast.items()}
        manifest = describe(cast, kind=KIND, facts=facts)
        ref = WeightsRef(lineage=lineage, version=version, path=str(folder), digest=fingerprint or manifest.digest)
        if not _present(ref, folder, manifest):
            self._write(folder, ref, cast, manifest)
        if self._full_every > 1:
            self._last = (ref, cast)
        return ref

    def _write(self, folder: Path, ref: WeightsRef, cast: Mapping[str, Tensor], manifest: Manifest) -> None:
        changes, base = self._changes(ref, cast)
        if changes is None or base is None:
            write_sealed(folder, cast, manifest)
            self._since_full = 0
            return
        facts = {
            "lineage": ref.lineage,
            "version": ref.version,
            "base": {"lineage": base.lineage, "version": base.version, "digest": base.digest},
            "whole": encode_manifest(manifest),
        }
        write_sealed(folder, changes, describe(changes, kind=DELTA_KIND, facts=facts))
        self._since_full += 1

    def _changes(
        self, ref: WeightsRef, cast: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor] | None, WeightsRef | None]:
        """Against the version before, if it was written here and a delta is due and worth it."""
        if self._last is None or self._since_full + 1 >= self._full_every:
            return None, None
        base, before = self._last
        if (base.lineage, base.version) != (ref.lineage, ref.version - 1) or not Path(base.path).is_dir():
            return None, None
        changes = delta.encode(before, cast)
        if changes is None or delta.size(changes) > MOST_SHARE * delta.size(cast):
            return None, None
        return changes, base


def write_generation(
    root: Path,
    tensors: Mapping[str, Tensor],
    *,
    lineage: int,
    version: int,
    dtype: torch.dtype | None = None,
    fingerprint: str | None = None,
) -> WeightsRef:
    """Write one whole generation (`GenerationWriter.write`)."""
    writer = GenerationWriter(root)
    return writer.write(tensors, lineage=lineage, version=version, dtype=dtype, fingerprint=fingerprint)


class ChainReader:
    """Reads generations one after the other. Where they come with deltas it keeps the last one in host memory, so that the
    next costs the delta's bytes alone."""

    def __init__(self) -> None:
        self._held: tuple[str, dict[str, Tensor]] | None = None

    def __call__(self, ref: WeightsRef) -> dict[str, Tensor]:
        """As `read_generation`. The tensors are the reader's: they change at the next call."""
        held, self._held = self._held, None
        found = _find(ref)
        tensors: dict[str, Tensor] | None = None
        if held is not None and found.base is not None and found.base.digest == held[0]:
            try:
                tensors = _applied(held[1], Path(ref.path), found)
            except WeightsError as e:  # of the delta itself: read what it rests on anew
                _log.warning("a delta does not fit what is held: %s", e)
        keep = found.whole.facts.get("full_every", 1) > 1
        if tensors is None:
            tensors = _read(Path(ref.path), found)
            if keep:  # what was read may be pages of a file; what is kept must not depend on it
                tensors = {n: t.clone() for n, t in tensors.items()}
        if keep:
            self._held = (ref.digest, tensors)
        return tensors


def read_generation(ref: WeightsRef) -> dict[str, Tensor]:
    """The tensors of `ref` on the CPU, every hash checked; a delta is applied to what it is against.

    Raises WeightsError when anything is missing, truncated, of another number or does not match; nothing is returned
    in part.
    """
    return _read(Path(ref.path), _find(ref))


def _find(ref: WeightsRef) -> _Found:
    """The folder of `ref`; WeightsError when it is of another number or digest."""
    folder = Path(ref.path)
    found = _look(folder)
    if ref.digest not in found.digests:
        raise WeightsError(
            "the generation has another digest", where=ref.path, got=found.whole.digest, expected=ref.digest
        )
    number = (found.whole.facts.get("lineage"), found.whole.facts.get("version"))
    if number != (ref.lineage, ref.version):
        expected = str((ref.lineage, ref.version))
        raise WeightsError("the generation has another number", where=ref.path, got=number, expected=expected)
    return found


def _look(folder: Path) -> _Found:
    file = read_manifest(folder, kind=(KIND, DELTA_KIND))
    if file.kind == KIND:
        return _Found(whole=file, file=file, base=None)
    try:
        raw = file.facts["base"]
        lineage, version = int(raw["lineage"]), int(raw["version"])
        path = generation_folder(folder.parent, lineage=lineage, version=version)
        base = WeightsRef(lineage=lineage, version=version, path=str(path), digest=str(raw["digest"]))
        if version >= int(file.facts["version"]):
            raise WeightsError("a delta is against a newer generation", where=str(folder), got=version)
    except (KeyError, TypeError, ValueError) as e:
        raise WeightsError("a delta does not say what it is against", where=str(folder), got=repr(e)) from e
    return _Found(whole=decode_manifest(file.facts.get("whole"), folder), file=file, base=base)


def _read(folder: Path, found: _Found) -> dict[str, Tensor]:
    """Whole tensors. A chain of deltas is walked back to the last whole generation, and applied from there."""
    chain: list[tuple[Path, _Found]] = []
    while found.base is not None:
        chain.append((folder, found))
        folder = Path(found.base.path)
        found = _find(found.base)
    tensors = read_tensors(folder, found.whole)
    for number, (path, step) in enumerate(reversed(chain)):
        last = number == len(chain) - 1
        tensors = _applied(tensors, path, step, check=last)  # what lies between is checked by what comes of it
    return tensors


def _applied(tensors: dict[str, Tensor], folder: Path, found: _Found, *, check: bool = True) -> dict[str, Tensor]:
    """Apply a folder's delta in place. WeightsError when the result is not the generation (`check`)."""
    delta.apply(tensors, read_tensors(folder, found.file))
    if not check:
        return tensors
    if tensors.keys() != found.whole.tensors.keys():
        raise WeightsError("a delta is of another model", where=str(folder))
    for name, entry in found.whole.tensors.items():
        got = tensor_sha256(tensors[name])
        if got != entry.sha256:
            raise WeightsError(
                f"tensor {name} with its delta does not match its hash",
                where=str(folder),
                got=got,
                expected=entry.sha256,
            )
    return tensors


def _present(ref: WeightsRef, folder: Path, manifest: Manifest) -> bool:
    """Whether the very generation is there and reads. An unreadable folder is removed."""
    if not folder.exists():
        return False
    try:
        found = _look(folder)
        _read(folder, found)
    except WeightsError:
        remove_sealed(folder)
        return False
    # Which of them are deltas may have been set otherwise when it was written.
    if ref.digest in found.digests or found.whole.tensors == manifest.tensors:
        if ref.digest in found.digests:
            return True
        remove_sealed(folder)
        return False
    raise WeightsError(
        "a generation of this number holds other weights",
        where=str(folder),
        hint="a restored run that diverges needs a new lineage",
    )


def list_generations(root: Path) -> tuple[WeightsRef, ...]:
    """Generations whose manifest verifies, by (lineage, version). Tensors are checked only when read."""
    found: list[WeightsRef] = []
    for folder in root.iterdir() if root.is_dir() else ():
        match = _NAME.match(folder.name)
        if match is None:
            continue
        try:
            digest = _look(folder).whole.digest
        except WeightsError:
            continue
        found.append(WeightsRef(lineage=int(match[2]), version=int(match[1]), path=str(folder), digest=digest))
    return tuple(sorted(found, key=lambda r: (r.lineage, r.version)))


def collect(root: Path, keep_from_version: int, referenced: Iterable[int] = ()) -> tuple[Path, ...]:
    """Remove generations of versions below `keep_from_version`, except those in `referenced`, the newest of all, and what
    a delta that stays is against.

    Returns the folders removed. Works on names alone where nothing stays on them, so that unreadable leftovers go too.
    """
    keep = set(referenced)
    folders: list[tuple[int, int, Path]] = []
    for folder in root.iterdir() if root.is_dir() else ():
        match = _NAME.match(folder.name)
        if match is not None:
            folders.append((int(match[2]), int(match[1]), folder))
    folders.sort()
    old = {path for _, version, path in folders[:-1] if version < keep_from_version and version not in keep}
    needed: set[Path] = set()
    for _, _, path in folders:
        if path not in old:
            needed |= _rests_on(path)
    gone = [path for _, _, path in folders if path in old - needed]
    for path in gone:
        remove_sealed(path, beside=True)
    return tuple(gone)


def _rests_on(folder: Path) -> set[Path]:
    """Folders that a delta needs, back to a whole generation."""
    needed: set[Path] = set()
    try:
        while (base := _look(folder).base) is not None:
            folder = Path(base.path)
            needed.add(folder)
    except WeightsError:
        return needed
    return needed
