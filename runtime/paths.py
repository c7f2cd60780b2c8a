"""Where a run's things live: the run folder, and the short folder for sockets."""

import os
import tempfile
from pathlib import Path

from planner.record import record


@record
class RunPaths:
    """Every path of one run. `short` is $XDG_RUNTIME_DIR/hexctl/<8 hex> (else a 0700 folder in the temp dir):
    Unix socket paths must stay under 108 bytes."""

    folder: Path
    short: Path

    @property
    def config(self) -> Path:
        return self.folder / "config.toml"

    @property
    def run_json(self) -> Path:
        return self.folder / "run.json"

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger.db"

    @property
    def events(self) -> Path:
        return self.folder / "events.db"

    @property
    def calibration(self) -> Path:
        """The calibration the run was started with; absent when there was none."""
        return self.folder / "calibration.json"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.folder / "samples.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.folder / "evaluations.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.folder / "weights"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def counters(self) -> Path:
        return self.folder / "counters"

    @property
    def api_socket(self) -> Path:
        return self.short / "api.sock"

    @property
    def ray_temp(self) -> Path:
        return self.short / "ray"

    @property
    def ray_token(self) -> Path:
        return self.short / "ray-token"

    @property
    def daemon_lock(self) -> Path:
        return self.folder / "daemon.lock"


def short_root() -> Path:
    """Parent of the short folders, 0700, made when missing."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    root = (
        Path(base) / "hexctl"
        if base and os.access(base, os.W_OK)
        else Path(tempfile.gettempdir()) / f"hexctl-{os.getuid()}"
    )
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise PermissionError(f"{root} belongs to another user")
    return root
