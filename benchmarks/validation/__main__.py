"""`python -m benchmarks.validation [RAW_FOLDER]`: write docs/validation.md, its figures as JSON and its pictures.

RAW_FOLDER holds the measured tables (default: ../shared/data/planner beside the checkout). Where it is absent the command
says so and changes nothing. `--thin` also writes the sample that the tests carry. `--without KIND` leaves a kind out of the kernel
sets and prints instead of writing.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.curves import KINDS
from benchmarks.validation import report, sample
from benchmarks.validation.gate import COMMITTED, RAW, ROOT, SAMPLE, encode, recompute


def main() -> int:
    """Compute, write, print what changed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.validation", description=__doc__)
    parser.add_argument("raw", nargs="?", type=Path, default=RAW, help="folder of the measured tables")
    parser.add_argument("--thin", action="store_true", help="write the tests' sample anew")
    parser.add_argument("--without", action="append", default=[], choices=list(KINDS.values()), help="print only")
    arguments = parser.parse_args()
    if not arguments.raw.is_dir():
        print(f"{arguments.raw}: no such folder; nothing was validated or changed", file=sys.stderr)
        return 0
    outcome = recompute(arguments.raw, [k for k, v in KINDS.items() if v not in arguments.without])
    if not arguments.without:
        if arguments.thin:
            print(f"{SAMPLE.relative_to(ROOT)}: {sample.write(arguments.raw, SAMPLE):,} bytes")
        COMMITTED.with_suffix(".md").write_text(report.page(outcome))
        for name, text in report.pictures(arguments.raw, outcome).items():
            (ROOT / "docs" / "images" / name).write_text(text)
        thinned = recompute(SAMPLE)
        parts = {"full": encode(outcome), "sample": encode(thinned)}
        lines = [f'"{k}": [\n ' + ",\n ".join(json.dumps(f) for f in v) + "]" for k, v in parts.items()]
        COMMITTED.write_text("{" + ",\n".join(lines) + "}\n")
    for f in outcome.figures:
        kept = "" if f.kept is None else ("kept" if f.kept else "MISSED")
        print(
            f"{f.name}: {f.part}: n {f.rows}, median {f.median:.3f}, p90 {f.p90:.3f}, bias {f.bias:+.3f} {f.bar} {kept}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
