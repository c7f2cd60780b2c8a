"""`@record`: the one kind of value in hexctl.

A record is a frozen, slotted, keyword-only dataclass. Invariants live in `__post_init__` and name field and value.
"""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,))
def record(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, slotted, keyword-only dataclass."""
    return dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls)


def replace(value: T, **changes: Any) -> T:
    """A copy of the record `value` with some fields changed; invariants are checked again."""
    return dataclasses.replace(value, **changes)  # type: ignore[type-var]
