"""Which `--root` a command needs."""

import shlex
from pathlib import Path

DEFAULT_ROOT = Path("runs")


def root_words(folder: str | Path) -> str:
    """What a command has to add to find the run of that folder: " --root DIR", or nothing where it lies in ./runs."""
    root = Path(folder).parent
    return "" if root.resolve() == DEFAULT_ROOT.resolve() else f" --root {shlex.quote(str(root))}"
