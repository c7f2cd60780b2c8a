"""Queue and KV cache of vLLM's scheduler, under the names that its releases have given them. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

KV_USED = ("kv_cache_usage", "gpu_cache_usage", "gpu_cache_usage_perc", "kv_cache_usage_perc")
RUNNING = ("num_running_reqs", "num_requests_running")
WAITING = ("num_waiting_reqs", "num_requests_waiting")


@dataclass
class PlainSteps:
    """Steps that only decode, counted since the start. A wait for the card that spins is processor time too, one that sleeps is not."""

    count: int = 0
    seconds: float = 0.0
    host_s: float = 0.0  # processor time of the thread that steps

    def add(self, seconds: float, host_s: float) -> None:
        self.count, self.seconds, self.host_s = self.count + 1, self.seconds + seconds, self.host_s + host_s

    def told(self) -> dict[str, Any]:
        """Under the names of `EngineStats`."""
        return {"plain_steps": self.count, "plain_step_s": self.seconds, "plain_host_s": self.host_s}


def scheduler_level(scheduler: Any) -> dict[str, Any]:
    """`running`, `waiting` and `kv_used` (share, 0..1; None where this release does not say) of a scheduler object."""
    waiting = _length(scheduler, "waiting")
    skipped = _length(scheduler, "skipped_waiting")
    return {
        "running": _length(scheduler, "running"),
        "waiting": None if waiting is None else waiting + (skipped or 0),
        "kv_used": _kv_used(scheduler),
    }


def stats_level(stats: Any) -> dict[str, Any]:
    """The same of a `SchedulerStats`, or of a mapping of Prometheus names with or without "vllm:" before them."""
    return {
        "running": _named(stats, RUNNING),
        "waiting": _named(stats, WAITING),
        "kv_used": _named(stats, KV_USED),
    }


def _kv_used(scheduler: Any) -> float | None:
    for name in ("kv_cache_manager", "kv_manager"):
        manager = getattr(scheduler, name, None)
        usage = getattr(manager, "usage", None)
        if usage is None:
            usage = getattr(getattr(manager, "block_pool", None), "get_usage", None)
        if callable(usage):
            usage = usage()
        if isinstance(usage, int | float):
            return min(1.0, max(0.0, float(usage)))
    return None


def _length(scheduler: Any, name: str) -> int | None:
    queue = getattr(scheduler, name, None)
    return None if queue is None else len(queue)


def _named(stats: Any, names: Iterable[str]) -> float | None:
    for name in names:
        for key in (name, f"vllm:{name}"):
            value = stats.get(key) if isinstance(stats, dict) else getattr(stats, key, None)
            if value is not None:
                return float(value)
    return None
