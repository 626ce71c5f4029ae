"""The coverage page: docs/coverage.yaml (what the programs Reconv replaces can do) as docs/coverage.md.

Owns the form of the table and of the page. Refuses to know whether what the table says is true: tests/test_coverage.py
asks the schema, the command line and the tests. Invariant: the page is a pure function of the table.

    python docs/make_coverage.py           write the page
    python docs/make_coverage.py --check   exit 1 if the page is not what the table says
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).resolve().parent
TABLE_NAME, PAGE_NAME = "coverage.yaml", "coverage.md"
STATUSES = ("built", "partly", "not built")
_ROW_KEYS = {"capability", "systems", "status", "why", "fields", "verbs", "recipes", "tests", "options"}
_OPTION_KEYS = {"field", "verb", "value", "note", "not needed", "not built"}


class TableError(Exception):
    """The table is not in its documented form."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the old programs and its counterpart."""

    systems: tuple[str, ...]
    spellings: tuple[str, ...]
    fields: tuple[str, ...] = ()
    verb: str = ""
    value: str = ""
    note: str = ""
    not_needed: str = ""
    not_built: str = ""

    @property
    def name(self) -> str:
        """The spelling it is looked up by: the first long one."""
        return next((spelling for spelling in self.spellings if spelling.startswith("--")), self.spellings[0])


@dataclass(frozen=True, slots=True)
class Row:
    """One capability: who has it, where it is in Reconv and what shows it."""

    capability: str
    systems: tuple[str, ...]
    status: str
    why: str
    fields: tuple[str, ...]
    verbs: tuple[str, ...]
    recipes: tuple[str, ...]
    tests: tuple[str, ...]
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """The whole of docs/coverage.yaml."""

    systems: Mapping[str, str]
    plans: Mapping[str, str]
    sections: Mapping[str, tuple[Row, ...]]
    promises: tuple[Row, ...]
    hardware: tuple[Option, ...]

    def rows(self) -> Iterator[Row]:
        """Every row of the sections, then the promises."""
        for rows in self.sections.values():
            yield from rows
        yield from self.promises


class _Strict(yaml.SafeLoader):
    """A YAML reader that refuses a key given twice: the second would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for key, count in Counter(keys).items() if count > 1]
        if twice:
            raise TableError(f"line {node.start_mark.line + 1}: {twice} given twice")
        return super().construct_mapping(node, deep)


def read(path: Path) -> Table:
    """The table of a file, checked for its form."""
    tree = yaml.load(path.read_text(encoding="utf-8"), _Strict)
    systems, plans = tree["systems"], tree["plans"]
    return Table(
        systems=systems,
        plans=plans,
        sections={
            name: tuple(_row(entry, systems, plans) for entry in entries) for name, entries in tree["sections"].items()
        },
        promises=tuple(_row(entry, systems, plans) for entry in tree["promises"]),
        hardware=tuple(
            _option(key, {"not needed": why}, systems, plans, where="hardware") for key, why in tree["hardware"].items()
        ),
    )


def _row(entry: Mapping[str, Any], systems: Mapping[str, str], plans: Mapping[str, str]) -> Row:
    """One capability of the table."""
    name = entry.get("capability", "a row without a name")
    _refuse_unknown(entry, _ROW_KEYS, name)
    if entry.get("status") not in STATUSES:
        raise TableError(f"{name}: status is one of {', '.join(STATUSES)}, not {entry.get('status')!r}")
    owners = tuple(str(entry["systems"]).split())
    unknown = [owner for owner in owners if owner.rstrip("*") not in systems]
    if unknown:
        raise TableError(f"{name}: unknown systems {unknown}")
    why = entry.get("why", "")
    return Row(
        capability=name,
        systems=owners,
        status=entry["status"],
        why=plans.get(why, why),
        fields=tuple(entry.get("fields", ())),
        verbs=tuple(entry.get("verbs", ())),
        recipes=tuple(entry.get("recipes", ())),
        tests=tuple(entry.get("tests", ())),
        options=tuple(_option(key, value, systems, plans, name) for key, value in entry.get("options", {}).items()),
    )


def _option(
    key: str, value: Mapping[str, Any], systems: Mapping[str, str], plans: Mapping[str, str], where: str
) -> Option:
    """One option: the key holds the programs and the spellings, the value its counterpart."""
    _refuse_unknown(value, _OPTION_KEYS, f"{where}: {key}")
    words = key.split()
    owners = tuple(word for word in words if word in systems)
    spellings = tuple(word for word in words if word not in systems)
    answers = [bool(value.get("field") or value.get("verb")), "not needed" in value, "not built" in value]
    if not owners or not spellings or sum(answers) != 1:
        raise TableError(f"{where}: {key} needs systems, spellings and one answer, has {value}")
    fields = value.get("field", ())
    not_built = value.get("not built", "")
    return Option(
        systems=owners,
        spellings=spellings,
        fields=(fields,) if isinstance(fields, str) else tuple(fields),
        verb=value.get("verb", ""),
        value=str(value.get("value", "")),
        note=value.get("note", ""),
        not_needed=value.get("not needed", ""),
        not_built=plans.get(not_built, not_built),
    )


def _refuse_unknown(entry: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(entry) - known)
    if unknown:
        raise TableError(f"{where}: unknown keys {unknown}")


def render(table: Table) -> str:
    """The page as Markdown."""
    lines = [
        "# Coverage",
        "",
        "<!-- Made from coverage.yaml by docs/make_coverage.py; change that file and run the tool. -->",
        "",
        "Reconv replaces five reference programs. This page has every capability of theirs, where it is in Reconv and",
        "the test that shows it, or why it is not there. Coming from one of them? Look its options up below:",
        ", ".join(f"[{name}](#{_anchor(name)})" for name in table.systems.values()) + ".",
        "",
        *_summary(table),
        "",
        "Programs: " + "; ".join(f"**{key}** {name}" for key, name in table.systems.items()) + ". A star marks what is",
        "only in a later release of that program. `a.b` is a recipe field: write it in a recipe or give `--set a.b=v`.",
    ]
    for name, rows in table.sections.items():
        lines += ["", f"## {name}", "", *_section(rows)]
    lines += [
        "",
        "## Promises kept",
        "",
        "What a README of the old programs says and its program does not do. Reconv does what was said.",
        "",
        *_section(table.promises),
        "",
        "## Coming from",
        "",
        "Every option of the old programs with its counterpart, in alphabetical order. The state is that of the",
        "capability the option belongs to.",
    ]
    for key, name in table.systems.items():
        lines += ["", f"### {name}", "", *_index(table, key)]
    return "\n".join(lines) + "\n"


def _summary(table: Table) -> list[str]:
    """Counts per section and in all."""
    lines = ["| section | built | partly | not built |", "|---|---:|---:|---:|"]
    groups = {**table.sections, "Promises kept": table.promises}
    for name, rows in groups.items():
        lines.append(_counts(f"[{name}](#{_anchor(name)})", rows))
    lines.append(_counts("**all**", list(table.rows())))
    return lines


def _counts(label: str, rows: Sequence[Row]) -> str:
    counts = Counter(row.status for row in rows)
    return _line([label, *(str(counts[status]) for status in STATUSES)])


def _section(rows: Sequence[Row]) -> list[str]:
    """One table of capabilities."""
    lines = [_line(["capability", "programs", "state", "in Reconv", "shown by", "their options"]), "|---" * 6 + "|"]
    for row in rows:
        state = f"**{row.status}**" + (f": {row.why}" if row.why else "")
        where = [*(f"`{field}`" for field in row.fields), *(f"`reconv {verb}`" for verb in row.verbs)]
        where += [f"recipe `{recipe}`" for recipe in row.recipes]
        spellings = dict.fromkeys(f"`{option.name}`" for option in row.options)
        tests = [f"[{test.rpartition('::')[2]}](../{test.partition('::')[0]})" for test in row.tests]
        cells = [row.capability, " ".join(row.systems).replace("*", "\\*"), state]
        lines.append(_line([*cells, ", ".join(where), "<br>".join(tests), " ".join(spellings)]))
    return lines


def _index(table: Table, system: str) -> list[str]:
    """The options of one program in alphabetical order; one that means several things has a line for each."""
    found: dict[tuple[str, str, str, str], list[str]] = {}
    met: set[str] = set()

    def add(option: Option, state: str, capability: str) -> None:
        shown = " ".join(f"`{spelling}`" for spelling in option.spellings)
        order = option.name.lstrip("-").casefold()
        found.setdefault((order, shown, counterpart(option), state), []).append(capability)
        met.update(option.spellings)

    for row in table.rows():
        for option in row.options:
            if system in option.systems:
                add(
                    option,
                    "-" if option.not_needed else "not built" if option.not_built else row.status,
                    row.capability,
                )
    for option in table.hardware:
        if system in option.systems and not met & set(option.spellings):
            add(option, "-", "its own hardware")
    lines = ["| option | in Reconv | state | for |", "|---|---|---|---|"]
    for (_, shown, text, state), capabilities in sorted(found.items(), key=lambda item: item[0][:2]):
        lines.append(_line([shown, text, state, "; ".join(capabilities)]))
    return lines


def counterpart(option: Option) -> str:
    """What a user of the old option types or writes now, in words."""
    if option.not_needed:
        return f"not needed: {option.not_needed}"
    if option.not_built:
        return f"not built: {option.not_built}"
    ways = [f"`reconv {option.verb}`"] if option.verb else []
    if option.fields:
        ways.append(" and ".join(f"`{field}`" for field in option.fields))
    text = " or ".join(ways)
    if option.value:
        text += f", value `{option.value}`"
    return f"{text} ({option.note})" if option.note else text


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _anchor(heading: str) -> str:
    """The link GitHub gives a heading."""
    kept = "".join(letter for letter in heading.lower() if letter.isalnum() or letter in " -")
    return kept.replace(" ", "-")


def main(arguments: Sequence[str] | None = None, docs: Path = DOCS) -> int:
    """Write the page, or say whether it is current."""
    parser = argparse.ArgumentParser(description="Make docs/coverage.md from docs/coverage.yaml.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is not current")
    check = parser.parse_args(arguments).check
    page = docs / PAGE_NAME
    text = render(read(docs / TABLE_NAME))
    if not check:
        page.write_text(text, encoding="utf-8")
        return 0
    if page.is_file() and page.read_text(encoding="utf-8") == text:
        return 0
    print(f"{page} is not what {TABLE_NAME} says: run python docs/make_coverage.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
