"""MkDocs hooks: generated pages, pages from the repository's root, navigation, and links out of docs/.

`make docs` builds the site strictly: a broken link, an unknown anchor or a recipe field without a description fails it.
"""

from __future__ import annotations

import html
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT)]

import cli_page  # noqa: E402
import coverage_page  # noqa: E402
import events_page  # noqa: E402
import recipe_fields_page  # noqa: E402

from benchmarks import pages as figures  # noqa: E402
from benchmarks.results import changed_sources  # noqa: E402
from benchmarks.results import load as load_result  # noqa: E402
from benchmarks.vendors import page as published_figures_page  # noqa: E402
from reconv.recipe.json_schema import recipe_json_schema  # noqa: E402

# Files of the repository's root that are pages of the site.
ROOT_PAGES = {
    "CONTRIBUTING.md": "contributing/index.md",
    "ARCHITECTURE.md": "contributing/architecture.md",
    "SECURITY.md": "contributing/security.md",
    "CHANGELOG.md": "contributing/changelog.md",
    "README.md": "index.md",  # the front page of the site stands for it in links
}
# Search shows what to do before what was measured or decided.
BOOSTS = {
    "how-to": 4,
    "concepts": 3,
    "tutorials": 2,
    "get-started.md": 2,
    "results": 0.5,
    "decisions": 0.3,
    "contributing": 0.3,
}
WIDE_PAGES = ("coming-from/coverage.md", "reference/published-figures.md")
CHART = re.compile(r'<picture><source [^>]* srcset="([^"]+)"><img src="([^"]+)" alt="([^"]*)"></picture>')
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
DRAWING = re.compile(r"^!\[[^\]]*\]\((images/[\w-]+\.svg)\)$", re.MULTILINE)
PIPE_IN_CODE = re.compile(r"^\|.*`[^`\n]*\\\|[^`\n]*`.*$", re.MULTILINE)
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2\s*$|^(?: {4}|\t)[^\n]*$", re.DOTALL | re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Expand entries such as `how-to/*` of the navigation to the pages of that folder which no other entry names."""
    pages = {str(path.relative_to(config.docs_dir)) for path in Path(config.docs_dir).rglob("*.md")}
    named = set(_named(config.nav))
    config.nav = _expand(config.nav, pages - named)
    return config


def _named(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for inner in entry if isinstance(entry, list) else entry.values() if isinstance(entry, dict) else ():
        yield from _named(inner)


def _expand(entries: list[Any], left: set[str]) -> list[Any]:
    expanded: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            [(title, inner)] = entry.items()
            inner = _expand(inner, left) if isinstance(inner, list) else inner
            expanded += [{title: inner}] if inner else []
        elif entry.endswith("/*"):
            expanded += sorted(page for page in left if os.path.dirname(page) == entry[:-2])
        else:
            expanded.append(entry)
    return expanded


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is made from the code, and the pages of the repository's root."""
    made = {
        "reference/recipe-fields.md": recipe_fields_page.render(),
        "coming-from/coverage.md": coverage_page.render(),
        "reference/cli.md": cli_page.render(),
        "reference/events.md": events_page.render(),
        "reference/published-figures.md": published_figures_page(),
        "reference/recipe.schema.json": json.dumps(recipe_json_schema(), indent=1) + "\n",
    }
    for name, target in ROOT_PAGES.items():
        if name != "README.md":
            made[target] = (ROOT / name).read_text(encoding="utf-8")
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to pages of the site; the name of a file that is none stays as code."""
    page.meta["hide"] = _hidden(page.file.src_uri)
    page.meta["search"] = {"boost": BOOSTS.get(page.file.src_uri.partition("/")[0], 1)}
    markdown = markdown.replace("<!-- pages -->", _siblings(page.file, files))
    markdown = CHART.sub(r"![\3](\2#only-light)![\3](\1#only-dark)", _with_marks(markdown))
    markdown = DRAWING.sub(lambda match: _inlined(page.file, match[1]), markdown)
    markdown = PIPE_IN_CODE.sub(_code_with_pipe, markdown)
    source = _source(page.file.src_uri)
    is_code = [match.span() for match in FENCE.finditer(markdown)]

    def replace(match: re.Match[str]) -> str:
        if any(start <= match.start() < end for start, end in is_code):
            return match[0]
        return _relinked(match, source, page.file.src_uri, files)

    return LINK.sub(replace, markdown)


def _with_marks(markdown: str) -> str:
    """A line below each figure whose code has changed since it was measured."""

    def mark(match: re.Match[str]) -> str:
        if match[2] == "chart" and f"<!-- figures: {match[3]} -->" in markdown:
            return match[0]  # its table has the line
        stored = figures.stored_cases()
        names = [name for name in figures.cases_of(match[0]) if name in stored and changed_sources(load_result(name))]
        return match[0] + ("\nThe code that these figures measure has changed since.\n{ .changed }\n" if names else "")

    return figures.BLOCK.sub(mark, markdown)


def _code_with_pipe(match: re.Match[str]) -> str:
    """A row of a table with escaped pipes in code, whose backslashes Python-Markdown would show, unlike others."""
    spans = re.split(r"(`[^`\n]+`)", match[0])
    return "".join(
        f"<code>{html.escape(span[1:-1]).replace(chr(92) + '|', '&#124;')}</code>" if r"\|" in span else span
        for span in spans
    )


def _hidden(uri: str) -> list[str]:
    """Columns beside a page that it does without: pages of wide tables need the room."""
    if uri == "index.md":
        return ["navigation"]
    return ["toc"] if uri.startswith("results/") or uri in WIDE_PAGES else []


def _siblings(file: File, files: Files) -> str:
    """A list of the other pages of a folder."""
    pages = [other for other in files.documentation_pages() if os.path.dirname(other.src_uri) == _folder(file)]
    links = {other.src_uri: _title(other) for other in pages if other.src_uri != file.src_uri}
    return "\n".join(f"- [{title}]({os.path.basename(uri)})" for uri, title in links.items())


def _folder(file: File) -> str:
    return os.path.dirname(file.src_uri)


def _title(file: File) -> str:
    return file.content_string.partition("\n")[0].removeprefix("# ")


def _inlined(file: File, target: str) -> str:
    """A drawing as part of the page, so that it takes the colors of light and dark."""
    drawing = (ROOT / "docs" / _folder(file) / target).read_text(encoding="utf-8")
    return f"<div>{' '.join(drawing.split())}</div>"


def _source(uri: str) -> str:
    """The path in the repository of a page's source."""
    return {target: name for name, target in ROOT_PAGES.items() if name != "README.md"}.get(uri, f"docs/{uri}")


def _relinked(match: re.Match[str], source: str, uri: str, files: Files) -> str:
    sign, text, target = match.groups()
    if re.match(r"[a-z]+:|#|/", target):
        return match[0]
    path, hash_sign, anchor = target.partition("#")
    in_repository = os.path.normpath(os.path.join(os.path.dirname(source), path))
    in_site = ROOT_PAGES.get(in_repository) or in_repository.removeprefix("docs/")
    if in_repository == in_site and in_repository not in ROOT_PAGES:  # not below docs/
        return _as_code(text, in_repository, match[0])
    if in_site not in files.src_uris:
        index = f"{in_site}/README.md"
        if index not in files.src_uris:
            if (ROOT / in_repository).exists():
                return _as_code(text, in_repository, match[0])
            return match[0]  # MkDocs reports it
        in_site = index
    return f"{sign}[{text}]({os.path.relpath(in_site, os.path.dirname(uri) or '.')}{hash_sign}{anchor})"


def _as_code(text: str, path: str, unchanged: str) -> str:
    """A file of the repository that is no page: its link text, with the path unless the text says it."""
    if not (ROOT / path).exists():
        return unchanged  # MkDocs reports it
    plain = text.strip("`")
    return f"`{plain}`" if plain in path else f"{text} (`{path}`)"
