"""The environment of Ray processes that a run starts: quiet, bound to this machine, behind a token, quick to notice a death.

Ray asks cloud metadata services for the name of the provider unless its HOME holds a bootstrap file that names one, so
the head gets a HOME of its own; actors put the user's back (`HEXCTL_HOME`).
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

USER_HOME = "HEXCTL_HOME"
_BOOTSTRAP = "cluster_name: hexctl\nprovider: {type: local}\n"


def make_token(path: Path) -> None:
    """A token file that only its owner may read, made once a run."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(fd, "w") as f:
        f.write(secrets.token_hex(32))


def make_home(folder: Path) -> None:
    """The head's HOME."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "ray_bootstrap_config.yaml").write_text(_BOOTSTRAP)


def client_env(token: Path) -> dict[str, str]:
    """What a process needs that talks to the run's Ray."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9/",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # one machine: forces 127.0.0.1
        "RAY_COLOR_PREFIX": "0",
        # Nobody reads Ray's own statistics here: without them a driver's threads are idle more.
        "RAY_event_stats": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_task_events_report_interval_ms": "0",
    }


def head_env(base: Mapping[str, str], *, token: Path, home: Path) -> dict[str, str]:
    """Environment of `ray start --head` and, through it, of every worker."""
    env = {k: v for k, v in base.items() if not k.startswith("RAY_")}
    env |= client_env(token)
    env |= {
        "HOME": str(home),
        USER_HOME: base.get("HOME", ""),
        # A raylet killed with -9 is noticed after 1.3 s instead of 14.8 s.
        "RAY_health_check_initial_delay_ms": "500",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_timeout_ms": "500",
        "RAY_health_check_failure_threshold": "6",
        # No idle workers: each costs 87 MiB and the run's actors are few and long-lived.
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        # Actors choose their GPUs by UUID themselves: a placement bundle says which device, Ray's index does not.
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Kill for want of memory late: the limits of a run are the planner's, not Ray's.
        "RAY_memory_usage_threshold": "0.98",
        "RAY_memory_monitor_refresh_ms": "1000",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "OMP_NUM_THREADS": base.get("OMP_NUM_THREADS", "1"),
        # Threads that wait give their core to the other processes of a CPU's devices: spinning, a step takes several times as long.
        "OMP_WAIT_POLICY": base.get("OMP_WAIT_POLICY", "PASSIVE"),
    }
    return env
