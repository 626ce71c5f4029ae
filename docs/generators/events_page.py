"""The reference of events, from their dataclasses and the comments beside their fields."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

from page_parts import code, escaped, table

from reconv.logging import events

INTRODUCTION = """\
# Events

`events.jsonl` in the [run directory](run-directory.md) has one JSON object per line, with `kind`, `time_s` (Unix
seconds), the fields below and a checksum `crc32c` over the rest of the line. `reconv train --json` prints the same
objects without the checksum. A number that is not finite is a string (`"nan"`, `"inf"`). Readers should ignore kinds
and fields they do not know. In Python, `reconv.logging.event_log.read_events(path)` returns them as objects, and
`reconv.train(..., on_event=f)` calls `f` with each of them.
"""
# What the class itself does not say.
DESCRIPTIONS = {
    "checkpoint": "A checkpoint is complete on disk.",
    "non_finite": "A step whose loss or gradients were not finite; it changed nothing.",
}


def render() -> str:
    """The page: a table of fields for each kind of event."""
    parts = [INTRODUCTION]
    for kind, cls in events._CLASSES.items():
        own = inspect.getdoc(cls) or ""
        description = DESCRIPTIONS.get(kind) or own
        if description.startswith(f"{cls.__name__}("):
            raise ValueError(f"the event {cls.__name__} has no docstring")
        comments = _comments(cls)
        rows = [
            (code(field.name), code(str(field.type)), escaped(comments.get(field.name, "")))
            for field in fields(cls)
            if field.name != "time_s"
        ]
        parts += [f"## {kind}\n", escaped(description) + "\n", table(("field", "type", "meaning"), rows)]
    return "\n".join(parts)


def _comments(cls: type) -> dict[str, str]:
    """The comment after each field."""
    return dict(re.findall(r"^    (\w+): [^#\n]*#\s*(.*)$", inspect.getsource(cls), re.MULTILINE))
