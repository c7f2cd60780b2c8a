"""Text to tokens and back: a built-in character vocabulary, or a Hugging Face folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from runtime.errors import ConfigError

BUILTIN_CHARS = "builtin:chars"
UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # what an id beyond the vocabulary decodes to
ChatTemplate = Literal["auto", "none"]


# tokenizer_class of tokenizer_config.json -> class that AutoTokenizer takes, for these model types of config.json
KNOWN_CLASSES: Mapping[str, tuple[str, frozenset[object]]] = {
    "TokenizersBackend": ("TokenizersBackend", frozenset(("llama", "qwen3"))),
    "PreTrainedTokenizerFast": ("TokenizersBackend", frozenset(("llama", "qwen3"))),
    "Qwen2Tokenizer": ("Qwen2Tokenizer", frozenset(("qwen2", "qwen3"))),
    "Qwen2TokenizerFast": ("Qwen2Tokenizer", frozenset(("qwen2", "qwen3"))),
}


class Tokenizer(Protocol):
    """What tasks, engines and trainers need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this; the model's vocabulary must not be smaller."""
        ...

    @property
    def pad_id(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """A response ends with any of these."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, without special tokens. Total: an id from `vocab_size` on, which a model with a padded vocabulary
        may sample, decodes to a sign that no text encodes to."""
        ...

    def render_prompt(self, system: str | None, user: str, chat_template: ChatTemplate = "auto") -> list[int]:
        """Ids of a whole prompt: by the tokenizer's chat template if "auto" and it has one, else plain text."""
        ...


class CharTokenizer:
    """Sixteen ids: padding, end, ten digits and four signs. Enough for tasks on numbers.

    Padding decodes to "_", which no text encodes to: a model that emits it has not answered the digits around it. So does
    every id beyond the sixteen, which a model with a larger vocabulary may sample.
    """

    CHARACTERS = "0123456789=+- "
    pad_id = 0
    eos_id = 1

    def __init__(self) -> None:
        self._ids = {c: i + 2 for i, c in enumerate(self.CHARACTERS)}
        self._texts = ("_", "", *self.CHARACTERS)

    @property
    def vocab_size(self) -> int:
        return len(self._texts)

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset({self.eos_id})

    def encode(self, text: str) -> list[int]:
        """Raises ConfigError naming the first character that has no id."""
        for at, character in enumerate(text):
            if character not in self._ids:
                raise ConfigError(
                    f"{BUILTIN_CHARS} has no id for character {at + 1} of {text[:40]!r}",
                    got=character,
                    expected=f"one of {self.CHARACTERS!r}",
                    hint="set model.tokenizer to a Hugging Face folder for free text",
                )
        return [self._ids[c] for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        known = len(self._texts)
        return "".join(self._texts[i] if i < known else self._texts[self.pad_id] for i in ids)

    def render_prompt(self, system: str | None, user: str, chat_template: ChatTemplate = "auto") -> list[int]:
        """There is no chat template; a system prompt goes before the user's turn."""
        del chat_template
        return self.encode((system or "") + user)


class FolderTokenizer:
    """A tokenizer saved by transformers, read from its folder and never from a network."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(
                "tokenizer folder not found", where=str(folder), hint=f'"{BUILTIN_CHARS}" is the built-in one'
            )
        try:
            chosen = _class_of(folder)
        except ImportError as e:
            raise ConfigError(
                "reading a tokenizer folder needs transformers", where=str(folder), hint="pip install 'hexctl[run]'"
            ) from e
        try:
            self._inner: Any = chosen.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise ConfigError("not a tokenizer", where=str(folder), got=str(e).split("\n", maxsplit=1)[0]) from e
        self._eos_ids = frozenset(_eos_of(self._inner.eos_token_id) | _eos_in(folder / "generation_config.json"))
        if not self._eos_ids:
            raise ConfigError("the tokenizer has no end-of-sequence token", where=str(folder))

    @property
    def vocab_size(self) -> int:
        return len(self._inner)

    @property
    def pad_id(self) -> int:
        pad = self._inner.pad_token_id
        return int(pad) if pad is not None else min(self._eos_ids)

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self._inner.encode(text, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        known, pieces = self.vocab_size, [[]]  # type: int, list[list[int]]
        for i in ids:
            if i < known:
                pieces[-1].append(i)
            else:  # transformers drops it or raises, by the kind of tokenizer
                pieces.append([])
        return UNKNOWN.join(self._text(piece) for piece in pieces)

    def _text(self, ids: list[int]) -> str:
        return str(self._inner.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def render_prompt(self, system: str | None, user: str, chat_template: ChatTemplate = "auto") -> list[int]:
        """Without a template: system, a blank line, user, with the special tokens the tokenizer adds by itself."""
        if chat_template == "auto" and self._inner.chat_template:
            turns = [{"role": "system", "content": system}] if system else []
            turns.append({"role": "user", "content": user})
            return self.encode(self._inner.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        text = f"{system}\n\n{user}" if system else user
        return [int(i) for i in self._inner.encode(text, add_special_tokens=True)]


def _class_of(folder: Path) -> Any:
    """The transformers class that reads the folder. Asking AutoTokenizer imports torch, seconds of flow's start on a cold
    disk; what it would answer for the common folders is known."""
    import transformers

    shape, stated = _read(folder / "config.json"), _read(folder / "tokenizer_config.json")
    known = KNOWN_CLASSES.get(str(stated.get("tokenizer_class")))
    if known is None or shape.get("model_type") not in known[1] or {"auto_map"} & {*shape, *stated}:
        return transformers.AutoTokenizer
    older = not hasattr(transformers, "TokenizersBackend")  # transformers 4 has two classes of each name
    return transformers.AutoTokenizer if older else getattr(transformers, known[0])


def load_tokenizer(spec: str, base: Path) -> Tokenizer:
    """The tokenizer that `model.tokenizer` names; a folder is relative to `base`. Raises ConfigError."""
    if spec == BUILTIN_CHARS:
        return CharTokenizer()
    if spec.startswith("builtin:"):
        raise ConfigError("unknown built-in tokenizer", got=spec, expected=BUILTIN_CHARS)
    return FolderTokenizer(base / spec)


def _eos_of(value: object) -> set[int]:
    """Ids out of what configs write: nothing, a number or a list of numbers."""
    values = value if isinstance(value, list) else [value]
    return {v for v in values if isinstance(v, int) and not isinstance(v, bool)}


def _eos_in(file: Path) -> set[int]:
    """Chat models often end with another token than the tokenizer's; generation_config.json lists them."""
    return _eos_of(_read(file).get("eos_token_id"))


def _read(file: Path) -> Mapping[str, object]:
    """A JSON object; empty when there is none."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}
