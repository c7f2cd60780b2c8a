"""Verifiers, and the children they run in: real processes that hang, crash and babble."""

import os
import queue
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.errors import ConfigError, DeadlineError
from runtime.rl.rewards import RewardItem, RewardPool, RewardResult, VerifierSpec, make_verifier
from runtime.rl.rewards.process import ChildLost, VerifierChild
from runtime.rl.types import FinishReason, SampleId

VERIFIERS = """
import os, subprocess, sys, time

def judge(prompt, response, answer):
    if response == "hang":
        while True:
            pass
    if response == "stop reading":
        os.kill(os.getpid(), 19)
    if response == "crash":
        os._exit(3)
    if response == "crash once" and not os.path.exists(answer):
        open(answer, "w").close()
        os._exit(3)
    if response == "raise":
        raise ValueError("cannot judge")
    if response == "nan":
        return float("nan")
    if response == "babble":
        print('{"id": 1, "reward": 9}')
        sys.stdout.flush()
        os.write(1, b"garbage\\n")
        subprocess.run(["echo", "more garbage"])
        return 0.5
    if response == "read":
        return 0.25 if sys.stdin is None or sys.stdin.read() == "" else 9.0
    if response == "child":
        child = subprocess.Popen(["sleep", "600"])
        with open(answer, "w") as f:
            f.write(str(child.pid))
        time.sleep(600)
    return float(response == answer)
"""


@pytest.fixture
def spec(tmp_path: Path) -> VerifierSpec:
    (tmp_path / "my_rewards.py").write_text(textwrap.dedent(VERIFIERS))
    return VerifierSpec(name="callable", callable="my_rewards:judge", search_path=(str(tmp_path),))


def item(n: int, response: str, answer: str = "") -> RewardItem:
    return RewardItem(sample=SampleId(n, 0), prompt="p", response=response, answer=answer)


class Inbox:
    """Collects results; waits for them with a deadline."""

    def __init__(self) -> None:
        self._queue: queue.Queue[RewardResult] = queue.Queue()

    def __call__(self, results: Sequence[RewardResult]) -> None:
        for r in results:
            self._queue.put(r)

    def take(self, n: int, seconds: float = 120.0) -> dict[int, RewardResult]:
        end = time.monotonic() + seconds
        got = [self._queue.get(timeout=max(0.01, end - time.monotonic())) for _ in range(n)]
        return {r.sample.group: r for r in got}


@contextmanager
def pool(spec: VerifierSpec, workers: int = 1, timeout_s: float = 60.0) -> Iterator[tuple[RewardPool, Inbox]]:
    inbox = Inbox()
    made = RewardPool(spec, workers=workers, timeout_s=timeout_s, on_results=inbox)
    try:
        yield made, inbox
    finally:
        made.close()
        assert made.pids == ()


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > end:
            return False
        os.sched_yield()
    return True


@pytest.mark.parametrize(
    ("response", "finish", "expected"),
    [("1234", "eos", 1.0), (" 1234\n", "eos", 1.0), ("1234", "length", 0.0), ("123", "eos", 0.0), ("", "eos", 0.0)],
)
def test_exact(response: str, finish: str, expected: float) -> None:
    assert make_verifier(VerifierSpec(name="exact"))("1234=", response, "1234", finish) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("response", "finish", "expected"),
    [
        ("1234", "eos", 1.0),
        ("1234", "length", 0.8),
        ("12345", "eos", 0.8),
        ("123", "eos", 0.6),
        ("1934", "eos", 0.2),
        ("9234", "eos", 0.0),
        ("", "eos", 0.0),
    ],
)
def test_prefix_counts_leading_characters_and_the_end(response: str, finish: str, expected: float) -> None:
    assert make_verifier(VerifierSpec(name="prefix"))("1234=", response, "1234", finish) == pytest.approx(expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("response", "finish", "expected"),
    [
        ("1234", "eos", 1.0),
        ("1234", "length", 4 / 5),  # all right, but it did not stop
        ("1934", "eos", 4 / 5),  # later positions count although an earlier one is wrong
        ("123", "eos", 3 / 5),  # stopped too early: neither the fourth position nor the end
        ("12345", "eos", 4 / 6),  # too long: what is too much counts as wrong
        ("12345678", "length", 4 / 8),
        ("", "eos", 0.0),
    ],
)
def test_match_counts_every_position_and_the_end(response: str, finish: str, expected: float) -> None:
    assert make_verifier(VerifierSpec(name="match"))("1234=", response, "1234", finish) == pytest.approx(expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("The answer is 18.", "18", 1.0),
        (r"so it is \boxed{18}", "18", 1.0),
        ("she has 70,000 left", "70000", 1.0),
        ("it is $70,000", "70,000", 1.0),
        (r"\boxed{\frac12}", "0.5", 1.0),
        (r"\boxed{\left(3,\frac{\pi}{2}\right)}", r"\left( 3, \frac{\pi}{2} \right)", 1.0),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1.0),
        (r"\boxed{5}", r"We find that the answer is \boxed{5}.", 1.0),
        ("19", "18", 0.0),
        ("", "18", 0.0),
        ("18", "", 0.0),
        (r"\boxed{" * 400, "3", 0.0),
        ("}{\\frac{\\", "3", 0.0),
    ],
)
def test_math_verify_reads_boxes_and_plain_numbers_and_never_raises(
    response: str, answer: str, expected: float
) -> None:
    pytest.importorskip("math_verify")
    assert make_verifier(VerifierSpec(name="math_verify"))("", response, answer, "eos") == expected


@pytest.mark.parametrize(
    ("response", "answer", "finish", "expected"),
    [
        ("3 + 15 = 18\n#### 18", "18", "eos", 1.0),
        ("#### $1,200.50 \n", "1200.5", "eos", 1.0),
        ("####-3", "-3", "eos", 1.0),
        ("3 + 15 = 18\n#### 19", "18", "eos", 0.1),
        ("#### 18", "18", "length", 0.0),  # it did not end by itself
        ("the answer is 18", "18", "eos", 0.0),
        ("#### eighteen", "18", "eos", 0.0),
        ("#### 18 apples", "18", "eos", 0.0),
        ("#### 18\n#### 19", "18", "eos", 0.1),  # the last one counts
        ("#### 18 and more", "18", "eos", 0.0),
        ("#### " + "1" * 5000, "18", "eos", 0.1),
        ("", "18", "eos", 0.0),
    ],
)
def test_final_number_rewards_the_form_a_little_and_the_number_wholly(
    response: str, answer: str, finish: FinishReason, expected: float
) -> None:
    pytest.importorskip("math_verify")
    assert make_verifier(VerifierSpec(name="final_number"))("", response, answer, finish) == expected


def test_math_verify_on_every_reference_of_the_data_sets() -> None:
    pytest.importorskip("math_verify")
    import json

    path = Path(__file__).resolve().parents[3] / "shared/data/math500/test.jsonl"
    if not path.exists():
        pytest.skip("the MATH-500 file is not next to this checkout")
    rows = [json.loads(line) for line in path.read_text().splitlines()][:60]
    verifier = make_verifier(VerifierSpec(name="math_verify"))
    right = sum(verifier("", row["solution"], row["answer"], "eos") for row in rows)
    assert right >= 0.95 * len(rows)
    assert sum(verifier("", row["solution"], "12345", "eos") for row in rows) == 0


@pytest.mark.parametrize("target", ["nonsense", ":f", "m:", "no_such_module_here:f", "json:no_such_function"])
def test_a_callable_that_cannot_be_had_is_refused_before_anything_runs(target: str) -> None:
    with pytest.raises(ConfigError) as e:
        RewardPool(VerifierSpec(name="callable", callable=target), workers=2, timeout_s=1.0, on_results=lambda _: None)
    assert e.value.where == "task.callable"


def test_a_pool_answers_everything_in_spite_of_what_verifiers_print(spec: VerifierSpec) -> None:
    with pool(spec, workers=2) as (verifiers, inbox):
        verifiers.submit([item(i, str(i), str(i - i % 2)) for i in range(20)])
        verifiers.submit([item(100, "babble"), item(101, "read"), item(102, "raise"), item(103, "nan")])
        got = inbox.take(24)
    assert [got[i].reward for i in range(20)] == [float(i % 2 == 0) for i in range(20)]
    assert (got[100].reward, got[100].error) == (0.5, "")
    assert (got[101].reward, got[101].error) == (0.25, "")
    assert got[102].reward == 0.0
    assert got[102].error == "ValueError: cannot judge"
    assert got[103].reward == 0.0
    assert "finite" in got[103].error


def test_a_verifier_that_hangs_is_killed_with_all_it_started_and_the_next_item_is_answered(
    spec: VerifierSpec, tmp_path: Path
) -> None:
    """On a busy machine a second may be over before the verifier had its turn: it is asked again until it had."""
    pid_file = tmp_path / "pid"
    pid_file.touch()
    with pool(spec, timeout_s=1.0) as (verifiers, inbox):
        (first,) = verifiers.pids
        verifiers.submit([item(0, "hang"), item(1, "child", str(pid_file)), item(2, "7", "7")])
        got = inbox.take(3)
        assert gone(first)
        while not pid_file.read_text():
            verifiers.submit([item(1, "child", str(pid_file))])
            got |= inbox.take(1)
        assert gone(int(pid_file.read_text()))
        while got[2].error.startswith("timeout"):
            verifiers.submit([item(2, "7", "7")])
            got |= inbox.take(1)
    assert got[0].error.startswith("timeout")
    assert got[0].seconds >= 1.0
    assert got[1].error.startswith("timeout")
    assert (got[2].reward, got[2].error) == (1.0, "")


def test_a_crash_is_tried_again_once_and_then_reported(spec: VerifierSpec, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with pool(spec) as (verifiers, inbox):
        verifiers.submit([item(0, "crash"), item(1, "crash once", str(mark)), item(2, "7", "7")])
        got = inbox.take(3)
    assert got[0].error == "crash: exit code 3"
    assert mark.exists()
    assert (got[1].error, got[2].error, got[2].reward) == ("", "", 1.0)


def test_a_stopped_child_that_does_not_read_meets_the_deadline_too(spec: VerifierSpec) -> None:
    child = VerifierChild(spec, start_s=120.0)
    with pytest.raises(DeadlineError):
        child.verify(item(0, "stop reading"), timeout_s=0.5)
    assert gone(child.pid)
    child = VerifierChild(spec, start_s=120.0)
    os.kill(child.pid, 19)
    with pytest.raises(DeadlineError, match="does not read"):
        child.verify(item(0, "x" * 2**20), timeout_s=0.5)
    assert gone(child.pid)


def test_a_killed_child_is_noticed(spec: VerifierSpec) -> None:
    child = VerifierChild(spec, start_s=120.0)
    os.kill(child.pid, 9)
    with pytest.raises(ChildLost, match="signal 9"):
        child.verify(item(0, "7", "7"), timeout_s=60.0)


def test_closing_does_not_wait_for_an_endless_verifier(spec: VerifierSpec) -> None:
    inbox = Inbox()
    verifiers = RewardPool(spec, workers=1, timeout_s=600.0, on_results=inbox)
    (pid,) = verifiers.pids
    verifiers.submit([item(0, "hang")])
    started = time.monotonic()
    verifiers.close()
    assert time.monotonic() - started < 60.0
    assert gone(pid)


SLOW = """
import os, time
from pathlib import Path

folder = Path(__file__).parent
try:
    (folder / "first").mkdir()
except FileExistsError:
    (folder / "second").touch()
    while not (folder / "go on").exists():
        time.sleep(0.01)

def judge(prompt, response, answer):
    time.sleep(3600)
"""


def test_closing_does_not_wait_for_a_verifier_that_is_just_starting(tmp_path: Path) -> None:
    """The second child is not there yet when `close` kills those that are."""
    (tmp_path / "slow_rewards.py").write_text(SLOW)
    spec = VerifierSpec(name="callable", callable="slow_rewards:judge", search_path=(str(tmp_path),))
    verifiers = RewardPool(spec, workers=2, timeout_s=600.0, on_results=Inbox(), start_s=200.0)
    (first,) = verifiers.pids
    verifiers.submit([item(0, "7"), item(1, "7")])
    end = time.monotonic() + 60
    while not (tmp_path / "second").exists():
        assert time.monotonic() < end
        os.sched_yield()
    closing = threading.Thread(target=verifiers.close, daemon=True)
    closing.start()
    assert gone(first)
    (tmp_path / "go on").touch()
    closing.join(60.0)
    assert not closing.is_alive()
    assert verifiers.pids == ()


@pytest.mark.kill
def test_children_die_with_a_parent_that_is_killed_hard(spec: VerifierSpec) -> None:
    code = (
        "import sys, time; from runtime.rl.rewards import *\n"
        f"p = RewardPool({spec!r}, workers=1, timeout_s=600, on_results=print)\n"
        "print(*p.pids, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.kill()
    parent.wait(60)
    parent.stdout.close()
    assert gone(child)
