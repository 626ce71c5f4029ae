"""The names of the shipped recipes, and the nearest name to a mistyped one.

Owns where presets lie. Refuses to open them, and imports neither pydantic nor yaml: shell completion and help need it
to be instant. Invariant: every name listed has a file.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

PRESETS = Path(__file__).resolve().parent.parent / "recipes"


def preset_names() -> list[str]:
    """The shipped recipes, by name."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def preset_path(name: str) -> Path:
    """The file of a shipped recipe; the name must be one of `preset_names`."""
    return PRESETS / f"{name}.yaml"


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice a person most likely meant, or None when nothing is close."""
    by_lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None
