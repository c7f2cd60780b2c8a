"""Finding the NVML library: names in order, an override, and the CUDA stub told apart."""

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runtime.telemetry.nvml import NvmlProblem

OVERRIDE = "HEXCTL_NVML"
CANDIDATES = (
    "libnvidia-ml.so.1",
    "libnvidia-ml.so",
    "/usr/lib/wsl/lib/libnvidia-ml.so.1",
    "/run/opengl-driver/lib/libnvidia-ml.so.1",
)


def candidates(override: str | None) -> tuple[str, ...]:
    """What is tried, in order. An override is tried alone, so that it means what it says."""
    return (override,) if override else CANDIDATES


def load_first(names: Sequence[str], load: Callable[[str], Any]) -> tuple[str, Any]:
    """The first library that loads, with its name. NvmlProblem listing what was tried."""
    tried = []
    for name in names:
        try:
            return name, load(name)
        except OSError as e:
            tried.append(f"{name} ({str(e).split(':')[-1].strip()})")
    raise NvmlProblem("no-library", "no NVML library; tried " + ", ".join(tried))


def is_stub(path: str) -> bool:
    """Whether a library's real path is the CUDA toolkit's link-time stub, which never shows a GPU."""
    return "/stubs/" in path


def mapped_path(maps: str, name: str = "libnvidia-ml") -> str:
    """Real path of the loaded library, from the text of /proc/self/maps; "" when it is not there."""
    for line in maps.splitlines():
        if name in line:
            return line.split(maxsplit=5)[-1]
    return ""


def open_library() -> Any:
    """pynvml over the first library found. NvmlProblem: no binding, no library, or the stub."""
    try:
        import pynvml
    except ImportError as e:
        raise NvmlProblem("no-library", "the package nvidia-ml-py is not installed; pip install 'hexctl[run]'") from e
    _, loaded = load_first(candidates(os.environ.get(OVERRIDE)), ctypes.CDLL)
    path = mapped_path(Path("/proc/self/maps").read_text())
    if is_stub(path):
        raise NvmlProblem(
            "stub", f"{path} is the CUDA toolkit's stub, not the driver's library; set HEXCTL_NVML or LD_LIBRARY_PATH"
        )
    pynvml.nvmlLib = loaded
    return pynvml


def kernel_module_version() -> str:
    """Version of the loaded NVIDIA kernel module; "" when there is none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    words = text.split()
    return next((w for w in words if w[:1].isdigit() and "." in w), "")
