"""Small pieces of Markdown for the generated pages."""

from __future__ import annotations

import re
from collections.abc import Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; cells are Markdown of one line."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *lines]) + "\n"


def code(text: str) -> str:
    """Text as inline code; text with backticks in it, too."""
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}"


def escaped(text: str) -> str:
    """Plain text whose stars, underscores, brackets and angle brackets outside of `code` mean themselves."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else _escaped_part(part) for part in parts)


def _escaped_part(text: str) -> str:
    return re.sub(r"([*_\[\]])", r"\\\1", text).replace("<", "&lt;").replace(">", "&gt;")
