"""`configs/` and `themes/`: at the top of a clone, inside the package in a wheel."""

from pathlib import Path


def data_folder(name: str) -> Path:
    """The folder `configs` or `themes`, wherever this installation keeps it."""
    here = Path(__file__).resolve().parent
    for candidate in (here / "_data" / name, here.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"{name}/ is neither beside the package nor inside it; reinstall hexctl")
