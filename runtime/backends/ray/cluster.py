"""The Ray cluster of a run: started here in a session of its own, or joined. Ended by recorded pid and start time only.

`ray start` leaves its processes in the caller's process group, where a terminal's SIGHUP would end them: hence the session.
The same session number finds every process of the run's Ray later, workers included.
"""

import contextlib
import importlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from planner.record import record
from runtime.backends.ray import env as environment
from runtime.backends.ray.procs import command_line, end, session_members, session_of
from runtime.errors import DeadlineError, RunError
from runtime.paths import RunPaths
from runtime.runs import ProcessMark, mark, start_ticks

ADDRESS_VARIABLE = "HEXCTL_RAY_ADDRESS"  # join this cluster instead of starting one
_SOCKET_BYTES = 107  # sun_path without its final zero
_SESSION_NAME = "/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
START_S = 60.0
CONNECT_S = 30.0


@record
class RayHead:
    """A cluster that can be connected to. `processes` and `session` only when this run started it."""

    address: str
    owned: bool
    processes: tuple[ProcessMark, ...] = ()
    start_s: float | None = None  # seconds its start took; None: found running

    @property
    def session(self) -> int | None:
        """Session of the owned processes, as long as one of them lives."""
        return next((s for m in self.processes if (s := session_of(m)) is not None), None)


def check_socket_length(temp: Path) -> None:
    """RunError when Ray's sockets below `temp` would have paths that the kernel refuses."""
    length = len(os.fsencode(str(temp))) + len(_SESSION_NAME)
    if length > _SOCKET_BYTES:
        raise RunError(
            "socket paths of Ray would be too long",
            where=str(temp),
            got=f"{length} bytes",
            expected=f"at most {_SOCKET_BYTES}",
            hint="set XDG_RUNTIME_DIR or TMPDIR to a shorter folder",
        )


def start_head(
    paths: RunPaths,
    resources: Mapping[str, float],
    *,
    num_gpus: int,
    object_store_bytes: int = 128 * 2**20,
    deadline_s: float = START_S,
    extra_env: Mapping[str, str] | None = None,
    on_started: Callable[[tuple[ProcessMark, ...]], None] = lambda _: None,
) -> RayHead:
    """Start a head on 127.0.0.1 with free ports and a token of its own.

    `resources` are custom resources (one a device). `on_started` hears the mark of the session's first process at once,
    so that a caller that dies in mid-start leaves a record. DeadlineError when it is not up in time, RunError when Ray refuses.
    """
    check_socket_length(paths.ray_temp)
    for folder in (paths.short, paths.ray_temp):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    paths.logs.mkdir(parents=True, exist_ok=True)
    environment.make_token(paths.ray_token)
    home = paths.short / "home"
    environment.make_home(home)
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0", "--node-ip-address=127.0.0.1"),
        *("--num-cpus=1", f"--num-gpus={num_gpus}", f"--resources={json.dumps(dict(resources))}"),
        *(f"--object-store-memory={object_store_bytes}", f"--temp-dir={paths.ray_temp}"),
        *("--include-dashboard=false", "--dashboard-port=0", "--include-log-monitor=false", "--no-monitor"),
        *("--disable-usage-stats", "--log-style=record", "--log-color=false"),
    ]
    began = time.monotonic()
    log = paths.logs / "ray-start.log"
    with log.open("ab") as out:
        starter = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment.head_env(os.environ, token=paths.ray_token, home=home) | dict(extra_env or {}),
            start_new_session=True,
            cwd=paths.folder,
        )
    if (first := mark(starter.pid)) is not None:
        on_started((first,))
    try:
        code = starter.wait(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        end(session_members(starter.pid), term_s=1.0)
        starter.wait(timeout=5.0)
        raise DeadlineError(
            "Ray did not start",
            where=str(log),
            got=f"{deadline_s:.0f} s",
            hint="see this log and the folder " + str(paths.ray_temp),
        ) from None
    if code != 0:
        end(session_members(starter.pid), term_s=1.0)
        raise RunError("Ray refused to start", where=str(log), got=_tail(log), hint="see this log")
    _drop_idle(starter.pid)
    address = (paths.ray_temp / "ray_current_cluster").read_text().strip()
    head = RayHead(
        address=address,
        owned=True,
        processes=_lasting(starter.pid),
        start_s=time.monotonic() - began,
    )
    on_started(head.processes)
    return head


def _drop_idle(session: int) -> None:
    """End the API server that `--include-dashboard=false` starts all the same: 90 MiB that serve nothing here."""
    idle = [m for m in session_members(session) if "ray/dashboard/dashboard.py" in command_line(m.pid)]
    end(idle, term_s=2.0)


def _lasting(session: int) -> tuple[ProcessMark, ...]:
    """gcs_server and raylet first: their life is the cluster's."""
    members = session_members(session)
    core = [m for m in members if os.path.basename(command_line(m.pid).split(" ")[0]) in ("gcs_server", "raylet")]
    return tuple(core) + tuple(m for m in members if m not in core)


def _tail(log: Path, lines: int = 3) -> str:
    return " | ".join(log.read_text(errors="replace").strip().splitlines()[-lines:])


def is_up(head: RayHead) -> bool:
    """Whether an owned head's gcs_server and raylet both live. A joined one is asked by connecting."""
    core = [m for m in head.processes[:2] if start_ticks(m.pid) == m.start_ticks]
    return len(core) == 2


def stop_head(processes: tuple[ProcessMark, ...], deadline_s: float = 15.0) -> tuple[ProcessMark, ...]:
    """End an owned cluster: everything in its session, TERM, then KILL. Returns what could not be ended.

    Safe to call on a cluster that is half dead or gone; never touches a process without a matching mark.
    """
    session = RayHead(address="", owned=True, processes=processes).session
    marks = set(processes)
    if session is not None:
        marks |= set(session_members(session))
    left = set(end(marks, term_s=min(2.0, deadline_s)))
    if session is not None:
        # Children that were born while their parents died.
        left |= set(end(session_members(session), term_s=0.0))
    return tuple(sorted(left, key=lambda m: m.pid))


def connect(address: str, run_namespace: str, *, token: Path | None, deadline_s: float = CONNECT_S) -> Any:
    """Connect this process as a driver; returns the `ray` module. DeadlineError when the cluster does not answer.

    `token` None: a joined cluster whose credentials are in the caller's environment. Ray's driver would install a SIGTERM
    handler and print the cluster's error messages to stdout; a control plane wants neither.
    """
    if token is not None:
        os.environ.update(environment.client_env(token))
    import ray

    _reload_token()
    if address.startswith("127."):
        # Ray replaces a loopback address by the host's own unless this was in the environment when it was first imported.
        importlib.import_module("ray._private.ray_constants").ENABLE_RAY_CLUSTER = False  # type: ignore[attr-defined]
    _quiet(ray)
    failure: list[BaseException] = []

    def attach() -> None:
        try:
            ray.init(
                address=address,
                namespace=run_namespace,
                log_to_driver=False,
                configure_logging=False,
                ignore_reinit_error=False,
                **({"_node_ip_address": "127.0.0.1"} if token is not None else {}),
            )
        except BaseException as e:  # noqa: BLE001 - handed to the waiting thread, which raises it in words
            failure.append(e)

    thread = threading.Thread(target=attach, name="ray-connect", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if thread.is_alive():
        raise DeadlineError(
            "Ray does not answer", where=address, got=f"{deadline_s:.0f} s", hint="`hexctl doctor` looks at it"
        )
    if failure:
        text = str(failure[0]).strip().splitlines()
        raise RunError("cannot connect to Ray", where=address, got=text[0] if text else type(failure[0]).__name__)
    return ray


def disconnect() -> None:
    """End this process's connection; detached actors live on."""
    if (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
        ray.shutdown()


def _reload_token() -> None:
    """Ray reads mode and token once; a process that was connected with another token must read them again."""
    with contextlib.suppress(ImportError, AttributeError):
        raylet: Any = importlib.import_module("ray._raylet")
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def _quiet(ray: Any) -> None:
    logging.getLogger("ray").setLevel(logging.ERROR)
    with contextlib.suppress(AttributeError):
        ray._private.worker._worker_logs_enabled = False
