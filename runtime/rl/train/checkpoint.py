"""Checkpoints: everything a step's result consists of, in one sealed folder.

    s00000011-l0/    the state after optimiser step 11, that is version 12, of lineage 0
        manifest.json
        tensors.safetensors                  of a trainer of one rank: whole tensors
        tensors-0.safetensors, ...           of several: each rank's rows, which any other number of ranks can load

Tensors: `param.<name>` (master precision), `exp_avg.<name>` and `exp_avg_sq.<name>` (AdamW's moments); rows of a rank are called
`<rank>:<first row>:<tensor>`. Facts: step, version, lineage, hash of the batch's ids, AdamW's own step count and the seed. The
learning-rate schedule is a function of the step and training draws no random numbers, so nothing else is state.

Not torch.distributed.checkpoint: its metadata is a pickle, and a run reads no pickles.
"""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from planner.record import record
from runtime.errors import WeightsError
from runtime.rl.types import CheckpointMark
from runtime.rl.weights.sealed import (
    TENSORS,
    Manifest,
    TensorEntry,
    begin_sealed,
    finish_sealed,
    manifest_of,
    read_manifest,
    remove_sealed,
    tensor_sha256,
)
from runtime.rl.weights.streamed import write_tensors
from runtime.rl.weights.tensor_file import TensorShape

KIND = "checkpoint"
KEEP = 3
LARGE_BYTES = 2**24
HASHERS = min(8, os.cpu_count() or 1)
_NAME = re.compile(r"^s(\d{8})-l(\d+)$")
_ROWS = re.compile(r"^(\d+):(\d+):(.+)$")
_GROUPS = ("param", "exp_avg", "exp_avg_sq")
_log = logging.getLogger(__name__)


@record
class StepFacts:
    """What is known of a step's result beside its tensors."""

    lineage: int
    step: int
    ids_hash: str
    seed: int
    optimiser_steps: int  # updates AdamW made; fewer than step + 1 when a batch had no trained token


@record
class TrainerState:
    """The whole state after optimiser step `step`. Tensor maps share the model's parameter names."""

    lineage: int
    step: int
    ids_hash: str
    seed: int
    optimiser_steps: int
    params: Mapping[str, Tensor]
    exp_avg: Mapping[str, Tensor]
    exp_avg_sq: Mapping[str, Tensor]

    @property
    def facts(self) -> StepFacts:
        """All but the tensors."""
        return StepFacts(
            lineage=self.lineage,
            step=self.step,
            ids_hash=self.ids_hash,
            seed=self.seed,
            optimiser_steps=self.optimiser_steps,
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by their names in a checkpoint."""
        return keyed(self.params, self.exp_avg, self.exp_avg_sq)


def keyed(
    params: Mapping[str, Tensor], exp_avg: Mapping[str, Tensor], exp_avg_sq: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Parameters and moments by their names in a checkpoint."""
    groups = zip(_GROUPS, (params, exp_avg, exp_avg_sq), strict=True)
    return {f"{group}.{name}": t for group, named in groups for name, t in named.items()}


def checkpoint_folder(root: Path, *, lineage: int, step: int) -> Path:
    """Where a checkpoint lives below `root`."""
    return root / f"s{step:08d}-l{lineage}"


def save(root: Path, state: TrainerState, *, keep: int = KEEP) -> Path:
    """Write the checkpoint of `state`, then remove what is older than the newest `keep` of its lineage. Returns its folder."""
    temporary = begin(root, state.facts)
    with unfinished(temporary):
        return finish(root, temporary, state.facts, write(temporary / TENSORS, state.tensors), keep=keep)


def begin(root: Path, facts: StepFacts) -> Path:
    """A hidden folder for the parts of a checkpoint."""
    return begin_sealed(checkpoint_folder(root, lineage=facts.lineage, step=facts.step))


@contextlib.contextmanager
def unfinished(temporary: Path) -> Iterator[None]:
    """Removes the folder when what is written into it fails."""
    try:
        yield
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def rows_of(rank: int, tensors: Mapping[str, Tensor], first_rows: Mapping[str, int]) -> tuple[str, dict[str, Tensor]]:
    """The file of a rank and what goes into it: `tensors[name]` are rows `first_rows[name]` and after; those without rows are
    left out."""
    mine = {f"{rank}:{first_rows[name]}:{name}": t for name, t in tensors.items() if t.shape[0]}
    return f"tensors-{rank}.safetensors", mine


def write(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """Write a file of tensors and sync it; returns what the manifest says of each."""
    layout = {n: TensorShape(shape=tuple(t.shape), dtype=t.dtype) for n, t in tensors.items()}
    return write_tensors(path, layout, tensors.items())


def finish(
    root: Path, temporary: Path, facts: StepFacts, entries: Mapping[str, TensorEntry], *, keep: int = KEEP
) -> Path:
    """Seal the parts, described by `entries`, as one checkpoint; remove what is older than the newest `keep` of its lineage.

    A folder of the same step is replaced: it belongs to an attempt whose result was not used. Until the new one is
    complete the one before it stands.
    """
    folder = checkpoint_folder(root, lineage=facts.lineage, step=facts.step)
    manifest = manifest_of(
        entries,
        kind=KIND,
        facts={
            "lineage": facts.lineage,
            "step": facts.step,
            "version": facts.step + 1,
            "ids_hash": facts.ids_hash,
            "seed": facts.seed,
            "optimiser_steps": facts.optimiser_steps,
        },
    )
    if folder.exists():
        remove_sealed(folder)
    finish_sealed(temporary, folder, manifest)
    _prune(root, facts, keep)
    return folder


@record
class _Part:
    """Rows of a tensor in one file."""

    first_row: int
    entry: str  # its name in manifest and file
    file: str


class StoredState:
    """A checkpoint on disk, read by rows: whoever holds a part of the state reads that part."""

    def __init__(self, root: Path, *, lineage: int, step: int) -> None:
        """WeightsError when it is missing, garbled or of another step. Tensors are checked as they are read."""
        self._folder = checkpoint_folder(root, lineage=lineage, step=step)
        self._manifest = read_manifest(self._folder, kind=KIND)
        self.facts = _facts(self._folder, self._manifest)
        if (self.facts.lineage, self.facts.step) != (lineage, step):
            raise WeightsError(
                "the checkpoint is of another step", where=str(self._folder), got=self.facts.step, expected=str(step)
            )
        self._parts: dict[str, list[_Part]] = {}
        for entry in self._manifest.tensors:
            name, part = _part_of(entry)
            self._parts.setdefault(name, []).append(part)
        for parts in self._parts.values():
            parts.sort(key=lambda p: p.first_row)
        self._check_names()

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype (torch's name without "torch.") of every parameter."""
        found = {}
        for name, parts in self._parts.items():
            group, _, parameter = name.partition(".")
            if group == "param":
                entries = [self._manifest.tensors[p.entry] for p in parts]
                rows = sum(e.shape[0] for e in entries) if entries[0].shape else 0
                found[parameter] = ((rows, *entries[0].shape[1:]) if entries[0].shape else (), entries[0].dtype)
        return found

    def whole(self, name: str) -> Tensor:
        """A whole tensor."""
        parts = [self._read(p) for p in self._parts[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Rows `first` to `first + count` of a tensor. Only the parts that hold some of them are read, each wholly, since the
        hash is of the part."""
        found: list[Tensor] = []
        for part in self._parts[name]:
            size = self._manifest.tensors[part.entry].shape[0]
            low, high = max(first, part.first_row), min(first + count, part.first_row + size)
            if low < high:
                found.append(self._read(part)[low - part.first_row : high - part.first_row])
        if sum(len(f) for f in found) != count:
            raise WeightsError(
                f"the checkpoint lacks rows of {name}", where=str(self._folder), got=sum(map(len, found))
            )
        return torch.cat(found) if found else self._read(self._parts[name][0])[:0]

    def _read(self, part: _Part) -> Tensor:
        with _opened(self._folder / part.file) as file:
            return _checked(file, part.entry, self._manifest.tensors[part.entry], self._folder / part.file)

    def _check_names(self) -> None:
        groups: dict[str, set[str]] = {group: set() for group in _GROUPS}
        for key in self._parts:
            group, _, name = key.partition(".")
            if group not in groups:
                raise WeightsError("the checkpoint holds an unknown tensor", where=str(self._folder), got=key)
            groups[group].add(name)
        if not groups["param"] == groups["exp_avg"] == groups["exp_avg_sq"]:
            raise WeightsError("the checkpoint lacks moments of some parameters", where=str(self._folder))


def load(root: Path, *, lineage: int, step: int) -> TrainerState:
    """The whole state after `step`, every hash checked. WeightsError when it is missing or anything does not match."""
    stored = StoredState(root, lineage=lineage, step=step)
    split = {group: {name: stored.whole(f"{group}.{name}") for name in stored.shapes} for group in _GROUPS}
    return TrainerState(
        lineage=lineage,
        step=step,
        ids_hash=stored.facts.ids_hash,
        seed=stored.facts.seed,
        optimiser_steps=stored.facts.optimiser_steps,
        params=split["param"],
        exp_avg=split["exp_avg"],
        exp_avg_sq=split["exp_avg_sq"],
    )


def list_complete(root: Path) -> tuple[CheckpointMark, ...]:
    """Marks of the checkpoints that are whole, by (lineage, step). Every hash is checked, `HASHERS` tensors in memory
    at a time at most; a folder that fails is left out and named in the log."""
    marks: list[CheckpointMark] = []
    for folder in _folders(root):
        try:
            manifest = read_manifest(folder, kind=KIND)
            _verify(folder, manifest)
            facts = _facts(folder, manifest)
        except WeightsError as e:
            _log.warning("checkpoint %s is not whole and is ignored: %s", folder.name, e)
            continue
        if checkpoint_folder(root, lineage=facts.lineage, step=facts.step) == folder:
            marks.append(CheckpointMark(step=facts.step, ids_hash=facts.ids_hash, lineage=facts.lineage))
        else:
            _log.warning("checkpoint %s says it is of step %d and is ignored", folder.name, facts.step)
    return tuple(sorted(marks, key=lambda m: (m.lineage, m.step)))


def complete_folders(root: Path) -> dict[int, list[Path]]:
    """Folders below `root` whose manifest reads, oldest first, by lineage from the first on. Tensors are not looked at."""
    found: dict[int, list[Path]] = {}
    for folder in _folders(root):
        try:
            facts = _facts(folder, read_manifest(folder, kind=KIND))
        except WeightsError:
            continue
        found.setdefault(facts.lineage, []).append(folder)
    return {lineage: sorted(found[lineage]) for lineage in sorted(found)}


def _part_of(entry: str) -> tuple[str, _Part]:
    """The tensor an entry belongs to, and which rows of it are where."""
    match = _ROWS.match(entry)
    if match is None:
        return entry, _Part(first_row=0, entry=entry, file=TENSORS)
    return match[3], _Part(first_row=int(match[2]), entry=entry, file=f"tensors-{match[1]}.safetensors")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file, read lazily. WeightsError for whatever is wrong with it."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError, ValueError) as e:
        raise WeightsError("cannot read the tensors", where=str(path), got=str(e)) from e


def _checked(file: Any, name: str, entry: TensorEntry, path: Path) -> Tensor:
    tensor: Tensor = file.get_tensor(name)
    got, expected = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")), (entry.shape, entry.dtype)
    if got != expected:
        raise WeightsError(
            f"tensor {name} has another shape or dtype", where=str(path), got=got, expected=str(expected)
        )
    found = tensor_sha256(tensor)
    if found != entry.sha256:
        raise WeightsError(f"tensor {name} does not match its hash", where=str(path), got=found, expected=entry.sha256)
    return tensor


def _verify(folder: Path, manifest: Manifest) -> None:
    """WeightsError for anything missing, extra or different. Large files are hashed by several threads."""
    files: dict[str, set[str]] = {}
    for entry in manifest.tensors:
        files.setdefault(_part_of(entry)[1].file, set()).add(entry)
    jobs: list[tuple[Path, list[str]]] = []
    for name, entries in files.items():
        path = folder / name
        with _opened(path) as file:
            if set(file.keys()) != entries:
                odd = sorted(set(file.keys()) ^ entries)
                raise WeightsError("file and manifest name different tensors", where=str(path), got=odd[:4])
        parts = HASHERS if path.stat().st_size >= LARGE_BYTES else 1
        jobs += [(path, sorted(entries)[i::parts]) for i in range(min(parts, len(entries)))]

    def check(job: tuple[Path, list[str]]) -> None:
        path, entries = job
        with _opened(path) as file:
            for entry in entries:
                _checked(file, entry, manifest.tensors[entry], path)

    if len(jobs) == 1:
        check(jobs[0])
        return
    with ThreadPoolExecutor(HASHERS) as pool:
        for _ in pool.map(check, jobs):
            pass


def _prune(root: Path, facts: StepFacts, keep: int) -> None:
    """Remove what is older than the newest `keep` readable checkpoints up to this step; remains of crashes do not count. With
    so many in this lineage, those of earlier lineages go too."""
    newest = checkpoint_folder(root, lineage=facts.lineage, step=facts.step).name
    older = [p for p in _folders(root, facts.lineage) if p.name <= newest]
    for folder in reversed(older):
        if keep <= 0:
            remove_sealed(folder, beside=True)
            continue
        try:
            read_manifest(folder, kind=KIND)
        except WeightsError:
            continue
        keep -= 1
    if keep <= 0:
        for lineage in range(facts.lineage):
            for folder in _folders(root, lineage):
                remove_sealed(folder, beside=True)


def _facts(folder: Path, manifest: Manifest) -> StepFacts:
    facts = manifest.facts
    try:
        step = int(facts["step"])
        return StepFacts(
            step=step,
            ids_hash=str(facts["ids_hash"]),
            lineage=int(facts["lineage"]),
            seed=int(facts.get("seed", 0)),
            optimiser_steps=int(facts.get("optimiser_steps", step + 1)),
        )
    except (KeyError, TypeError, ValueError) as e:
        raise WeightsError("the manifest lacks step, ids_hash or lineage", where=str(folder), got=repr(e)) from e


def _folders(root: Path, lineage: int | None = None) -> list[Path]:
    """Folders named like checkpoints, whole or not, by step."""
    names = [(m, p) for p in root.iterdir() if (m := _NAME.match(p.name))] if root.is_dir() else []
    kept = [p for m, p in names if lineage is None or int(m[2]) == lineage]
    return sorted(kept, key=lambda p: p.name)
