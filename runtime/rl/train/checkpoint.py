"""Checkpoints: everything a step's result consists of, in one sealed folder.

    s00000011-l0/    the state after optimiser step 11, that is version 12, of lineage 0

Tensors: `param.<name>` (master precision), `exp_avg.<name>` and `exp_avg_sq.<name>` (AdamW's moments). Facts: step, version,
lineage, hash of the batch's ids, AdamW's own step count and the seed. The learning-rate schedule is a function of the step and
training draws no random numbers, so nothing else is state.
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from planner.record import record
from runtime.errors import WeightsError
from runtime.rl.types import CheckpointMark
from runtime.rl.weights.sealed import Manifest, describe, read_manifest, read_tensors, remove_sealed, write_sealed

KIND = "checkpoint"
KEEP = 3
_NAME = re.compile(r"^s(\d{8})-l(\d+)$")
_GROUPS = ("param", "exp_avg", "exp_avg_sq")
_log = logging.getLogger(__name__)


@record
class TrainerState:
    """The state after optimiser step `step`. Tensor maps share the model's parameter names."""

    lineage: int
    step: int
    ids_hash: str
    seed: int
    optimiser_steps: int  # updates AdamW made; fewer than step + 1 when a batch had no trained token
    params: Mapping[str, Tensor]
    exp_avg: Mapping[str, Tensor]
    exp_avg_sq: Mapping[str, Tensor]


def checkpoint_folder(root: Path, *, lineage: int, step: int) -> Path:
    """Where a checkpoint lives below `root`."""
    return root / f"s{step:08d}-l{lineage}"


def save(root: Path, state: TrainerState, *, keep: int = KEEP) -> Path:
    """Write the checkpoint of `state`, then remove what is older than the newest `keep` of its lineage. Returns its folder.

    A folder of the same step is replaced: it belongs to an attempt whose result was not used. Until the new one is
    complete the one before it stands.
    """
    folder = checkpoint_folder(root, lineage=state.lineage, step=state.step)
    groups = {"param": state.params, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
    tensors = {f"{group}.{name}": t for group, named in groups.items() for name, t in named.items()}
    facts = {
        "lineage": state.lineage,
        "step": state.step,
        "version": state.step + 1,
        "ids_hash": state.ids_hash,
        "seed": state.seed,
        "optimiser_steps": state.optimiser_steps,
    }
    manifest = describe(tensors, kind=KIND, facts=facts)
    if folder.exists():
        remove_sealed(folder)
    write_sealed(folder, tensors, manifest)
    _prune(root, state, keep)
    return folder


def load(root: Path, *, lineage: int, step: int) -> TrainerState:
    """The state after `step`, every hash checked. WeightsError when it is missing or anything does not match."""
    folder = checkpoint_folder(root, lineage=lineage, step=step)
    manifest = read_manifest(folder, kind=KIND)
    tensors = read_tensors(folder, manifest)
    mark = _mark(folder, manifest)
    if (mark.lineage, mark.step) != (lineage, step):
        raise WeightsError("the checkpoint is of another step", where=str(folder), got=mark.step, expected=str(step))
    split: dict[str, dict[str, Tensor]] = {group: {} for group in _GROUPS}
    for key, tensor in tensors.items():
        group, _, name = key.partition(".")
        if group not in split:
            raise WeightsError("the checkpoint holds an unknown tensor", where=str(folder), got=key)
        split[group][name] = tensor
    if not split["param"].keys() == split["exp_avg"].keys() == split["exp_avg_sq"].keys():
        raise WeightsError("the checkpoint lacks moments of some parameters", where=str(folder))
    return TrainerState(
        lineage=lineage,
        step=step,
        ids_hash=mark.ids_hash,
        seed=int(manifest.facts.get("seed", 0)),
        optimiser_steps=int(manifest.facts.get("optimiser_steps", step + 1)),
        params=split["param"],
        exp_avg=split["exp_avg"],
        exp_avg_sq=split["exp_avg_sq"],
    )


def list_complete(root: Path) -> tuple[CheckpointMark, ...]:
    """Marks of the checkpoints that are whole, by (lineage, step). Every hash is checked; a folder that fails is left out
    and named in the log."""
    marks: list[CheckpointMark] = []
    for folder in _folders(root):
        try:
            manifest = read_manifest(folder, kind=KIND)
            read_tensors(folder, manifest)
            mark = _mark(folder, manifest)
        except WeightsError as e:
            _log.warning("checkpoint %s is not whole and is ignored: %s", folder.name, e)
            continue
        if checkpoint_folder(root, lineage=mark.lineage, step=mark.step) == folder:
            marks.append(mark)
        else:
            _log.warning("checkpoint %s says it is of step %d and is ignored", folder.name, mark.step)
    return tuple(sorted(marks, key=lambda m: (m.lineage, m.step)))


def _prune(root: Path, state: TrainerState, keep: int) -> None:
    """Remove what is older than the newest `keep` readable checkpoints up to this step; remains of crashes do not count."""
    newest = checkpoint_folder(root, lineage=state.lineage, step=state.step).name
    older = [p for p in _folders(root, state.lineage) if p.name <= newest]
    for folder in reversed(older):
        if keep <= 0:
            remove_sealed(folder)
            continue
        try:
            read_manifest(folder, kind=KIND)
        except WeightsError:
            continue
        keep -= 1


def _mark(folder: Path, manifest: Manifest) -> CheckpointMark:
    facts = manifest.facts
    try:
        return CheckpointMark(step=int(facts["step"]), ids_hash=str(facts["ids_hash"]), lineage=int(facts["lineage"]))
    except (KeyError, TypeError, ValueError) as e:
        raise WeightsError("the manifest lacks step, ids_hash or lineage", where=str(folder), got=repr(e)) from e


def _folders(root: Path, lineage: int | None = None) -> list[Path]:
    """Folders named like checkpoints, whole or not, by step."""
    names = [(m, p) for p in root.iterdir() if (m := _NAME.match(p.name))] if root.is_dir() else []
    kept = [p for m, p in names if lineage is None or int(m[2]) == lineage]
    return sorted(kept, key=lambda p: p.name)
