"""What every actor does first, and the thread that carries its work.

Nothing here may fail in silence: an exception of the work ends in the actor's log with its traceback, and in its level as
phase `failed` with the reason in words.
"""

import importlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from planner.errors import HexError
from planner.record import replace
from runtime import heap
from runtime.backends.ray.actors.identity import ActorLevel, ActorPhase, Gauge, Identity
from runtime.backends.ray.env import USER_HOME
from runtime.runs import start_ticks


class Ready(Protocol):
    """Called by a workload once it is built; `gauge` is asked at every ping."""

    def __call__(self, gauge: Callable[[], Gauge] = Gauge) -> None: ...


LOG_BYTES = 8 * 2**20


def resolve(spec: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module, _, name = spec.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def enter(me: Identity, *, own_group: bool) -> None:
    """Take identity in this process: log file, HOME, visible GPUs, process group, import path.
    Before torch is imported."""
    if own_group:
        os.setpgid(0, 0)  # children belong to it and end with it
    _redirect(Path(me.log))
    if home := os.environ.get(USER_HOME):
        os.environ["HOME"] = home
    sys.path += [p for p in me.import_path if p not in sys.path]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(me.gpus)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, force=True, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    logging.getLogger(me.name).info(
        "pid %d, hexctl %s, run %s, epoch %d", os.getpid(), me.hexctl_version, me.run, me.epoch
    )


def _redirect(log: Path) -> None:
    """File descriptors 1 and 2 of the process to `log`; one older file is kept."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def set_threads(count: int) -> None:
    """Threads of torch's CPU kernels; imports torch."""
    import torch

    torch.set_num_threads(count)


def keep_to_part(me: Identity) -> None:
    """On a part of a card take no more of its memory than that; imports torch. Nothing happens on whole cards."""
    if me.gpus and me.gpu_share < 1:
        import torch

        torch.cuda.set_per_process_memory_fraction(me.gpu_share)


def in_words(error: BaseException) -> str:
    """An exception as one line for people."""
    if isinstance(error, HexError):
        return str(error).replace("\n", "; ")
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


class Work:
    """A thread that builds the workload, runs it to its end and keeps the level."""

    def __init__(self, me: Identity, run: Callable[[Ready], str]) -> None:
        """`run(ready)` calls `ready(gauge)` once built, returns how it ended in words."""
        self._gauge: Callable[[], Gauge] = Gauge
        self._me = me
        self._run = run
        self._phase: ActorPhase = "starting"
        self._reason = ""
        self._thread = threading.Thread(target=self._carry, name=me.name, daemon=True)
        self._thread.start()

    def _carry(self) -> None:
        log = logging.getLogger(self._me.name)
        try:
            how = self._run(self._ready)
        except BaseException as e:  # noqa: BLE001 - the level must say so whatever it is
            # The log first: who sees the phase, and may end this process for it, finds what it says there.
            self._reason = in_words(e)
            log.error("failed: %s\n%s", self._reason, traceback.format_exc())
            self._phase = "failed"
        else:
            self._reason = how
            log.info("ended: %s", how)
            self._phase = "ended"

    def _ready(self, gauge: Callable[[], Gauge] = Gauge) -> None:
        heap.settle()
        self._gauge = gauge
        self._phase = "running"

    def level(self) -> ActorLevel:
        """The actor's level now."""
        return replace(level_of(self._me, self._phase, self._reason), gauge=self._gauge())


class Broken:
    """Stands where a workload should: every call raises what kept it from being built."""

    def __init__(self, me: Identity, error: Exception) -> None:
        self._me, self.error = me, error

    def level(self) -> ActorLevel:
        """Failed, and why."""
        return level_of(self._me, "failed", in_words(self.error))

    def __getattr__(self, name: str) -> Any:
        raise self.error


def built(me: Identity, build: Callable[[], Any]) -> Any:
    """What `build` returns, or a `Broken` in its place."""
    try:
        found = build()
    except Exception as e:  # noqa: BLE001 - reported by the level and raised at every call
        logging.getLogger(me.name).error("cannot be built: %s\n%s", in_words(e), traceback.format_exc())
        return Broken(me, e)
    heap.settle()
    return found


def level_of(me: Identity, phase: ActorPhase, reason: str = "") -> ActorLevel:
    """A level with this process's figures."""
    pid = os.getpid()
    return ActorLevel(
        name=me.name,
        pid=pid,
        group=os.getpgid(0),
        start_ticks=start_ticks(pid) or 0,
        hexctl_version=me.hexctl_version,
        phase=phase,
        reason=reason,
        devices=me.devices,
        log=me.log,
    )
