"""Prompts out of JSON-lines files such as GSM8K and MATH-500."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from planner.record import record
from runtime.config.schema import TaskSection
from runtime.errors import ConfigError
from runtime.rl.tasks.task import TaskItem
from runtime.rl.tokenizer import Tokenizer

MOST_FAULTS = 8  # named at once
PROMPT_KEYS = ("question", "problem", "prompt", "input")
ANSWER_KEYS = ("answer", "solution", "target", "output")


@record
class Row:
    """One checked row."""

    prompt: str
    answer: str


def read_rows(path: Path, section: TaskSection) -> tuple[Row, ...]:
    """All rows of a file, every one checked: JSON, both keys, text that is not empty, the answer's marker. ConfigError
    names each fault (the first eight) as path:line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as e:
        raise ConfigError("the data file does not exist", where=str(path), hint="check task.path") from e
    except OSError as e:
        raise ConfigError("the data file cannot be read", where=str(path), got=e.strerror) from e
    except UnicodeDecodeError as e:
        raise ConfigError("the data file is not UTF-8 text", where=str(path), got=str(e)) from e
    rows: list[Row] = []
    faults: list[str] = []
    hints: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        row = _row(line, section)
        if isinstance(row, Row):
            rows.append(row)
            continue
        fault, hint = row
        faults.append(f"{path}:{number}: {fault}")
        if hint and hint not in hints:
            hints.append(hint)
    if faults:
        more = f" (and {len(faults) - MOST_FAULTS} more)" if len(faults) > MOST_FAULTS else ""
        raise ConfigError("\n".join(faults[:MOST_FAULTS]) + more, hint="; ".join(hints))
    if not rows:
        raise ConfigError("the data file holds no row", where=str(path), expected="one JSON object a line")
    return tuple(rows)


def _row(line: str, section: TaskSection) -> Row | tuple[str, str]:
    """The row of a line, or (what is wrong, hint)."""
    try:
        raw = json.loads(line)
    except ValueError as e:
        return f"not JSON: {e}", "one JSON object a line"
    if not isinstance(raw, dict):
        return f"expected a JSON object, got {type(raw).__name__}", "one JSON object a line"
    prompt = _text(raw, section.prompt_key, "task.prompt_key", PROMPT_KEYS)
    answer = _text(raw, section.answer_key, "task.answer_key", ANSWER_KEYS)
    if isinstance(prompt, tuple):
        return prompt
    if isinstance(answer, tuple):
        return answer
    if section.answer_after is not None:
        _, found, answer = answer.rpartition(section.answer_after)
        if not found:
            return (
                f'"{section.answer_key}" does not hold the marker {section.answer_after!r}',
                "task.answer_after is what stands before the answer; leave it out when the whole text is the answer",
            )
        if not answer.strip():
            return f"no answer after {section.answer_after!r}", "every row needs an answer"
    return Row(prompt=prompt, answer=answer.strip())


def _text(raw: Mapping[str, object], key: str, setting: str, usual: Sequence[str]) -> str | tuple[str, str]:
    """The text under `key`, or (what is wrong, hint)."""
    if key not in raw:
        near = next((k for k in usual if k in raw), None)
        hint = f'set {setting} = "{near}"' if near else f"set {setting}; the row has {', '.join(sorted(map(str, raw)))}"
        return f'missing key "{key}"', hint
    value = raw[key]
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        return f'"{key}" must be text, got {type(value).__name__}', "prompts and answers are text"
    if not value.strip():
        return f'"{key}" is empty', "every row needs a prompt and an answer"
    return value


class RowsTask:
    """Rows in a seeded order, shuffled anew each time all were seen."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        section: TaskSection,
        *,
        seed: int,
        rows: Sequence[Row],
        held_out: Sequence[Row] = (),
    ) -> None:
        self._tokenizer, self._section, self._seed = tokenizer, section, seed
        self._rows, self._held_out = rows, held_out
        self._order: tuple[int, tuple[int, ...]] = (-1, ())  # epoch -> its order

    def prompt(self, ordinal: int) -> TaskItem:
        """Prompt number `ordinal` (from 0)."""
        epoch, place = divmod(ordinal, len(self._rows))
        if self._order[0] != epoch:
            self._order = (epoch, self._shuffled(f"rows/{self._seed}/{epoch}", len(self._rows)))
        return self._item(self._rows[self._order[1][place]])

    def eval_items(self, n: int) -> tuple[TaskItem, ...]:
        """Up to `n` held-out rows in a seeded order."""
        order = self._shuffled(f"rows/{self._seed}/held-out", len(self._held_out))
        return tuple(self._item(self._held_out[i]) for i in order[:n])

    def _item(self, row: Row) -> TaskItem:
        user = self._section.prompt_template.replace("{prompt}", row.prompt)
        tokens = self._tokenizer.render_prompt(self._section.system_prompt, user, self._section.chat_template)
        return TaskItem(prompt=user, prompt_tokens=tuple(tokens), answer=row.answer)

    def _shuffled(self, key: str, n: int) -> tuple[int, ...]:
        order = list(range(n))
        random.Random(key).shuffle(order)
        return tuple(order)
