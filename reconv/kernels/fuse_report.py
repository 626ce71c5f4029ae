"""The report of `reconv.fuse`: which modules compute with fused kernels, which do not, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

_MAX_NAMES = 3  # of modules in a row of the table


@dataclass(frozen=True, slots=True)
class FusedModule:
    """A module that computes with fused kernels, and what they compute."""

    name: str
    kind: str  # its class
    computes: str


@dataclass(frozen=True, slots=True)
class PlainModule:
    """A module that was left alone, and why."""

    name: str
    kind: str
    why: str


@dataclass(slots=True)
class FuseReport:
    """What `reconv.fuse` did with a model; `print` shows it as a table."""

    model: nn.Module
    """The fused model: the one that was passed, or its copy."""
    kind: str
    """Its class before it was fused."""
    fused: list[FusedModule] = field(default_factory=list)
    """Modules that compute with fused kernels."""
    plain: list[PlainModule] = field(default_factory=list)
    """Modules that kernels could not be used for."""
    notes: list[str] = field(default_factory=list)
    """What to do for the kernels to be used, or for all of them."""

    def __bool__(self) -> bool:
        """Whether anything was fused."""
        return bool(self.fused)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"reconv.fuse: {len(self.fused)} modules of {self.kind} compute with fused kernels"
        if self.fused:
            counts = Counter((row.kind, row.computes) for row in self.fused)
            yield from _table("fused", [(str(n), kind, what) for (kind, what), n in counts.items()])
        if self.plain:
            names: dict[tuple[str, str], list[str]] = {}
            for row in self.plain:
                names.setdefault((row.kind, row.why), []).append(row.name)
            rows = [(str(len(n)), kind, f"{why} ({_some(n)})") for (kind, why), n in names.items()]
            yield from _table("left alone", rows)
        yield from (f"note: {note}" for note in self.notes)


def _some(names: list[str]) -> str:
    """The first names of a list."""
    rest = len(names) - _MAX_NAMES
    return ", ".join(name or "the model" for name in names[:_MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _table(title: str, rows: list[tuple[str, str, str]]) -> Iterator[str]:
    numbers, kinds = (max(len(row[column]) for row in rows) for column in range(2))
    yield f"{title}:"
    yield from (f"  {number:>{numbers}}  {kind:<{kinds}}  {text}" for number, kind, text in rows)
