"""The built-in task: repeat the digits, then stop. A small model learns it from scratch in minutes."""

import random

from runtime.rl.tasks.task import TaskItem
from runtime.rl.tokenizer import Tokenizer


class CopyTask:
    """Prompt number n is "<digits>=" with the digits in a field of `max_length` characters, its answer the digits; how many
    and which follow from (seed, n).

    The fixed field puts what is to be copied at one distance, whatever its length: a small model finds that in about 150
    steps, and does not find "as far back as the answer is long" in 240.
    """

    def __init__(self, tokenizer: Tokenizer, *, seed: int, min_length: int, max_length: int) -> None:
        self._tokenizer, self._seed = tokenizer, seed
        self._min_length, self._max_length = min_length, max_length

    def prompt(self, ordinal: int) -> TaskItem:
        """Prompt number `ordinal` (from 0)."""
        return self._item(f"copy/{self._seed}/{ordinal}")

    def eval_items(self, n: int) -> tuple[TaskItem, ...]:
        """`n` prompts of a stream of their own."""
        return tuple(self._item(f"copy/{self._seed}/held-out/{i}") for i in range(n))

    def _item(self, key: str) -> TaskItem:
        draw = random.Random(key)
        length = draw.randint(self._min_length, self._max_length)
        digits = "".join(str(draw.randrange(10)) for _ in range(length))
        prompt = f"{digits:<{self._max_length}}="
        return TaskItem(prompt=prompt, prompt_tokens=tuple(self._tokenizer.encode(prompt)), answer=digits)
