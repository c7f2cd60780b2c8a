"""Prompts by ordinal: the same ordinal gives the same prompt in every run of the same seed."""

from typing import Protocol

from planner.record import record


@record
class TaskItem:
    """A prompt with its right answer. `prompt` is what is shown; `prompt_tokens` is what the model reads."""

    prompt: str
    prompt_tokens: tuple[int, ...]
    answer: str


class Task(Protocol):
    """A stream of prompts without end, and a held-out set."""

    def prompt(self, ordinal: int) -> TaskItem:
        """Prompt number `ordinal` (from 0)."""
        ...

    def eval_items(self, n: int) -> tuple[TaskItem, ...]:
        """Up to `n` held-out prompts, always the same."""
        ...
