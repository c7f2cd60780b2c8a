"""Errors of the planner: one small tree.

HexError                the shape every error of hexctl has
 └─ PlannerError
     ├─ InvalidInput      a value that breaks an invariant or a file that does not decode
     └─ UnknownName      a name that is not in a catalogue or registry

Infeasible and blocked are values (`planner.solution`), not exceptions.
"""


class HexError(Exception):
    """Says what, where, got and expected in one line, then a hint."""

    def __init__(self, what: str, *, where: str = "", got: object = None, expected: str = "", hint: str = "") -> None:
        self.what, self.where, self.got, self.expected, self.hint = what, where, got, expected, hint
        parts = [f"{where}: {what}" if where else what]
        if got is not None:
            parts.append(f"got {got!r}")
        if expected:
            parts.append(f"expected {expected}")
        super().__init__(", ".join(parts) + (f"\nhint: {hint}" if hint else ""))


class PlannerError(HexError):
    """Anything the planner refuses."""


class InvalidInput(PlannerError, ValueError):
    """A value breaks an invariant. A ValueError too: pydantic then reports it with its path, among all other faults."""


class UnknownName(PlannerError):
    """A name is not in the catalogue or registry asked."""
