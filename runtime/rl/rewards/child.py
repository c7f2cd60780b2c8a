"""`python -m runtime.rl.rewards.child SPEC`: one verifier in a process that can be killed.

JSON lines: {"id", "prompt", "response", "answer", "finish"} comes in, {"id", "reward"} or {"id", "error"} goes out; before
the first, {"ready": true} or {"failed": why}. Whatever verifiers print goes to stderr: the pipes are moved away from
descriptors 0 and 1 first. The process dies with its parent.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
from typing import IO, Any

from runtime.errors import ConfigError
from runtime.rl.rewards.verifiers import VerifierSpec, finite, make_verifier

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Serve until the parent closes the pipe."""
    spec_raw, parent = json.loads(argv[1]), int(argv[2])
    _die_with_parent(parent)
    requests, answers = _take_pipes()
    spec = VerifierSpec(
        name=spec_raw["name"], callable=spec_raw["callable"], search_path=tuple(spec_raw["search_path"])
    )
    sys.path[:0] = spec.search_path
    try:
        verifier = make_verifier(spec)
    except ConfigError as e:
        _say(
            answers,
            {"failed": {"what": e.what, "where": e.where, "got": e.got, "expected": e.expected, "hint": e.hint}},
        )
        return e.exit_code
    _say(answers, {"ready": True})
    for line in requests:
        item: dict[str, Any] = json.loads(line)
        try:
            reward = finite(verifier(item["prompt"], item["response"], item["answer"], item["finish"]))
        except Exception as e:  # noqa: BLE001 - a user's function raises anything
            _say(answers, {"id": item["id"], "error": f"{type(e).__name__}: {e}"[:500]})
        else:
            _say(answers, {"id": item["id"], "reward": reward})
    return 0


def _die_with_parent(parent: int) -> None:
    """Be killed when the parent is, even by kill -9 (Linux); leave at once when it is gone already."""
    with contextlib.suppress(OSError, AttributeError):  # elsewhere the closed pipe ends us after the item at hand
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _take_pipes() -> tuple[IO[str], IO[str]]:
    """Our ends of the pipes under private descriptors; 0 reads nothing and 1 is stderr from now on."""
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return os.fdopen(requests, encoding="utf-8"), os.fdopen(answers, "w", encoding="utf-8")


def _say(answers: IO[str], message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
