"""Make docs/coming-from/coverage.md from docs/coverage.yaml: python docs/generators/make_coverage.py"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).resolve().parent.parent
TABLE, PAGE = DOCS / "coverage.yaml", DOCS / "coming-from" / "coverage.md"
LEVELS = len(PAGE.relative_to(DOCS.parent).parent.parts)  # from the page up to the repository
STATES = {"partly": "partly", "unneeded": "not needed", "missing": "not there"}
INTRODUCTION = """\
# Coverage

<!-- Made from docs/coverage.yaml: change that file and run `python docs/generators/make_coverage.py`. -->

Reconv replaces five reference programs. This page lists what they can do, how to do it with Reconv, and the commands
and tests that show it, or says that it is not supported. Coming from one of them? Search this page for its option, or
let `reconv migrate` translate a whole command line.

`a.b` is a recipe field: write it in a recipe, or type `--set a.b=VALUE`.
"""


def split_uses(text: str) -> tuple[list[str], str]:
    """What to type or write (`reconv VERB ...`, `recipe NAME`, `FIELD` or `FIELD=VALUE`), and a note on it."""
    uses, note = re.fullmatch(r"(.*?)(?: \((.*)\))?", text).groups(default="")  # type: ignore[union-attr]
    return re.split(r", (?![^\[]*\])| or ", uses) if uses else [], note


def shown(text: str) -> str:
    uses, note = split_uses(text)
    names = ", ".join(f"recipe `{use[7:]}`" if use.startswith("recipe ") else f"`{use}`" for use in uses)
    return f"{names} ({note})" if note else names


def counterpart(option: str | Mapping[str, str]) -> str:
    """What replaces an option of another program."""
    if isinstance(option, str):
        return shown(option)
    [(kind, reason)] = option.items()
    return f"{kind}: {reason}"


def options_cell(options: Mapping[str, str | Mapping[str, str]], systems: Mapping[str, str]) -> str:
    lines = []
    for key, option in options.items():
        words = key.split()
        owners = [word for word in words if word in systems]
        spellings = " ".join(f"`{word}`" for word in words if word not in systems)
        lines.append(f"{' '.join(owners)} {spellings}: {counterpart(option)}")
    return "<br>".join(lines)


def state(row: Mapping[str, Any]) -> str:
    """How to do it, what of it is missing, and the caveats."""
    parts = [shown(row.get("how", ""))]
    parts += [f"**{title}**: {row[key]}" for key, title in STATES.items() if key in row]
    parts += [f"[{name}](#caveats)" for name in row.get("caveat", "").split()]
    return "<br>".join(part for part in parts if part)


def shown_by(row: Mapping[str, Any]) -> str:
    """Links to the files of the tests, and the commands."""
    files = dict.fromkeys(check["test"].partition("::")[0] for check in row["check"] if "test" in check)
    links = [f"[{Path(file).stem.removeprefix('test_')}]({'../' * LEVELS}{file})" for file in files]
    return " ".join([*links, *(f"`{check['run']}`" for check in row["check"] if "run" in check)])


def line(cells: Sequence[str]) -> str:
    return (
        "| " + " | ".join(cell.replace("|", "\\|").replace("*", "\\*").replace("\\*\\*", "**") for cell in cells) + " |"
    )


def render(table: Mapping[str, Any]) -> str:
    """The page as Markdown."""
    systems, sections = table["systems"], table["sections"]
    rows = [row for section in sections.values() for row in section]
    partly, unneeded, missing = (sum(word in row for row in rows) for word in STATES)
    lines = [
        INTRODUCTION,
        f"Of {len(rows)} rows, {len(rows) - partly - unneeded - missing} are supported, {partly} partly; "
        f"{unneeded} are not needed here, and {missing} are missing.\n",
        "Programs: " + "; ".join(f"**{key}** {name}" for key, name in systems.items()) + ". A star marks what only a",
        "later release of that program has.",
    ]
    for name, section in sections.items():
        lines += ["", f"## {name}", "", line(["capability", "programs", "in Reconv", "their options", "shown by"])]
        lines.append("|---|---|---|---|---|")
        for row in section:
            options = options_cell(row.get("options", {}), systems)
            lines.append(line([row["capability"], row["systems"], state(row), options, shown_by(row)]))
    lines += ["", "## Caveats", ""]
    lines += [f"- **{name}**: {text}" for name, text in table["caveats"].items()]
    lines += ["", "## Options that only their hardware needs", "", line(["option", "why Reconv has none"]), "|---|---|"]
    for key, reason in table["hardware"].items():
        system, _, spelling = key.partition(" ")
        lines.append(line([f"{system} `{spelling}`", reason]))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(yaml.safe_load(TABLE.read_text(encoding="utf-8"))), encoding="utf-8")
