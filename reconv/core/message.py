"""Classes whose instances ranks may send to each other; every other class is refused."""

from __future__ import annotations

from typing import TypeVar

C = TypeVar("C", bound=type)

classes: dict[str, type] = {}  # by module and name


def message(cls: C) -> C:
    """Let ranks send instances of a dataclass, a named tuple or a recipe section. Only fields travel, never code.

    The receiver fills in the fields without calling the class, so they must not need `__init__` or `__post_init__`.
    """
    classes[message_name(cls)] = cls
    return cls


def message_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
