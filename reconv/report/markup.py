"""HTML elements with escaped text: a plain `str` is always escaped and made printable, an `Html` never."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from typing import Any

from reconv.core.text import printable_lines

_VOID = frozenset({"meta", "link", "img"})
_SHAPES = frozenset({"line", "rect", "circle", "path", "polygon"})  # inside SVG they must be closed


class Html(str):
    """A string of HTML, which is not escaped again."""

    __slots__ = ()


def el(name: str, attributes: Mapping[str, object] | None = None, *children: str) -> Html:
    """An element: attributes and plain text are escaped, `Html` children are not; False omits an attribute."""
    parts = [name]
    for key, value in (attributes or {}).items():
        if value is True:
            parts.append(key)
        elif value is not False:
            parts.append(f'{key}="{_escaped(str(value), quote=True)}"')
    opening = " ".join(parts)
    if name in _VOID or name in _SHAPES:
        return Html(f"<{opening}>" if name in _VOID else f"<{opening}/>")
    return Html(f"<{opening}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """Concatenate parts, escaping plain text."""
    return Html("".join(part if isinstance(part, Html) else _escaped(part) for part in parts))


def _escaped(text: str, *, quote: bool = False) -> str:
    """Plain text as HTML, without control characters; newlines do no harm in a page."""
    return html.escape(printable_lines(*text.split("\n")), quote=quote)


def data_block(value: Any) -> Html:
    """A JSON value for the page's script, safe inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Html(f'<script type="application/json">{text}</script>')
