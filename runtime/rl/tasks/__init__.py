"""Tasks: prompts by ordinal, with their right answers."""

from runtime.config.schema import Config
from runtime.errors import ConfigError
from runtime.rl.tasks.copy import CopyTask
from runtime.rl.tasks.rows import RowsTask, read_rows
from runtime.rl.tasks.task import Task, TaskItem
from runtime.rl.tokenizer import Tokenizer

__all__ = ["CopyTask", "RowsTask", "Task", "TaskItem", "make_task"]


def make_task(config: Config, tokenizer: Tokenizer) -> Task:
    """The task a configuration names. Reads and checks all of its data. ConfigError says file and line."""
    section = config.task
    if section is None:
        raise ConfigError("this configuration is for planning only", expected="a [task] table", hint="add [task]")
    if section.source == "copy":
        return CopyTask(tokenizer, seed=config.run.seed, min_length=section.min_length, max_length=section.max_length)
    assert section.path is not None  # by TaskSection
    held_out = () if section.eval_path is None else read_rows(section.eval_path, section)
    if config.evaluation.every_steps and not held_out:
        raise ConfigError(
            "evaluation needs held-out rows",
            where="task.eval_path",
            expected="a JSON-lines file",
            hint="set task.eval_path, or evaluation.every_steps = 0",
        )
    return RowsTask(tokenizer, section, seed=config.run.seed, rows=read_rows(section.path, section), held_out=held_out)
