"""Requests to other hosts that the pages of a built site would make when they are read: python outside_requests.py SITE

Links that a reader follows are fine; scripts, styles, fonts, images, frames and fetches from elsewhere are not. The
theme's script can load Mermaid, but only for a diagram, which counts as a request here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

OUTSIDE = re.compile(r"(?:https?:)?//[\w.-]+", re.IGNORECASE)
LOADING_RELATIONS = {
    "stylesheet",
    "icon",
    "preload",
    "prefetch",
    "modulepreload",
    "preconnect",
    "dns-prefetch",
    "manifest",
}
CSS_LOAD = re.compile(r"""(?:@import\s+["']?|url\(\s*["']?)((?:https?:)?//[^"')\s]+)""", re.IGNORECASE)
SCRIPT_LOAD = re.compile(
    r"""(?:fetch|import|importScripts|Worker|EventSource|WebSocket|\.open)\(\s*(?:["'`]GET["'`],\s*)?["'`]((?:https?|wss?):?//[^"'`]+)"""
    r"""|\.src\s*=\s*["'`]((?:https?:)?//[^"'`]+)""",
    re.IGNORECASE,
)


class _Loads(HTMLParser):
    """Collects the addresses that a page loads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "link":
            is_loaded = bool(LOADING_RELATIONS & set(values.get("rel", "").lower().split()))
            self.found += [values["href"]] if is_loaded and "href" in values else []
        elif tag != "a":
            self.found += [values[name] for name in ("src", "srcset", "data", "poster", "xlink:href") if name in values]
        self.found += CSS_LOAD.findall(values.get("style", ""))
        if "mermaid" in values.get("class", "").split():
            self.found.append("https://unpkg.com/mermaid")


def _page_loads(text: str) -> Iterator[str]:
    parser = _Loads()
    parser.feed(text)
    yield from (address for address in parser.found if OUTSIDE.match(address.strip()))
    for style in re.findall(r"<style[^>]*>(.*?)</style>", text, re.DOTALL):
        yield from CSS_LOAD.findall(style)
    for script in re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL):
        yield from _script_loads(script)


def _script_loads(text: str) -> Iterator[str]:
    yield from ("".join(groups) for groups in SCRIPT_LOAD.findall(text))


def outside_requests(site: Path) -> list[str]:
    """`FILE: ADDRESS` for each request to another host; raises FileNotFoundError where there is no site."""
    if not (site / "index.html").is_file():
        raise FileNotFoundError(f"{site} has no index.html")
    readers = {".html": _page_loads, ".css": CSS_LOAD.findall, ".js": _script_loads, ".svg": _page_loads}
    found = []
    for file in sorted(site.rglob("*")):
        if file.suffix in readers:
            addresses = readers[file.suffix](file.read_text(encoding="utf-8"))
            found += [f"{file.relative_to(site)}: {address}" for address in dict.fromkeys(addresses)]
    return found


if __name__ == "__main__":
    requests = outside_requests(Path(sys.argv[1]))
    sys.exit("\n".join(["The site requests from elsewhere:", *requests]) if requests else 0)
