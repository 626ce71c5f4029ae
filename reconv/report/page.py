"""The HTML document and the blocks that sections are made of.

Its Content-Security-Policy forbids network requests and all scripts but its own, which it names by hash.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from reconv.report.markup import Html, el, join

_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {scripts}; "
    "base-uri 'none'; form-action 'none'"
)
_BADGES = {
    "running": ("live", "●", "running"),
    "met": ("good", "✓", "expectation met"),
    "finished": ("good", "✓", "finished"),
    "missed": ("bad", "✗", "expectation not met"),
    "stopped": ("warn", "‖", "stopped"),
    "unfinished": ("warn", "…", "not finished"),
    "diverged": ("bad", "!", "diverged"),
    "failed": ("bad", "!", "failed"),
}


@dataclass(frozen=True, slots=True)
class LivePage:
    """Time at which the page of a running run was written, and the interval of its reloads."""

    written_s: float  # Unix seconds
    reload_s: float  # between two reloads
    stale_s: float  # after this time without a new page the run is taken for dead, and the page stops reloading


def document(title: str, *body: Html, live: LivePage | None = None, script: str = "", style: str = "") -> str:
    """A whole HTML document, self-contained; `script` and `style` are added to those of every page."""
    scripts = [_asset("page.js"), *([Html(script)] if script else [])]
    hashes = (b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    policy = _POLICY.format(scripts=" ".join(f"'sha256-{digest}'" for digest in hashes))
    head = el(
        "head",
        None,
        el("meta", {"charset": "utf-8"}),
        el("meta", {"http-equiv": "Content-Security-Policy", "content": policy}),
        el("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        el("meta", {"name": "color-scheme", "content": "light dark"}),
        el("meta", {"name": "generator", "content": "Reconv"}),
        el("link", {"rel": "icon", "href": "data:,"}),
        el("title", None, title),
        el("style", None, _asset("page.css"), Html(style)),
    )
    timing = {} if live is None else _timing(live)
    content = el("body", timing, el("main", None, *body), *(el("script", None, text) for text in scripts))
    return f"<!doctype html>\n{el('html', {'lang': 'en'}, head, content)}\n"


def _timing(live: LivePage) -> dict[str, object]:
    """Timing that the page's script needs to reload the page."""
    return {"data-reload-s": f"{live.reload_s:g}", "data-stale-at-s": f"{live.written_s + live.stale_s:.0f}"}


def _asset(name: str) -> Html:
    return Html((resources.files("reconv.report") / "assets" / name).read_text(encoding="utf-8"))


def header(kicker: str, title: str, *body: Html) -> Html:
    """The header of a page; the kicker says which kind of page it is."""
    return el("header", None, el("p", {"class": "kicker"}, kicker), el("h1", None, title), *body)


def section(title: str, *body: Html, intro: str = "") -> Html:
    """A section with a title; empty without a body."""
    if not join(body):
        return Html("")
    return el("section", None, el("h2", None, title), *([el("p", {"class": "intro"}, intro)] if intro else []), *body)


def badge(state: str) -> Html:
    """The state of a run as a colored badge that is readable without color."""
    tone, sign, text = _BADGES[state]
    return el("span", {"class": f"badge {tone}"}, el("span", {"aria-hidden": "true"}, sign), f" {text}")


def card(name: str, value: str, detail: str = "") -> Html:
    """One number with its name and an explanation."""
    return el(
        "div",
        {"class": "card"},
        el("dt", None, name),
        el("dd", {"class": "value"}, value),
        el("dd", {"class": "detail"}, detail),
    )


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    numeric: Sequence[int] = (),
    caption: str = "",
    *,
    is_sortable: bool = False,
) -> Html:
    """A table that scrolls on a narrow screen; `numeric` columns are right-aligned.

    A click on a column's name sorts a table that is sortable.
    """

    def cell(name: str, column: int, content: str) -> Html:
        return el(name, {"class": column in numeric and "num", "scope": name == "th" and "col"}, content)

    header = el("thead", None, el("tr", None, *(cell("th", n, text) for n, text in enumerate(head))))
    body = el("tbody", None, *(el("tr", None, *(cell("td", n, text) for n, text in enumerate(row))) for row in rows))
    label = caption or head[0]
    title = [el("caption", None, caption)] if caption else []
    return el(
        "div",
        {"class": "scroll", "tabindex": 0, "role": "region", "aria-label": label},
        el("table", {"class": is_sortable and "sortable"}, *title, header, body),
    )


def panel(title: str, note: str, content: Html) -> Html:
    """A table or another block with a heading, as large as a chart."""
    return el("figure", {"class": "panel"}, el("figcaption", None, el("h3", None, title), el("p", None, note)), content)


def pairs(rows: Sequence[tuple[str, str]]) -> Html:
    """Names and values, one pair per line."""
    return el("dl", {"class": "pairs"}, *(join([el("dt", None, name), el("dd", None, value)]) for name, value in rows))


def fold(title: str, *body: Html, is_open: bool = False) -> Html:
    """A collapsible part, always open when printed."""
    return el("details", {"open": is_open}, el("summary", None, title), *body)


def command(name: str, text: str) -> Html:
    """A command with a copy button."""
    return el(
        "div",
        {"class": "command"},
        el("span", None, name),
        el("code", {"tabindex": 0}, text),
        el("button", {"type": "button", "class": "copy", "hidden": True}, "copy"),
    )
