"""Making a run folder, or adopting the one of a living run. Everything that can be wrong is said before anything starts."""

import os
import secrets
import shutil
import time
from importlib import metadata
from pathlib import Path

from planner.record import record, replace
from runtime.config.calibration import calibration_file, load_calibration
from runtime.config.load import LoadedConfig, load_config, resolved_toml
from runtime.config.schema import Config
from runtime.daemon.lock import DaemonLock, acquire, next_epoch
from runtime.errors import ConfigError, RefusedError, RunError
from runtime.paths import RunPaths, short_root
from runtime.rl.tasks.rows import read_rows
from runtime.runs import RunInfo, alive, list_runs, mark, read_run, write_run

FOLDERS = ("logs", "checkpoints", "weights", "counters")


@record
class Options:
    """The command line of the daemon."""

    config: Path | None
    run: str | None = None
    root: Path | None = None  # default: the configuration's run.root
    steps: int | None = None
    for_s: float | None = None
    detached: bool = False


@record
class OpenRun:
    """A run that this process holds the lock of."""

    info: RunInfo
    paths: RunPaths
    config: Config
    lock: DaemonLock
    epoch: int
    adopted: bool  # it was living before


def hexctl_version() -> str:
    """The installed version."""
    try:
        return metadata.version("hexctl")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def open_run(options: Options) -> OpenRun:
    """Find or make the run that the options mean, take its lock and its next epoch.

    RefusedError: it has a daemon. ConfigError: nothing says which run, no space, or a folder that
    cannot be written.
    """
    loaded = None if options.config is None else load_config(options.config)
    root = options.root or (loaded.config.run.root if loaded is not None else Path("runs"))
    info = _find(options, loaded, root.resolve())
    if info is None:
        if loaded is None:
            raise ConfigError(
                "no such run", where=str(root), got=options.run, hint="hexctl runs lists them; or name a configuration"
            )
        _check_data(loaded)
        return _make(options, loaded, root.resolve())
    return _adopt(info, loaded)


def _check_data(loaded: LoadedConfig) -> None:
    """Every row of the data, before anything starts: a bad one would otherwise end flow, half a minute later."""
    task = loaded.config.task
    for path in (task.path, task.eval_path) if task is not None and task.source == "jsonl" else ():
        if path is not None and task is not None:
            read_rows(path, task)


def _find(options: Options, loaded: LoadedConfig | None, root: Path) -> RunInfo | None:
    if options.run is not None:
        folder = root / options.run
        return read_run(folder) if (folder / "run.json").exists() else None
    if loaded is None:
        raise ConfigError("which run?", expected="a configuration file or --run ID")
    same = [r for r in list_runs(root) if r.config_sha256 == loaded.sha256 and r.state == "live"]
    with_daemon = next((r for r in same if alive(r.daemon)), None)
    if with_daemon is not None and with_daemon.daemon is not None:
        raise RefusedError(
            f"run {with_daemon.id} of this configuration has a daemon already",
            where=with_daemon.folder,
            got=f"pid {with_daemon.daemon.pid}",
            hint="hexctl attach shows it; hexctl down ends it; --run NEW-ID starts another beside it",
        )
    living = [r for r in same if any(alive(p) for p in r.ray_processes)] or same[-1:]
    if len(living) > 1:
        ids = ", ".join(r.id for r in living)
        raise ConfigError("several living runs of this configuration", where=str(root), got=ids, expected="--run ID")
    return living[0] if living else None


def _make(options: Options, loaded: LoadedConfig, root: Path) -> OpenRun:
    run_id = options.run or f"{loaded.config.run.name}-{secrets.token_hex(2)}"
    folder = root / run_id
    try:
        root.mkdir(parents=True, exist_ok=True)
        _check_disk(root, loaded.config.run.disk_floor)
        measured = calibration_file(loaded.config, root=root)
        if measured is not None:
            load_calibration(measured)  # a bad one is refused before anything is made
        folder.mkdir()
        for name in FOLDERS:
            (folder / name).mkdir()
        short = short_root() / secrets.token_hex(4)
        short.mkdir(mode=0o700)
        paths = RunPaths(folder=folder, short=short)
        paths.config.write_text(resolved_toml(loaded))
        if measured is not None:
            shutil.copyfile(measured, paths.calibration)  # the run keeps what its factors are relative to
    except OSError as e:
        raise ConfigError(
            "cannot make the run folder",
            where=str(e.filename or folder),
            got=e.strerror or str(e),
            hint="run.root or --root names a folder that can be written to",
        ) from e
    lock = acquire(paths, run_id)
    info = RunInfo(
        id=run_id,
        name=loaded.config.run.name,
        folder=str(folder),
        short=str(short),
        config_path=str(loaded.path),
        config_sha256=loaded.sha256,
        created_at_s=time.time(),
        hexctl_version=hexctl_version(),
        label="mixed",
        state="live",
        daemon=mark(os.getpid()),
    )
    write_run(info)
    return OpenRun(info=info, paths=paths, config=loaded.config, lock=lock, epoch=next_epoch(paths), adopted=False)


def _adopt(info: RunInfo, loaded: LoadedConfig | None) -> OpenRun:
    paths = info.paths
    if loaded is not None and loaded.sha256 != info.config_sha256:
        raise RefusedError(
            f"run {info.id} has another configuration",
            where=str(loaded.path),
            got=loaded.sha256[:12],
            expected=info.config_sha256[:12],
            hint=f"leave the configuration out to go on with the run's own: hexctl daemon --run {info.id}",
        )
    config = load_config(paths.config).config
    lock = acquire(paths, info.id)
    try:
        _check_disk(paths.folder, config.run.disk_floor)
        paths.short.mkdir(mode=0o700, parents=True, exist_ok=True)
        adopted = info.state == "live"
        info = update_run(paths.folder, daemon=mark(os.getpid()), state="live", ending="")
        epoch = next_epoch(paths)
    except OSError as e:
        lock.release()
        raise RunError("cannot adopt the run", where=e.filename or info.folder, got=e.strerror) from e
    except RunError:
        lock.release()
        raise
    return OpenRun(info=info, paths=paths, config=config, lock=lock, epoch=epoch, adopted=adopted)


def _check_disk(folder: Path, floor_bytes: float) -> None:
    free = shutil.disk_usage(folder).free
    if free < floor_bytes:
        raise ConfigError(
            "too little free disk",
            where=str(folder),
            got=f"{free / 1e9:.3g} GB",
            expected=f"at least {floor_bytes / 1e9:.3g} GB (run.disk_floor)",
            hint="free some, or name another folder with --root",
        )


def update_run(folder: Path, **changes: object) -> RunInfo:
    """Read `run.json`, change fields, write it whole. Others write it too (Ray's address), never at the same time."""
    try:
        info = replace(read_run(folder), **changes)
        write_run(info)
    except OSError as e:
        raise RunError("cannot write run.json", where=str(folder), got=e.strerror or str(e)) from e
    return info
