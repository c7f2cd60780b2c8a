"""Reading a configuration file: every fault at once, each with file and line; where each value came from.

Paths inside the file are relative to the folder that holds it and come out absolute (`run.root` alone stays as
written: it is relative to where hexctl is started). Effects are reads only.
"""

import difflib
import hashlib
import json
import math
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from planner.errors import HexError
from planner.record import record, replace
from runtime.config import locate
from runtime.config.drift import drift_faults
from runtime.config.emit import to_toml
from runtime.config.problem import cluster_from_config, workload_from_config
from runtime.config.schema import Config
from runtime.errors import ConfigError

Loc = tuple[str | int, ...]
NO_OVERRIDES: Mapping[str, str] = types.MappingProxyType({})


@record
class LoadedConfig:
    """A configuration, the file it came from and the hash that says whether two are the same (paths resolved,
    defaults filled in, comments and order apart)."""

    config: Config
    path: Path
    sha256: str
    text: str
    origins: Mapping[str, str]  # dotted key -> "file:line" or "--set"; absent: default


@record
class _Fault:
    loc: Loc
    what: str
    got: object = None
    expected: str = ""
    hint: str = ""
    line: int | None = None  # None: not of the file (an override)

    @property
    def key(self) -> str:
        return _dotted(self.loc)


def load_config(path: Path, *, overrides: Mapping[str, str] = NO_OVERRIDES, check_files: bool = True) -> LoadedConfig:
    """Read, decode and resolve `path`; `overrides` are dotted keys with values as TOML (or bare text).

    `check_files` also looks whether the model, tokenizer, data and pacing files are there. ConfigError names every
    fault with file and line.
    """
    text, tree = _read(path)
    lines = locate.key_lines(text)
    changed = _apply(tree, overrides)
    config = _decode(tree, path, lines, changed)
    config = _resolve(config, path.resolve().parent)
    faults = [*_contradictions(config), *(_missing_files(config) if check_files else ())]
    if faults:
        raise _error(path, [_placed(f, lines, changed) for f in faults])
    return LoadedConfig(
        config=config,
        path=path.resolve(),
        sha256=_hash(config),
        text=text,
        origins=_origins(path, lines, changed),
    )


def resolved_toml(loaded: LoadedConfig) -> str:
    """The whole configuration with defaults and absolute paths, as TOML that loads from anywhere to the same hash."""
    head = (
        f"# Resolved from {json.dumps(str(loaded.path), ensure_ascii=False)}: paths are absolute, defaults filled in.\n"
    )
    return head + to_toml(loaded.config.model_dump(mode="json", exclude_none=True))


def _hash(config: Config) -> str:
    body = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(body.encode()).hexdigest()


def need_runnable(loaded: LoadedConfig) -> None:
    """ConfigError when the configuration can be planned and not run: no task, shapes without weights, a declared fleet, or
    an algorithm that only the planner knows."""
    config, wanting = loaded.config, []
    if config.fleet.source == "simulated":
        return  # nothing is run
    if config.task is None:
        wanting.append("a [task] table")
    if config.model.source == "shape":
        wanting.append('model.source = "seeded" or "pretrained"')
    if config.fleet.source == "declared":
        wanting.append("a fleet.source whose devices exist")
    runs = {"name": "grpo", "reference_model": False, "reward_model": False, "update_mode": "rolling"}
    if config.rollout.engine == "torch":
        runs["kv_on_update"] = "recompute"
    for key, value in runs.items():
        if getattr(config.algorithm, key) != value:
            wanting.append(f"algorithm.{key} = {json.dumps(value)}")
    if wanting:
        raise ConfigError(
            "this configuration is for planning only",
            where=str(loaded.path),
            expected=", ".join(wanting),
            hint="hexctl plan shows its plan",
        )


def leaves(config: Config) -> Iterator[tuple[str, object]]:
    """Every value as (dotted key, plain value), in the order of the schema."""
    yield from _leaves(config.model_dump(mode="json"), "")


def _leaves(value: object, key: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for k, v in value.items():
            yield from _leaves(v, f"{key}.{k}" if key else str(k))
    elif isinstance(value, list) and any(isinstance(v, dict) for v in value):
        for i, v in enumerate(value):
            yield from _leaves(v, f"{key}.{i}")
    else:
        yield key, value


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise ConfigError("cannot read the configuration", where=str(path), got=e.strerror) from e
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        raise ConfigError("not UTF-8 text", where=f"{path}:{line}", got=raw[e.start : e.start + 1]) from e
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        message, line = _syntax(str(e), text)
        raise ConfigError(
            f"not TOML: {message}", where=f"{path}:{line}", hint="https://toml.io describes the format"
        ) from e
    except RecursionError as e:
        raise ConfigError("not TOML that can be read: nested too deep", where=str(path)) from e


def _syntax(message: str, text: str) -> tuple[str, int]:
    """tomllib says "... (at line 3, column 7)" or "(at end of document)"."""
    what, _, place = message.rpartition(" (at ")
    if place.startswith("line "):
        return what, int(place.removeprefix("line ").split(",")[0])
    return what or message, text.rstrip("\n").count("\n") + 1


def _apply(tree: dict[str, Any], overrides: Mapping[str, str]) -> frozenset[Loc]:
    """Put the overrides into the tree; returns their paths."""
    done: set[Loc] = set()
    for dotted, text in overrides.items():
        keys = dotted.split(".")
        node: Any = tree
        for key in keys[:-1]:
            node = _step(node, key, dotted)
        last = keys[-1]
        if isinstance(node, list):
            node[_index(node, last, dotted)] = _toml_value(text)
        elif isinstance(node, dict) and last:
            node[last] = _toml_value(text)
        else:
            raise ConfigError("no such key", where=f"--set {dotted}", got=dotted, expected="section.key=value")
        done.add(tuple(int(k) if k.isascii() and k.isdigit() else k for k in keys))
    return frozenset(done)


def _step(node: Any, key: str, dotted: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, key, dotted)]
    if isinstance(node, dict) and key:
        return node.setdefault(key, {})
    raise ConfigError("no such key", where=f"--set {dotted}", got=dotted, expected="section.key=value")


def _index(node: list[Any], key: str, dotted: str) -> int:
    if key.isascii() and key.isdigit() and int(key) < len(node):
        return int(key)
    raise ConfigError("no such element", where=f"--set {dotted}", got=key, expected=f"0 to {len(node) - 1}")


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _decode(tree: dict[str, Any], path: Path, lines: Mapping[Loc, int], changed: frozenset[Loc]) -> Config:
    faults = [_Fault(loc=loc, what="not a finite number", got=value) for loc, value in _not_finite(tree, ())]
    config = None
    if not faults:
        try:
            # As JSON, strictly: TOML has types of its own, so "5" is no number and true no 1.
            config = Config.model_validate_json(json.dumps(tree, default=str), strict=True)
        except ValidationError as e:
            faults = [_fault(dict(d)) for d in e.errors(include_url=False)]
    if config is None:
        raise _error(path, [_placed(f, lines, changed) for f in faults])
    return config


def _not_finite(value: object, loc: Loc) -> Iterator[tuple[Loc, object]]:
    if isinstance(value, float) and not math.isfinite(value):
        yield loc, value
    elif isinstance(value, dict):
        for k, v in value.items():
            yield from _not_finite(v, (*loc, k))
    elif isinstance(value, list):
        for i, v in enumerate(value):
            yield from _not_finite(v, (*loc, i))


def _fault(detail: dict[str, Any]) -> _Fault:
    """One pydantic fault in our words."""
    loc: Loc = tuple(p for p in detail["loc"] if p != "[key]")
    kind, message = detail["type"], str(detail["msg"])
    if kind == "extra_forbidden":
        known = sorted(_keys_at(loc[:-1]))
        close = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else "known here: " + ", ".join(known)
        return _Fault(loc=loc, what="unknown key", hint=hint)
    if kind == "missing":
        return _Fault(loc=loc, what="missing", expected=_about(loc))
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, HexError):
        return _Fault(loc=loc, what=cause.what, got=cause.got, expected=cause.expected, hint=cause.hint)
    if kind == "value_error":
        own = message.removeprefix("Value error, ")
        return _Fault(loc=loc, what=own)
    expected = message.removeprefix("Input should be ").removeprefix("a ").removeprefix("valid ")
    return _Fault(loc=loc, what="bad value", got=detail["input"], expected=expected)


def _models(annotation: Any) -> Iterator[tuple[Any, type[BaseModel]]]:
    """Section classes inside an annotation, each with the container around it (tuple, dict or None)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield None, annotation
        return
    origin = typing.get_origin(annotation)
    for inner in typing.get_args(annotation):
        for _, model in _models(inner):
            yield origin if origin in (tuple, dict) else None, model


def _section_at(loc: Loc) -> type[BaseModel] | None:
    """The section class that decodes the table at `loc`."""
    here: type[BaseModel] | None = Config
    parts = list(loc)
    while parts:
        field = here.model_fields.get(str(parts.pop(0))) if here else None
        found = next(_models(field.annotation), None) if field else None
        if found is None:
            return None
        container, here = found
        if container is not None and parts:
            parts.pop(0)  # the element's index or name
    return here


def _keys_at(loc: Loc) -> tuple[str, ...]:
    section = _section_at(loc)
    return tuple(section.model_fields) if section else ()


def _about(loc: Loc) -> str:
    section = _section_at(loc[:-1])
    field = section.model_fields.get(str(loc[-1])) if section else None
    return (field.description or "") if field else ""


def _dotted(loc: Loc) -> str:
    return ".".join(str(p) for p in loc)


def _placed(fault: _Fault, lines: Mapping[Loc, int], changed: frozenset[Loc]) -> _Fault:
    """The fault with its line: of the key, else of the nearest table around it; none for an override, or in a table that
    only an override has made."""
    if fault.loc in changed:
        return fault
    loc = fault.loc
    while loc and loc not in lines:
        if any(c[: len(loc)] == loc for c in changed):
            return fault
        loc = loc[:-1]
    return replace(fault, line=lines.get(loc, 1))


def _error(path: Path, faults: list[_Fault]) -> ConfigError:
    """One error for all faults, in the order of the file."""
    ordered = sorted(faults, key=lambda f: (f.line is None, f.line or 0, f.key))

    def where(f: _Fault) -> str:
        return f"{path}:{f.line}" if f.line is not None else f"--set {f.key}"

    if len(ordered) == 1:
        f = ordered[0]
        what = f"{f.key}: {f.what}" if f.key else f.what
        return ConfigError(what, where=where(f), got=_short(f.got), expected=f.expected, hint=f.hint)
    lines = [f"{len(ordered)} faults"]
    for f in ordered:
        got = f", got {_short(f.got)!r}" if f.got is not None else ""
        expected = f", expected {f.expected}" if f.expected else ""
        hint = f" ({f.hint})" if f.hint else ""
        lines.append(f"  {where(f)}: {f.key}: {f.what}{got}{expected}{hint}")
    return ConfigError("\n".join(lines), where=str(path))


def _short(value: object) -> object:
    """What fits into a line. Of text both ends stay: a path's last part says more than its first."""
    if isinstance(value, str):
        return value if len(value) <= 80 else f"{value[:19]}…{value[-60:]}"
    text = repr(value)
    return value if len(text) <= 80 else text[:79] + "…"


def _resolve(config: Config, base: Path) -> Config:
    """The configuration with absolute paths."""

    def absolute(p: Path) -> Path:
        try:
            return (base / p.expanduser()).resolve()
        except (RuntimeError, ValueError) as e:  # a user who does not exist, a zero byte
            raise ConfigError("not a path", got=str(p), expected="a path", hint=str(e)) from e

    model: dict[str, Any] = {"path": absolute(config.model.path)}
    if not config.model.tokenizer.startswith("builtin:"):
        model["tokenizer"] = str(absolute(Path(config.model.tokenizer)))
    changes: dict[str, Any] = {"model": config.model.model_copy(update=model)}
    if config.task is not None:
        named = {name: getattr(config.task, name) for name in ("path", "eval_path")}
        changes["task"] = config.task.model_copy(update={k: absolute(p) for k, p in named.items() if p is not None})
    if config.fleet.pacing is not None:
        changes["fleet"] = config.fleet.model_copy(update={"pacing": absolute(config.fleet.pacing)})
    if config.planner.calibration is not None:
        changes["planner"] = config.planner.model_copy(update={"calibration": absolute(config.planner.calibration)})
    return config.model_copy(update=changes)


def _contradictions(config: Config) -> Iterator[_Fault]:
    """Values that are good alone and do not go together: what the planner's problem or a rule cannot be made of."""
    if config.fleet.devices:
        yield from _refused(lambda: cluster_from_config(config))
    yield from _refused(lambda: workload_from_config(config))
    yield from map(_of, drift_faults(config.drift))
    if config.rollout.engine == "vllm":
        yield from _not_of_vllm(config)


def _not_of_vllm(config: Config) -> Iterator[_Fault]:
    """What only the torch engine computes."""
    dtype = config.model.rollout_dtype or config.model.dtype
    if dtype == "float64":
        key = "rollout_dtype" if config.model.rollout_dtype is not None else "dtype"
        expected = "float32 or bfloat16"
        yield _Fault(loc=("model", key), what="vllm has no such dtype", got=dtype, expected=expected, hint="")
    if config.model.scale_logits:
        hint = "the torch engine does"
        yield _Fault(loc=("model", "scale_logits"), what="vllm scales no logits", got=True, expected="false", hint=hint)


def _refused(make: Callable[[], object]) -> Iterator[_Fault]:
    try:
        make()
    except HexError as e:
        yield _of(e)


def _of(e: HexError) -> _Fault:
    loc: Loc = tuple(int(p) if p.isdigit() else p for p in e.where.split("."))
    return _Fault(loc=loc, what=e.what, got=e.got, expected=e.expected, hint=e.hint)


def _missing_files(config: Config) -> Iterator[_Fault]:
    """What the configuration names and the disk lacks."""
    model, task = config.model, config.task
    shapes = model.path / "config.json" if model.path.is_dir() else model.path
    if not shapes.is_file():
        yield _absent("model.path", shapes, "a folder with config.json, or a config.json")
    elif model.source == "pretrained" and not list(model.path.glob("*.safetensors")):
        yield _absent("model.path", model.path, "a folder with config.json and *.safetensors", "no weights there")
    if not model.tokenizer.startswith("builtin:") and not Path(model.tokenizer).is_dir():
        yield _absent("model.tokenizer", Path(model.tokenizer), 'a Hugging Face folder or "builtin:chars"')
    if task is not None and task.source == "jsonl":
        for key, file in (("task.path", task.path), ("task.eval_path", task.eval_path)):
            if file is None:
                continue
            if not file.is_file():
                yield _absent(key, file, "a file of JSON lines")
            elif file.stat().st_size == 0:
                yield _absent(key, file, "at least one row", "empty data file")
    if config.fleet.pacing is not None and not config.fleet.pacing.is_file():
        yield _absent("fleet.pacing", config.fleet.pacing, "a file with the declared speeds")


def _absent(key: str, path: Path, expected: str, what: str = "not there") -> _Fault:
    return _Fault(loc=tuple(key.split(".")), what=what, got=str(path), expected=expected, hint=_path_hint(path))


def _path_hint(path: Path) -> str:
    return "" if path.exists() else "relative paths are relative to the configuration file"


def _origins(path: Path, lines: Mapping[Loc, int], changed: frozenset[Loc]) -> Mapping[str, str]:
    origins = {_dotted(loc): f"{path}:{line}" for loc, line in lines.items()}
    return origins | {_dotted(loc): "--set" for loc in changed}
