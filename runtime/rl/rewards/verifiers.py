"""Verifiers: (prompt, response, answer, finish) -> reward, usually in 0..1. They run in children (`runtime.rl.rewards.child`)."""

import importlib
import logging
import math
import re
from collections.abc import Callable

from planner.record import record
from runtime.errors import ConfigError
from runtime.rl.types import FinishReason

VERIFIERS = ("exact", "prefix", "match", "math_verify", "final_number", "callable")
Verifier = Callable[[str, str, str, FinishReason], float]


@record
class VerifierSpec:
    """Which verifier: exact, prefix, match, math_verify, final_number, or callable with "module:function". `search_path`: folders looked in
    first for that module."""

    name: str
    callable: str | None = None
    search_path: tuple[str, ...] = ()


def exact(prompt: str, response: str, answer: str, finish: FinishReason) -> float:
    """1 when the response is the answer, white space around it aside, and ended by itself; else 0."""
    del prompt
    return float(finish == "eos" and response.strip() == answer.strip())


def prefix(prompt: str, response: str, answer: str, finish: FinishReason) -> float:
    """Share of the answer's characters that are right from the start; ending right after the last counts as one more."""
    del prompt
    right = 0
    for got, expected in zip(response, answer, strict=False):
        if got != expected:
            break
        right += 1
    ended = finish == "eos" and response == answer
    return (right + int(ended)) / (len(answer) + 1)


def match(prompt: str, response: str, answer: str, finish: FinishReason) -> float:
    """Share of the positions that are right, wherever they stand; ending right after the answer's length is one more
    position, and what is too long counts as wrong."""
    del prompt
    ended = int(finish == "eos")
    right = sum(got == expected for got, expected in zip(response, answer, strict=False))
    right += ended if len(response) == len(answer) else 0
    return right / max(len(answer) + 1, len(response) + ended)


def make_math_verify() -> Verifier:
    r"""1 when the response's final answer (in \boxed{}, or the last expression or number) equals the reference. Loads
    math-verify; ConfigError without it."""
    try:
        from math_verify import parse, verify
    except ImportError as e:
        raise ConfigError('task.reward = "math_verify" needs math-verify', hint="pip install 'hexctl[run]'") from e
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)

    def read(text: str) -> list[object]:
        # No time limit of its own: it works by signals, and the child has a harder one.
        return list(parse(text, parsing_timeout=0))

    def check(prompt: str, response: str, answer: str, finish: FinishReason) -> float:
        del prompt, finish
        try:
            gold = (read(answer) if "\\boxed" in answer else read(f"\\boxed{{{answer}}}")) or read(answer)
            return float(bool(gold) and bool(verify(gold, read(response), timeout_seconds=0)))
        except Exception:  # noqa: BLE001 - a parser of arbitrary text raises anything; what it cannot read is not right
            return 0.0

    return check


FINAL_NUMBER = re.compile(r"####[ \t]*\$?(-?(?:\d[\d,]*(?:\.\d+)?|\.\d+))[ \t]*$")
FORMAT_REWARD = 0.1


def make_final_number() -> Verifier:
    """1 when the response ended by itself with a line "#### number" (GSM8K's form) and the number equals the reference;
    `FORMAT_REWARD` for the form with another number: what a small model learns first. Numbers by math-verify."""
    equal = make_math_verify()

    def check(prompt: str, response: str, answer: str, finish: FinishReason) -> float:
        found = FINAL_NUMBER.search(response.rstrip()) if finish == "eos" else None
        if found is None:
            return 0.0
        return max(FORMAT_REWARD, equal(prompt, f"\\boxed{{{found[1]}}}", answer, finish))

    return check


def make_callable(target: str) -> Verifier:
    """A user's "module:function", called with (prompt, response, answer). ConfigError when it cannot be had."""
    module_name, colon, function_name = target.partition(":")
    where = "task.callable"
    if not colon or not module_name or not function_name:
        raise ConfigError("not a callable", where=where, got=target, expected='"module:function"')
    try:
        module = importlib.import_module(module_name)
    except Exception as e:  # a user's module raises anything
        raise ConfigError(f"module {module_name} does not import", where=where, got=f"{type(e).__name__}: {e}") from e
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"module {module_name} has no function {function_name}", where=where)

    def check(prompt: str, response: str, answer: str, finish: FinishReason) -> float:
        del finish
        return float(function(prompt, response, answer))

    return check


def make_verifier(spec: VerifierSpec) -> Verifier:
    """The verifier a spec names. ConfigError."""
    if spec.name == "exact":
        return exact
    if spec.name == "prefix":
        return prefix
    if spec.name == "match":
        return match
    if spec.name == "math_verify":
        return make_math_verify()
    if spec.name == "final_number":
        return make_final_number()
    if spec.name == "callable" and spec.callable:
        return make_callable(spec.callable)
    raise ConfigError("unknown verifier", got=spec.name, expected=", ".join(VERIFIERS))


def finite(value: float) -> float:
    """The reward itself; ValueError for what cannot be trained on."""
    if not math.isfinite(value):
        raise ValueError(f"a reward must be a finite number, got {value!r}")
    return value
