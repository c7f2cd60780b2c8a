"""What a person waits for at the prompt, and what importing the library costs."""

import subprocess
import sys
from pathlib import Path

from benchmarks.timing import median_ms

HEXCTL = Path(sys.executable).with_name("hexctl")


def run() -> dict[str, float]:
    """Whole processes, start to end."""

    def process(*argv: str) -> float:
        return median_ms(lambda: subprocess.run(argv, capture_output=True, check=True), repeats=9, warm_up=2)

    return {
        "help_ms": process(str(HEXCTL), "--help"),
        "python_start_ms": process(sys.executable, "-c", "pass"),
        "import_planner_ms": process(sys.executable, "-c", "import planner"),
    }
