"""`hexctl plan --export`: the plan as launch settings of another system, on stdout. Nothing is written to a file."""

from hexctl.cli.exits import Exit
from hexctl.cli.options import answer
from planner.export import Exported, export
from planner.problem import Problem
from planner.solution import Feasible


def answer_exported(output: str, target: str, found: Feasible, problem: Problem) -> int:
    """Print the settings: text with the notes as comments on top, or the JSON object {target, files, notes}."""
    exported = export(target, found, problem)
    answer(output, exported_document(exported), exported_text(exported))
    return Exit.FINE


def exported_document(exported: Exported) -> dict[str, object]:
    """The keys of `hexctl plan --export TARGET --output json`."""
    return {"target": exported.target, "files": dict(exported.files), "notes": list(exported.notes)}


def exported_text(exported: Exported) -> str:
    """Every file after the notes; `#` starts a comment in each of the targets' formats."""
    notes = "".join(f"# note: {note}\n" for note in exported.notes)
    several = len(exported.files) > 1
    parts = [f"# file: {name}\n{text}" if several else text for name, text in exported.files.items()]
    return notes + "\n".join(parts)
