"""Which run a person means, and the way to its daemon."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hexctl.cli.last_words import died_of
from hexctl.roots import root_words
from planner.errors import HexError
from runtime.errors import ConfigError, UnreachableError
from runtime.runs import RunInfo, alive, look_at_runs, read_run

if TYPE_CHECKING:
    from hexctl.client import Client


def choose_run(root: Path, run_id: str | None) -> RunInfo:
    """The run named (by id or an unambiguous start of it), else the only live one. ConfigError when it is not clear
    which, UnreachableError when none is live."""
    runs, unreadable = look_at_runs(root)
    if run_id is not None:
        matches = [r for r in runs if r.id == run_id] or [r for r in runs if r.id.startswith(run_id)]
        if len(matches) == 1:
            return matches[0]
        if not matches:
            if run_id in unreadable:
                raise unreadable[run_id]
            raise ConfigError(
                "no such run", where=str(root), got=run_id, expected=_names(runs) or "a run", hint="hexctl runs"
            )
        raise ConfigError("several runs begin so", where=str(root), got=run_id, expected=_names(matches))
    live = [r for r in runs if r.state == "live"]
    if len(live) > 1:
        live = [r for r in live if something_lives(r)] or live
    if len(live) == 1:
        return live[0]
    if live:
        raise ConfigError("several runs are live", where=str(root), got=_names(live), expected="--run ID")
    raise UnreachableError(
        "no live run",
        where=str(root),
        hint="hexctl up starts one; --root names another folder; hexctl runs lists ended ones",
    )


def something_lives(run: RunInfo) -> bool:
    """Whether any recorded process of the run still lives."""
    return alive(run.daemon) or any(alive(p) for p in run.ray_processes)


@contextmanager
def connected(root: Path, run_id: str | None) -> "Iterator[tuple[RunInfo, Client]]":
    """The run and a client of its daemon."""
    from hexctl.client import Client

    run = choose_run(root, run_id)
    with Client(run.paths.api_socket) as client:
        try:
            yield run, client
        except UnreachableError as e:
            raise explained(e, run) from e


def explained(e: UnreachableError, run: RunInfo) -> UnreachableError:
    """The error in terms of the run as it stands now."""
    with contextlib.suppress(HexError):
        run = read_run(Path(run.folder))
    if run.state == "ended":
        return UnreachableError(
            f"run {run.id} has ended" + (f": {run.ending}" if run.ending else ""), hint="hexctl runs"
        )
    if not alive(run.daemon):
        on = (
            "the run goes on without it"
            if any(alive(p) for p in run.ray_processes)
            else "its other processes are gone too"
        )
        said, root = died_of(run), root_words(run.folder)
        return UnreachableError(
            f"run {run.id}: its daemon is gone, {on}" + (f"; it ended with: {said}" if said else ""), where=str(run.paths.api_socket),
            hint=f"hexctl daemon --run {run.id}{root} takes it over; hexctl down --run {run.id}{root} ends it",
        )  # fmt: skip
    return UnreachableError(f"run {run.id}: {e.what}", where=e.where, got=e.got, expected=e.expected, hint=e.hint)


def _names(runs: "list[RunInfo] | tuple[RunInfo, ...]") -> str:
    return ", ".join(r.id for r in runs)
