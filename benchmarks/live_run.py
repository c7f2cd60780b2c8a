"""A run that is disturbed: its engine, trainer and daemon killed with -9, its two devices made to swap roles and swap back.

    python -m benchmarks.live_run configs/smollm2-gsm8k-gpus-2.toml --steps 120 --json live.json

The run goes through `hexctl daemon`; every disturbance waits for steps made after the one before. Told are seconds from the
disturbance until both roles are filled again and until two steps more were made, what the ledger's audit says at the
end, staleness, rewards, how far engine and trainer logprobs are apart, processor time of the control plane over the first
undisturbed steps, and what NVML says of memory at the end. Needs two devices that can hold each other's role.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.ending import end_when_told
from benchmarks.timing import cpu_s
from runtime.api.wire import Snapshot
from runtime.errors import RunError
from runtime.rl.ledger.audit import audit
from runtime.telemetry.client import report_once
from tests.live import LiveRun, by_role, identity_holds, steps

START_S, WAIT_S = 420.0, 240.0
CONTROL = ("daemon", "flow")  # the processes whose time is the control plane's


class Disturbed:
    """The run and what is measured of it."""

    def __init__(
        self, config: Path, last_step: int, root: Path, changed: Sequence[str] = (), file: Path | None = None
    ) -> None:
        self.run, self.config, self.last_step = LiveRun(root), config.resolve(), last_step
        self.changed = [part for value in changed for part in ("--set", value)]
        self.figures: dict[str, Any] = {}
        self.file = file
        self._began = time.monotonic()

    def until_steps(self, count: int, deadline_s: float) -> Snapshot:
        return self.run.until(lambda s: steps(s) >= count, f"{count} steps", deadline_s=deadline_s)

    def start(self) -> None:
        """To the first step."""
        self.run.start(self.config, "--steps", self.last_step, *self.changed)
        self.until_steps(1, START_S)
        self.figures["first_step_s"] = time.monotonic() - self._began
        self.keep()
        print(f"first step: after {self.figures['first_step_s']:.1f} s", file=sys.stderr, flush=True)

    def undisturbed(self, count: int) -> None:
        """Let it make `count` steps; what the control plane takes meanwhile."""
        before, began = self._control_s(), time.monotonic()
        s = self.until_steps(steps(self._now()) + count, WAIT_S)
        seconds = time.monotonic() - began
        after = self._control_s()
        for name in CONTROL:
            share = (after.get(name, 0.0) - before.get(name, 0.0)) / seconds / max(1, len(s.devices))
            self.figures[f"{name}_core_share_a_device"] = share
        self.figures["undisturbed"] = _of_steps(self.run.metrics())
        self.keep()
        print(f"{count} steps undisturbed: {seconds:.1f} s", file=sys.stderr, flush=True)

    def kill(self, role: str) -> None:
        """-9 to what carries a role; for vLLM to the engine, not to the replica that holds it."""
        device = by_role(self.run.until(lambda s: bool(by_role(s, role)), f"a {role}", deadline_s=WAIT_S), role)[0]
        assert device.pid is not None
        began, old = time.monotonic(), device.pid
        os.kill(_engine_of(old) or old, signal.SIGKILL)
        self._recovered(
            f"kill_{role}", began, lambda s: any(d.id == device.id and d.pid != old for d in by_role(s, role))
        )

    def restart_daemon(self) -> None:
        """-9 to the daemon, and another that takes the run over."""
        assert self.run.daemon is not None
        began = time.monotonic()
        self.run.daemon.kill()
        self.run.daemon.wait()
        self.run.start("--run", self.run.info.id)
        self._recovered("kill_daemon", began, lambda s: True)

    def swap(self, name: str) -> None:
        """Each device is pinned to the other's role."""
        s = self.run.until(
            lambda s: bool(by_role(s, "train")) and bool(by_role(s, "rollout")), "both roles", deadline_s=WAIT_S
        )
        trains, rolls = by_role(s, "train")[0], by_role(s, "rollout")[0]
        began = time.monotonic()
        for device, role in ((trains, "rollout"), (rolls, "train")):
            self._cli("unpin", device.display, check=False)
            self._cli("pin", device.display, role, "--force")
        self._recovered(
            name,
            began,
            lambda s: by_role(s, "train")[0].id == rolls.id and by_role(s, "rollout")[0].id == trains.id,
        )

    def finish(self) -> None:
        """To the last step and the audit."""
        assert self.run.daemon is not None
        self.figures["exit_code"] = self.run.end(WAIT_S * 2)
        self.figures["total_s"] = time.monotonic() - self._began
        paths = self.run.info.paths
        found = audit(paths.ledger)
        self.figures["audit_faults"] = list(found.faults)
        rows = self.run.metrics()
        self.figures |= _of_steps(rows)
        self.figures["memory_used_bytes_after"] = _memory_used()
        self.keep()

    def _recovered(self, name: str, began: float, done: Callable[[Snapshot], bool]) -> None:
        """Both roles are filled as wished, and two steps more were made: the second was begun after that."""
        s = self.run.until(
            lambda s: bool(by_role(s, "rollout")) and bool(by_role(s, "train")) and done(s), name, deadline_s=WAIT_S
        )
        self.figures[f"{name}_in_service_s"] = time.monotonic() - began
        s = self.until_steps(steps(s) + 2, WAIT_S)
        self.figures[f"{name}_two_steps_s"] = time.monotonic() - began
        self.figures[f"{name}_identity_holds"] = identity_holds(s)
        self.figures[f"{name}_memory_used_bytes"] = _memory_used()
        self.keep()
        print(f"{name}: in service {self.figures[f'{name}_in_service_s']:.1f} s", file=sys.stderr, flush=True)

    def _now(self) -> Snapshot:
        return self.run.until(lambda s: s.flow is not None, "flow", deadline_s=WAIT_S)

    def _cli(self, *arguments: str, check: bool = True) -> None:
        done = self.run.cli(*arguments, deadline_s=60)
        if check and done.returncode:
            raise AssertionError(f"hexctl {' '.join(arguments)}: {done.returncode}\n{done.stderr}")

    def _control_s(self) -> dict[str, float]:
        """Processor seconds so far: of the daemon with its children, and of flow, who also judges answers."""
        found = dict.fromkeys(CONTROL, 0.0)
        info = self.run.info
        if info.daemon is not None:
            daemon = psutil.Process(info.daemon.pid)
            found["daemon"] = sum(map(cpu_s, (daemon, *daemon.children(recursive=True))))
        for p in psutil.process_iter(["cmdline"]):
            if any("FlowActor" in part for part in p.info["cmdline"] or ()):
                found["flow"] += cpu_s(p)
        return found

    def keep(self) -> None:
        """What is known so far, into the files asked for: a run that is cut off loses nothing."""
        if self.file is not None:
            self.file.write_text(json.dumps(self.figures, indent=1))
            if self.run.info.paths.metrics.exists():
                shutil.copy(self.run.info.paths.metrics, self.file.with_suffix(".metrics.jsonl"))


def _memory_used() -> list[int | None] | str:
    try:
        return [g.memory_used_bytes for g in report_once().gpus]
    except RunError as e:
        return str(e)


def _engine_of(replica: int) -> int | None:
    """vLLM's process below a replica, if it has one."""
    for child in psutil.Process(replica).children(recursive=True):
        try:
            if any("vllm_host.main" in part for part in child.cmdline()):
                return child.pid
        except psutil.Error:
            continue
    return None


def _of_steps(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What metrics.jsonl says of the whole run."""
    last = rows[-20:]
    return {
        "steps": len(rows),
        "reward_first_20": statistics.fmean(r["reward_mean"] for r in rows[:20]),
        "reward_last_20": statistics.fmean(r["reward_mean"] for r in last),
        "staleness_max": max(r.get("staleness_max", 0) for r in rows),
        "staleness_mean": statistics.fmean(r.get("staleness_mean", 0.0) for r in rows),
        "logprob_difference_mean": [
            round(r["engine_trainer_logprob_diff"], 5) for r in rows if "engine_trainer_logprob_diff" in r
        ][:8],
        "logprob_difference_max": max((r.get("engine_trainer_logprob_diff_max", 0.0) for r in rows), default=0.0),
        "kl_behaviour_last_20": statistics.fmean(r.get("kl_behaviour", 0.0) for r in last),
        "trained_tokens_per_s_median": statistics.median(r["trained_tokens_per_s"] for r in rows),
        **{
            f"{name}_median": statistics.median(r[name] for r in rows if name in r)
            for name in ("cycle_s", "step_s", "checkpoint_s", "publish_s", "response_tokens_mean", "truncated_share")
        },
    }


def main() -> int:
    """Run it all, print the figures; 1 when something was lost."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live_run", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--undisturbed", type=int, default=60, help="steps before the first disturbance")
    parser.add_argument("--skip", nargs="*", default=[], choices=["kill_rollout", "kill_train", "kill_daemon", "swap"])
    parser.add_argument("--set", nargs="*", default=[], help="KEY=VALUE for hexctl daemon")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--root", type=Path, help="where the run is kept; default: a folder that goes with it")
    given = parser.parse_args()
    end_when_told()
    with TemporaryDirectory(prefix="hexctl-live-") as folder:
        root = given.root or Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        disturbed = Disturbed(given.config, given.steps, root, given.set, given.json)
        try:
            disturbed.start()
            disturbed.undisturbed(given.undisturbed)
            if "kill_rollout" not in given.skip:
                disturbed.kill("rollout")
            if "kill_train" not in given.skip:
                disturbed.kill("train")
            if "kill_daemon" not in given.skip:
                disturbed.restart_daemon()
            if "swap" not in given.skip:
                disturbed.swap("swap")
                disturbed.swap("swap_back")
            disturbed.finish()
        except BaseException:
            print(disturbed.run.log.read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            disturbed.run.close()
            print(json.dumps(disturbed.figures, indent=1))
    lost = [k for k, v in disturbed.figures.items() if k.endswith("identity_holds") and not v]
    return 1 if lost or disturbed.figures.get("audit_faults") else 0


if __name__ == "__main__":
    sys.exit(main())
