"""A run's engine and trainer on two cards, on parts of one, or on one machine's CPU: each measured while the other works, as in the
run.

The trainer is measured in this process beside an engine that always has samples to decode. Then the engine is measured beside a
trainer that begins a turn as often as the engine has made a batch, as it does where generation is the limit; where training is, it
never waits, and what was measured of it beside a busy engine is on the cautious side.

`python -m runtime.profile.beside CONFIG.json FOLDER TASK.json` is the engine's process: it works from its first token on, measures
when a line comes, and ends with its standard input. It tells everything as lines of JSON. What it showed while the trainer was
measured counts too: a small model waits for its host, and a machine that others share is not as fast all the time (seen: 5 ms a step
and 8 ms for some ten seconds each), so a figure of two seconds says little of a run.
"""

import contextlib
import dataclasses
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from planner.calibration import Calibration, KindTables, Provenance, decode, encode
from planner.record import record
from runtime.config.schema import Config
from runtime.errors import RunError, first_line
from runtime.profile import own
from runtime.profile.steady import Course, OneGeneration, Steady, Turn, drive, steady
from runtime.profile.turns import WARM_TURNS
from runtime.rl.types import WeightsRef
from runtime.scratch import scratch

START_S = own.START_S + 30.0  # until the engine has made its first tokens
LATE_S = 60.0  # beyond its seconds, after which an engine is given up
FIRST_S, WORK_S = 0.5, 5.0  # of decoding before it says that it works, and from one word of its speed to the next
END_S = 20.0  # for its process to end by itself
POLL_S = 0.05
LAST_LINES = 20  # of what its process said, told where it fails
logger = logging.getLogger(__name__)

Stop = Callable[[], bool]


@record
class EngineTask:
    """What the engine's process is told beside the configuration."""

    seconds: float  # of measuring
    quick: bool
    card: str = ""  # UUID of the GPU; "": the CPU
    parts: int = 1  # of the card
    trainer_card: str = ""  # UUID of the trainer's GPU; "": the engine's


def measured_beside(
    config: Config,
    device: torch.device,
    task: EngineTask,
    *,
    trainer_s: float,
    stop: Stop,
    folder: Path,
    phase: Callable[[str], None] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
) -> dict[str, tuple[Any, ...]]:
    """Points of both roles by table. `device`: the trainer's; `folder`: on the disk that the run writes to; `phase` is told what is
    under way, `note` what is missing in the end: an engine that fails after the trainer was measured takes its own points along, not
    the trainer's. RunError where one of the two does not come up."""
    own.check_disk(config, folder)  # before a minute of the engine's start
    config = config.model_copy(update={"fleet": config.fleet.model_copy(update={"gpu_parts": task.parts})})
    with _part_of(device, task.parts), engine_at_work(config, task, folder) as engine:
        phase("the engine comes up")
        if device.type == "cuda":  # compiles while the engine comes up
            turns = _Counted()
            own.train_until(config, device, folder, lambda: stop() or turns.count > WARM_TURNS, begins=turns)
        engine.wait_ready(stop)
        phase("the trainer beside the engine")
        trainer = own.run_trainer_rates(config, device, seconds=trainer_s, quick=task.quick, stop=stop, folder=folder)
        if stop():
            return {}
        phase("the engine beside the trainer")
        pace = Pace(engine, batch_tokens(config) / engine.tokens_per_s)
        own.train_until(config, device, folder, lambda: stop() or engine.done.is_set(), begins=pace)
        if stop():
            return {}
        try:
            return {"trainer": trainer, **engine.tables()}
        except RunError as e:
            note(f"the engine: {first_line(e)}")
            return {"trainer": trainer}
        finally:
            for text in engine.notes:
                note(text)


def batch_tokens(config: Config) -> float:
    """Tokens that are decoded for a step, in the mean."""
    algorithm = config.algorithm
    return algorithm.prompts_per_step * algorithm.responses_per_prompt * max(2.0, config.lengths.response_mean)


@contextlib.contextmanager
def _part_of(device: torch.device, parts: int) -> Iterator[None]:
    """This process with its part of the card's memory, as a run's trainer has it."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_per_process_memory_fraction(1 / parts, device)
    try:
        with torch.cuda.device(device):
            yield
    finally:
        own.release(device)
        torch.cuda.set_per_process_memory_fraction(1.0, device)


class _Counted:
    """Turns that began."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, step: int) -> None:
        self.count = step + 1


class Pace:
    """Lets a trainer begin its turns `period_s` apart, once it is warm, and has the engine measured from then on."""

    def __init__(self, engine: "EngineAtWork", period_s: float) -> None:
        self._engine, self._period_s = engine, period_s
        self._began: float | None = None

    def __call__(self, step: int) -> None:
        """Turn `step` would begin."""
        if step < WARM_TURNS:
            return
        if self._began is None:
            self._began = time.monotonic() - step * self._period_s
            self._engine.measure()
        due = self._began + step * self._period_s
        self._engine.done.wait(max(0.0, due - time.monotonic()))


@contextlib.contextmanager
def engine_at_work(config: Config, task: EngineTask, folder: Path) -> Iterator["EngineAtWork"]:
    """The engine in a process of its own for as long as the context lasts."""
    with scratch(folder) as made:
        file, told = made / "config.json", made / "task.json"
        file.write_text(config.model_dump_json())
        told.write_text(json.dumps(dataclasses.asdict(task)))
        command = [sys.executable, "-m", "runtime.profile.beside", str(file), str(made), str(told)]
        log = made / "engine.log"
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(c for c in (task.card, task.trainer_card) if c)}
        with log.open("wb") as errors:
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=env)
        try:
            yield EngineAtWork(child, task, log)
        finally:
            assert child.stdin is not None
            with contextlib.suppress(OSError):
                child.stdin.close()  # it ends by itself, and vLLM's process with it
            try:
                child.wait(END_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


class EngineAtWork:
    """An engine's process as this one hears of it."""

    def __init__(self, child: "subprocess.Popen[bytes]", task: EngineTask, log: Path) -> None:
        self._child, self._task, self._log = child, task, log
        self._ready = threading.Event()
        self.done = threading.Event()  # measured, or ended before
        self.tokens_per_s = 0.0  # that it makes beside the trainer, as last told; 0: not told yet
        self.notes: tuple[str, ...] = ()  # what it did not measure, and why
        self._tables: KindTables | None = None
        self._failure = ""
        self._asked_s: float | None = None
        threading.Thread(target=self._listen, name="profile-engine", daemon=True).start()

    def _listen(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            said = json.loads(line)
            self.tokens_per_s = said.get("tokens_per_s", self.tokens_per_s)
            self._failure = said.get("failure", self._failure)
            if self.tokens_per_s > 0:
                self._ready.set()
            if "tables" in said:
                self.notes = tuple(said["notes"])
                self._tables = decode(said["tables"]).kinds[0]
                break
        self.done.set()
        self._ready.set()

    def wait_ready(self, stop: Stop) -> None:
        """Until it works."""
        until = time.monotonic() + START_S
        while not self._ready.wait(POLL_S) and not stop():
            if time.monotonic() > until:
                raise RunError("the engine did not come up in time", got=f"{START_S:.0f} s")
        if self.done.is_set() and self._tables is None:
            raise self._failed("the engine's process ended")

    def measure(self) -> None:
        """Begin to measure; `done` is set when that is over, or late."""
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):  # its end is heard of
            self._child.stdin.write(b"\n")
            self._child.stdin.flush()
        late = threading.Timer(self._task.seconds + LATE_S, self.done.set)
        late.daemon = True
        late.start()

    def tables(self) -> Mapping[str, tuple[Any, ...]]:
        """What it measured."""
        if self._tables is None:
            raise self._failed("the engine was not measured in time")
        return {"engine": self._tables.engine, "updates": self._tables.updates}

    def _failed(self, otherwise: str) -> RunError:
        """What it said of its failure; what its process and vLLM's wrote last goes to the log."""
        last = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        if last:
            logger.warning("the engine's process said last:\n%s", "\n".join(last))
        return RunError(self._failure or otherwise)


def main() -> int:
    """The engine's process."""
    said = os.fdopen(os.dup(1), "w")  # what libraries print is not for whoever started this
    os.dup2(2, 1)

    def say(**words: object) -> None:
        said.write(json.dumps(words) + "\n")
        said.flush()

    config = Config.model_validate_json(Path(sys.argv[1]).read_text())
    task = EngineTask(**json.loads(Path(sys.argv[3]).read_text()))
    try:
        found = _engine(config, task, Path(sys.argv[2]), say)
    except Exception as e:  # noqa: BLE001 - whatever ends it is told to whoever started this
        traceback.print_exc()
        say(failure=f"{type(e).__name__}: {first_line(e)}")
        return 1
    tables = KindTables(
        kind="engine",
        provenance=Provenance(source="hexctl profile", how="measured"),
        engine=found.engine,
        updates=found.updates,
    )
    say(tables=encode(Calibration(kinds=(tables,))), notes=found.notes)
    return 0


def _engine(config: Config, task: EngineTask, folder: Path, say: Callable[..., None]) -> own.EngineFound:
    device = torch.device("cuda:0" if task.card else "cpu")
    torch.set_num_threads(own.threads_of("run_engine", device))
    if task.card and config.rollout.engine == "torch":
        torch.cuda.set_per_process_memory_fraction(1 / task.parts, device)
    asked, ended = _heard(io.FileIO(0, closefd=False))  # a buffer's lock would be held when this process ends

    def work(engine: Any, course: Course, ref: WeightsRef) -> list[Steady]:
        seconds, spells = FIRST_S, []
        while not asked.is_set():
            turns = drive(engine, course, OneGeneration(ref), seconds=seconds, should_stop=asked.is_set)
            if (rate := _tokens_per_s(turns)) > 0:
                say(tokens_per_s=rate)
            if seconds == WORK_S and not asked.is_set() and (shown := steady(turns)) is not None:
                spells.append(shown)  # a whole one, and not the first, which loads kernels
            seconds = WORK_S
        return spells

    return own.run_engine_rates(
        config,
        device,
        seconds=task.seconds,
        quick=task.quick,
        stop=ended.is_set,
        folder=folder,
        card=task.card,
        card_part=1 / task.parts,
        trainer_device=torch.device("cuda:1") if task.trainer_card else None,
        before=work,
    )


def _heard(lines: io.RawIOBase) -> tuple[threading.Event, threading.Event]:
    """Events that are set by the first line, and by the end, which is both."""
    asked, ended = threading.Event(), threading.Event()

    def listen() -> None:
        if lines.readline():
            asked.set()
            lines.read()
        ended.set()
        asked.set()

    threading.Thread(target=listen, name="stdin", daemon=True).start()
    return asked, ended


def _tokens_per_s(turns: tuple[Turn, ...]) -> float:
    if len(turns) < 2 or turns[-1].busy_s <= turns[0].busy_s:
        return 0.0
    return (turns[-1].tokens - turns[0].tokens) / (turns[-1].busy_s - turns[0].busy_s)


if __name__ == "__main__":
    os._exit(main())  # a library's threads must not keep an engine that is done
