"""Prompts by ordinal, and every way a data file can be wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.config.schema import Config
from runtime.errors import ConfigError
from runtime.rl.tasks import make_task
from runtime.rl.tokenizer import CharTokenizer

TOKENIZER = CharTokenizer()


def config(seed: int = 0, every_steps: int = 0, **task: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"seed": seed},
            "model": {"source": "seeded", "path": "m"},
            "task": {"source": "copy", **task},
            "evaluation": {"every_steps": every_steps},
        }
    )


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_copy_prompts_are_a_function_of_seed_and_ordinal() -> None:
    task = make_task(config(min_length=3, max_length=5), TOKENIZER)
    same = make_task(config(min_length=3, max_length=5), TOKENIZER)
    other = make_task(config(seed=1, min_length=3, max_length=5), TOKENIZER)
    items = [task.prompt(i) for i in range(200)]
    assert [same.prompt(i) for i in reversed(range(200))] == items[::-1]
    assert [other.prompt(i) for i in range(200)] != items
    assert {len(i.answer) for i in items} == {3, 4, 5}
    for item in items:
        assert item.prompt == item.answer.ljust(5) + "="
        assert TOKENIZER.decode(item.prompt_tokens) == item.prompt
    assert task.eval_items(5) == task.eval_items(9)[:5]
    assert task.eval_items(200) != tuple(items)


def test_rows_are_seen_once_an_epoch_in_a_seeded_order(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", *({"question": f"{i}+{i}=", "answer": i + i} for i in range(10)))
    task = make_task(config(source="jsonl", path=path), TOKENIZER)
    epochs = [[task.prompt(10 * e + i).prompt for i in range(10)] for e in range(3)]
    assert all(sorted(e) == sorted(epochs[0]) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert make_task(config(source="jsonl", path=path), TOKENIZER).prompt(17).prompt == epochs[1][7]
    assert task.prompt(3).prompt == epochs[0][3], "an earlier epoch again"
    assert task.prompt(0).answer == str(2 * int(epochs[0][0].split("+")[0]))


def test_templates_system_prompts_and_markers(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"question": "1+1=", "answer": "it is\n#### 2"}, "")
    task = make_task(
        config(source="jsonl", path=path, answer_after="####", prompt_template="0 {prompt} ", system_prompt="9 "),
        TOKENIZER,
    )
    item = task.prompt(0)
    assert (item.prompt, item.answer) == ("0 1+1= ", "2")
    assert TOKENIZER.decode(item.prompt_tokens) == "9 0 1+1= "


@pytest.mark.parametrize(
    ("rows", "line", "says", "hint"),
    [
        (['{"question": "1", "answer": "2"}', "{not json"], 2, "not JSON", "one JSON object a line"),
        (['["a"]'], 1, "expected a JSON object, got list", "one JSON object a line"),
        (['{"problem": "1", "answer": "2"}'], 1, 'missing key "question"', 'task.prompt_key = "problem"'),
        (['{"question": "1", "solution": "2"}'], 1, 'missing key "answer"', 'task.answer_key = "solution"'),
        (['{"question": "1", "zz": "2"}'], 1, 'missing key "answer"', "the row has question, zz"),
        (['{"question": "1", "answer": "  "}'], 1, '"answer" is empty', "needs a prompt and an answer"),
        (['{"question": "", "answer": "2"}'], 1, '"question" is empty', ""),
        (['{"question": "1", "answer": null}'], 1, '"answer" must be text, got NoneType', ""),
        (['{"question": "1", "answer": ["2"]}'], 1, '"answer" must be text, got list', ""),
    ],
)
def test_rows_that_do_not_fit_are_named_by_file_and_line(
    tmp_path: Path, rows: list[str], line: int, says: str, hint: str
) -> None:
    path = write(tmp_path / "d.jsonl", *rows)
    with pytest.raises(ConfigError) as e:
        make_task(config(source="jsonl", path=path), TOKENIZER)
    assert f"{path}:{line}: {says}" in str(e.value)
    assert hint in e.value.hint


def test_a_row_without_an_answer_after_the_marker(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"question": "1", "answer": "no marker"}, {"question": "1", "answer": "#### "})
    with pytest.raises(ConfigError) as e:
        make_task(config(source="jsonl", path=path, answer_after="####"), TOKENIZER)
    assert f"{path}:1: \"answer\" does not hold the marker '####'" in str(e.value)
    assert f"{path}:2: no answer after '####'" in str(e.value)


def test_many_faults_are_counted_not_listed(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", *["{"] * 30)
    with pytest.raises(ConfigError, match="and 22 more") as e:
        make_task(config(source="jsonl", path=path), TOKENIZER)
    assert str(e.value).count("not JSON") == 8


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match="holds no row"):
        make_task(config(source="jsonl", path=path), TOKENIZER)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        make_task(config(source="jsonl", path=tmp_path / "none.jsonl"), TOKENIZER)
    with pytest.raises(ConfigError, match="cannot be read"):
        make_task(config(source="jsonl", path=tmp_path), TOKENIZER)
    binary = tmp_path / "b.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        make_task(config(source="jsonl", path=binary), TOKENIZER)


def test_evaluation_needs_held_out_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"question": "1", "answer": "2"})
    with pytest.raises(ConfigError) as e:
        make_task(config(source="jsonl", path=path, every_steps=5), TOKENIZER)
    assert "eval_path" in e.value.where
    task = make_task(config(source="jsonl", path=path, eval_path=path, every_steps=5), TOKENIZER)
    assert len(task.eval_items(64)) == 1


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("gsm8k/train.jsonl", {"answer_after": "####"}),
        ("math500/test.jsonl", {"prompt_key": "problem", "answer_key": "answer"}),
    ],
)
def test_the_real_files_read_without_a_fault(name: str, keys: dict[str, str]) -> None:
    from runtime.rl.tasks.rows import read_rows

    path = Path(__file__).resolve().parents[3] / "shared" / "data" / name
    if not path.exists():
        pytest.skip(f"{name} is not next to this checkout")
    section = config(source="jsonl", path=path, **keys).task
    assert section is not None
    rows = read_rows(path, section)
    assert len(rows) >= 500
    assert all(r.prompt and r.answer for r in rows)
