"""Where a step's time, a run's start and the control plane's processor time go, in a run through `hexctl daemon`.

    python -m benchmarks.step_parts                                # a tiny model on two CPU devices: next to no compute
    python -m benchmarks.step_parts CONFIG --steps 200 --json parts.json

With next to no compute a step's time is hexctl's own. Parts are medians over the steps after the first ten, as metrics.jsonl
has them: the trainer's (wait_s, train_s, checkpoint_s, applied_s, publish_s make up a step) and flow's (flow_*: seconds of a
step inside its calls, the commits of its ledger among them). The start is told by what the daemon and the actors log. Shares
are of one core; flow's stands by itself, since it serves the run's exchanges, and so does that of all verifiers.
"""

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.ending import end_when_told
from benchmarks.timing import cpu_s
from runtime.rl.ledger.audit import audit
from tests.live import ROOT, LiveRun, steps

START_S, STEP_S, END_S = 420.0, 5.0, 120.0
WARM_STEPS = 10
TRAINER = ("wait_s", "train_s", "step_s", "checkpoint_s", "applied_s", "publish_s", "paced_wait_s", "cycle_s")
STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) \w+ (.*)$")
TINY = """
[run]
name = "step-parts"
[model]
source = "seeded"
path = "tiny-model"
[task]
source = "copy"
reward = "match"
max_length = 9
[algorithm]
eta = {eta}
mode = "{mode}"
objective = "decoupled"
prompts_per_step = 8
responses_per_prompt = 8
[sampling]
max_new_tokens = 10
[lengths]
prompt_mean = 10
prompt_max = 12
response_mean = 7
[fleet]
source = "cpu"
"""


def tiny_config(folder: Path, *, eta: int) -> Path:
    """A run that learns to copy digits on two CPU devices."""
    path = folder / "tiny.toml"
    shape = json.loads((ROOT / "configs" / "models" / "tiny-qwen3" / "config.json").read_text())
    shape |= {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 16}
    shape |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    (folder / "tiny-model").mkdir()
    (folder / "tiny-model" / "config.json").write_text(json.dumps(shape))
    path.write_text(TINY.format(eta=eta, mode="async" if eta else "sync"))
    return path


class Watched:
    """The run and what is measured of it."""

    def __init__(self, folder: Path, config: Path, count: int, changed: Sequence[str]) -> None:
        self.run, self._config, self._count = LiveRun(folder), config.resolve(), count
        self._changed = [part for value in changed for part in ("--set", value)]
        self.figures: dict[str, Any] = {}

    def measure(self) -> None:
        """From the start to the last step and the audit."""
        began_unix, began = time.time(), time.monotonic()
        self.run.start(self._config, "--steps", self._count, *self._changed)
        self._until(1, START_S)
        self.figures["first_step_s"] = time.monotonic() - began
        self._until(WARM_STEPS, STEP_S * WARM_STEPS + START_S)
        before, since, first = self._processor_s(), time.monotonic(), len(self.run.metrics())
        s = self._until(self._count - 2, STEP_S * self._count)
        seconds = time.monotonic() - since
        made = len(self.run.metrics()) - first
        self.figures["step_wall_s"] = seconds / max(1, made)
        self.figures["devices"] = len(s.devices)
        for name, used in self._processor_s().items():
            self.figures[f"core_share_{name}"] = (used - before.get(name, 0.0)) / seconds
        assert self.run.daemon is not None
        self.figures["exit_code"] = self.run.daemon.wait(END_S)
        self.figures["audit_faults"] = list(audit(self.run.info.paths.ledger).faults)
        self.figures |= parts(self.run.metrics()[WARM_STEPS:])
        self.figures["start"] = self._start_lines(began_unix)

    def _until(self, count: int, deadline_s: float) -> Any:
        return self.run.until(lambda s: steps(s) >= count, f"{count} steps", deadline_s=deadline_s)

    def _processor_s(self) -> dict[str, float]:
        """Processor seconds so far by process: the daemon, its children, each actor of the run, with their children."""
        info, found = self.run.info, {}
        if info.daemon is not None:
            daemon = psutil.Process(info.daemon.pid)
            found["daemon"] = cpu_s(daemon)
            found["daemon_children"] = sum(cpu_s(p) for p in daemon.children())
        for mark in (info.paths.short / "actors").glob("*.json"):
            try:
                actor = psutil.Process(int(json.loads(mark.read_text())["pid"]))
                found[mark.stem] = sum(cpu_s(p) for p in (actor, *actor.children(recursive=True)))
            except psutil.Error:
                continue
        return found

    def _start_lines(self, began_unix_s: float) -> list[str]:
        """What daemon and actors logged until the first step, in seconds since the start."""
        first = self.figures["first_step_s"]
        lines: list[tuple[float, str]] = []
        for log in (*self.run.info.paths.logs.glob("*.log"), self.run.log):
            for line in log.read_text(errors="replace").splitlines():
                if (found := STAMP.match(line)) is None:
                    continue
                at = datetime.fromisoformat(found[1].replace(",", ".")).astimezone().timestamp() - began_unix_s
                if at <= first:
                    lines.append((at, f"{at:7.2f} s  {log.stem}: {found[2][:120]}"))
        return [text for _, text in sorted(lines)]


def parts(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians a step, seconds or counts, of the parts that metrics.jsonl has."""
    names = [
        *TRAINER,
        *sorted({k for r in rows for k in r if k.startswith("flow_")}),
        "reward_wait_s",
        "trained_tokens",
    ]
    values = {name: [r[name] for r in rows if r.get(name) is not None] for name in names}
    return {name: statistics.median(found) for name, found in values.items() if found}


def main() -> int:
    """Run, print; 1 when the ledger's audit found a fault."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_parts", description=__doc__)
    parser.add_argument("config", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--eta", type=int, default=4, help="of the tiny run; 0: synchronous")
    parser.add_argument("--set", nargs="*", default=[], help="KEY=VALUE for hexctl daemon")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    end_when_told()
    with TemporaryDirectory(prefix="hexctl-parts-") as folder:
        config = given.config or tiny_config(Path(folder), eta=given.eta)
        watched = Watched(Path(folder), config, given.steps, given.set)
        try:
            watched.measure()
        except BaseException:
            print(watched.run.log.read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            watched.run.close()
    for name, value in watched.figures.items():
        if isinstance(value, list):
            print(f"{name}:", *value, sep="\n  ")
        else:
            print(f"{name:32} {value:12.4f}")
    if given.json is not None:
        given.json.write_text(json.dumps(watched.figures, indent=1))
    return 1 if watched.figures["audit_faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
