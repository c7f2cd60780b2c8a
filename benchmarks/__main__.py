"""`python -m benchmarks [NAME ...] [--keep]`: medians beside the kept baseline; `--keep` makes this run the baseline.

Each module `benchmarks.bench_<name>` has `run() -> dict[str, float]`, the unit in each key. Everything runs one after the other
in one process, so close other work first; figures of different machines are not comparable.
"""

import argparse
import importlib
import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
BASELINE, RESULTS = HERE / "baseline.json", HERE / "results.json"


def names() -> list[str]:
    """Every benchmark there is."""
    return sorted(p.stem.removeprefix("bench_") for p in HERE.glob("bench_*.py"))


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*names(), []], help="which; default: all")
    parser.add_argument("--keep", action="store_true", help="make this run the baseline")
    arguments = parser.parse_args()
    kept = json.loads(BASELINE.read_text())["figures"] if BASELINE.exists() else {}
    figures: dict[str, float] = {}
    for name in arguments.names or names():
        print(f"{name} ...", file=sys.stderr)
        for key, value in importlib.import_module(f"benchmarks.bench_{name}").run().items():
            figures[f"{name}.{key}"] = round(value, 4)
    width = max((len(k) for k in figures), default=6)
    print(f"{'figure':{width}}  {'now':>12}  {'baseline':>12}")
    for key, value in figures.items():
        old = kept.get(key)
        print(f"{key:{width}}  {value:>12,.3f}  {'-' if old is None else f'{old:,.3f}':>12}")
    machine = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    report = {"machine": machine, "figures": {**kept, **figures} if arguments.keep and arguments.names else figures}
    (BASELINE if arguments.keep else RESULTS).write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
