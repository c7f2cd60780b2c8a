"""What is installed, found without importing it."""

import importlib.util

from runtime.errors import ConfigError

RUN_EXTRA = ("ray", "torch", "transformers", "safetensors", "starlette", "uvicorn", "psutil", "pynvml", "math_verify")


def missing(modules: tuple[str, ...] = RUN_EXTRA) -> tuple[str, ...]:
    """Those of `modules` that are not installed."""
    return tuple(m for m in modules if importlib.util.find_spec(m) is None)


def need_run_extra(command: str) -> None:
    """ConfigError unless everything a run needs is installed."""
    absent = missing()
    if absent:
        raise ConfigError(
            f"{command} needs packages that are not installed",
            got=f"without {', '.join(absent)}",
            hint="pip install 'hexctl[run]'",
        )
