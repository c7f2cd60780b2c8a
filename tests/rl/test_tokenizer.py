"""Tokenizers: the built-in characters, and folders written by transformers' own library."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ConfigError
from runtime.rl.tokenizer import CharTokenizer, FolderTokenizer, load_tokenizer

CHARS = CharTokenizer()


@given(st.text(CharTokenizer.CHARACTERS))
def test_characters_come_back(text: str) -> None:
    ids = CHARS.encode(text)
    assert CHARS.decode(ids) == text
    assert all(1 < i < CHARS.vocab_size for i in ids)


def test_special_ids_of_the_characters() -> None:
    assert CHARS.vocab_size == 16
    assert CHARS.eos_ids == {1}
    assert CHARS.decode([2, 3, CHARS.eos_id]) == "01"
    assert CHARS.decode([2, CHARS.vocab_size, 3, 151_935]) == "0_1_"  # a model may have a larger vocabulary
    assert CHARS.decode([2, CHARS.pad_id, 3]) == "0_1"  # not "01": padding in an answer is a wrong answer
    assert CHARS.render_prompt(None, "12=") == CHARS.encode("12=")
    assert CHARS.render_prompt("1+", "2=", "none") == CHARS.encode("1+2=")


def test_a_character_without_an_id_is_named() -> None:
    with pytest.raises(ConfigError, match=r"character 3 of '12é'.*'é'"):
        CHARS.encode("12é")


def test_specs() -> None:
    assert isinstance(load_tokenizer("builtin:chars", Path("/nowhere")), CharTokenizer)
    with pytest.raises(ConfigError, match="builtin:words"):
        load_tokenizer("builtin:words", Path("/nowhere"))
    with pytest.raises(ConfigError, match="not found"):
        load_tokenizer("absent", Path("/nowhere"))


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_folder(folder: Path, *, template: str | None = TEMPLATE, eos: str | None = "<|end|>") -> None:
    """A word-level tokenizer as transformers saves them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<|end|>", "<|stop|>", "<|user|>", "<|system|>", "<|assistant|>"]
    vocab = {w: i for i, w in enumerate(["[UNK]", *special, *"0123456789", "be", "brief", "what", "is"])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(special)
    inner.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    config |= {"eos_token": eos} if eos else {}
    config |= {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_folder_with_a_chat_template(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    tokenizer = load_tokenizer(tmp_path.name, tmp_path.parent)
    assert tokenizer.eos_ids == {1, 2}
    assert tokenizer.pad_id == 1
    assert tokenizer.vocab_size == 20
    assert tokenizer.decode(tokenizer.encode("what is 7")) == "what is 7"
    assert tokenizer.decode([tokenizer.encode("7")[0], 1]) == "7"
    beyond = [*tokenizer.encode("7"), tokenizer.vocab_size, *tokenizer.encode("7"), 151_935]
    assert tokenizer.decode(beyond) == "7\N{REPLACEMENT CHARACTER}7\N{REPLACEMENT CHARACTER}"
    rendered = tokenizer.render_prompt("be brief", "what is 7")
    assert rendered == tokenizer.encode("<|system|>be brief<|end|><|user|>what is 7<|end|><|assistant|>")
    assert tokenizer.render_prompt("be brief", "what is 7", "none") == tokenizer.encode("be brief\n\nwhat is 7")


def test_a_folder_without_a_template_or_without_an_end(tmp_path: Path) -> None:
    write_folder(tmp_path, template=None)
    assert FolderTokenizer(tmp_path).render_prompt(None, "what is 7") == FolderTokenizer(tmp_path).encode("what is 7")
    write_folder(tmp_path, eos=None)
    with pytest.raises(ConfigError, match="no end-of-sequence"):
        FolderTokenizer(tmp_path)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gemma", None])
@pytest.mark.parametrize(
    "stated", ["TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast"]
)
def test_the_class_is_the_one_transformers_would_take(tmp_path: Path, stated: str, model_type: str | None) -> None:
    from transformers import AutoTokenizer

    write_folder(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"tokenizer_class": stated}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    try:
        expected = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError):
        with pytest.raises(ConfigError, match="not a tokenizer"):
            FolderTokenizer(tmp_path)
        return
    made = FolderTokenizer(tmp_path)
    assert type(made._inner) is type(expected)
    assert made.encode("what is 7") == expected.encode("what is 7", add_special_tokens=False)


def test_reading_a_common_folder_does_not_import_torch(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    code = (
        "import sys, pathlib\nfrom runtime.rl.tokenizer import FolderTokenizer\n"
        "tokenizer = FolderTokenizer(pathlib.Path(sys.argv[1]))\n"
        "assert tokenizer.render_prompt('be brief', 'what is 7')\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_folder_that_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer") as raised:
        FolderTokenizer(tmp_path)
    assert str(tmp_path) in str(raised.value)
