"""The coverage page: every flag of the programs that can be migrated, as `reconv migrate` translates it."""

from __future__ import annotations

import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from page_parts import code, escaped, table

from reconv.migrate.environment_variables import KNOWN
from reconv.migrate.flag_reference import FlagOutcome, documented_flags, outcome
from reconv.migrate.launchers import LAUNCHERS
from reconv.migrate.programs import PROGRAMS
from reconv.migrate.programs.base import Program

CAPABILITIES = Path(__file__).parent / "capabilities.toml"
# Programs whose flags are those of another one, started in another way.
SAME_FLAGS = {
    "nvidia-launch": "nvidia-convnets",
    "nvidia-quantized": "nvidia-convnets",
    "habana-demo": "habana",
    "habana-googlenet-demo": "habana-googlenet",
    "graphcore-validation": "graphcore",
    "graphcore-inference": "graphcore",
}
_NAMED = re.compile(r"(?<![\w/])((?:reconv (?:[a-z]+ )*(?:--)?[a-z-]+)|[a-z_]+(?:\.[a-z_]+)+=?\w*)(?![\w/])")
SHORT_NAMES = {"nvidia": "NV", "nvidia-convnets": "NV", "habana": "PT", "habana-googlenet": "PT", "graphcore": "GC"}
SHORT_NAMES |= {"habana-resnext": "RNX", "habana-ssd": "SSD", "torchvision": "torchvision", "timm": "timm"}
INTRODUCTION = """\
# Coverage

Every flag of the programs whose commands `reconv migrate` translates, and what becomes of it. This page is made by
migrating a command with each flag: what it says is what `migrate` does. Search it for a flag, or let `migrate` read the
whole command line.

Of {total} flags of {programs} programs {same} have the same name here, {renamed} another one, {derived} follow together
with others, {none} have no effect that is needed here, and **{missing} are not supported**. Of {capabilities} further
capabilities, which are no flags, {partly} are there in part.

`a.b` is a recipe field: write it in a recipe, or type `--set a.b=VALUE`. Flags that only configure a vendor's hardware
have no effect, and the row says why.
"""


@cache
def outcomes() -> Mapping[str, Sequence[FlagOutcome]]:
    """The translation of each program's flags, by its name; flags that two programs share are listed once."""
    found: dict[str, Sequence[FlagOutcome]] = {}
    for program in PROGRAMS:
        base = next((other for other in PROGRAMS if other.name == SAME_FLAGS.get(program.name)), None)
        shared = {flag.names for flag in base.flags} if base is not None else set()
        found[program.name] = [outcome(program, flag) for flag in documented_flags(program) if flag.names not in shared]
    return found


def vendor_options() -> dict[str, list[str]]:
    """For each recipe field, the flags of other programs that set it, as in NV `--lr`."""
    found: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for name, short in SHORT_NAMES.items():
        for item in outcomes()[name]:
            for field in item.fields:
                owners = found[field].setdefault(" ".join(code(alias) for alias in item.flag.names), [])
                owners += [] if short in owners else [short]
    return {
        field: [f"{' '.join(owners)} {spellings}" for spellings, owners in by_flag.items()]
        for field, by_flag in found.items()
    }


def capabilities() -> list[dict[str, str]]:
    rows: list[dict[str, str]] = tomllib.loads(CAPABILITIES.read_text(encoding="utf-8"))["capability"]
    return rows


def render() -> str:
    """The page."""
    items = [item for rows in outcomes().values() for item in rows]
    counts = Counter(item.status for item in items)
    rows = capabilities()
    parts = [
        INTRODUCTION.format(
            total=f"{len(items):,}",
            programs=len(PROGRAMS),
            same=counts["same"],
            renamed=counts["renamed"],
            derived=counts["derived"],
            none=counts["no effect"],
            missing=counts["not supported"],
            capabilities=len(rows),
            partly=sum("partly" in row or "missing" in row for row in rows),
        ),
        "## Not supported\n",
        table(("program", "flag", "instead"), list(_missing())),
    ]
    for program in PROGRAMS:
        flags = [item for item in outcomes()[program.name] if item.status != "not supported"]
        parts += [f"## {program.title}\n", _note(program), _flag_table(flags)]
    parts += ["## Launchers\n", table(("launcher", "flag", "here"), list(_launcher_rows()))]
    parts += [
        "## Environment variables\n",
        table(("variable", "here"), [(_names(p), escaped(text)) for p, text in KNOWN]),
    ]
    parts += [
        "## Capabilities that are no flags\n",
        table(("capability", "programs", "here"), list(map(_capability, rows))),
    ]
    return "\n".join(part for part in parts if part)


def _missing() -> Iterator[tuple[str, str, str]]:
    for name, rows in outcomes().items():
        for item in rows:
            if item.status == "not supported":
                yield f"`{name}`", code(item.typed), escaped(item.text)


def _note(program: Program) -> str:
    base = SAME_FLAGS.get(program.name)
    also = f" Its other flags are those of `{base}`, above." if base else ""
    return f"`--program {program.name}` names it.{also}\n"


def _flag_table(items: Sequence[FlagOutcome]) -> str:
    if not items:
        return "It has no other flags.\n"
    rows = [
        (" ".join(code(name) for name in item.flag.names), item.status, f"{code(item.typed)}: {escaped(item.text)}")
        for item in items
    ]
    return table(("flag", "becomes", "for example"), rows)


def _launcher_rows() -> Iterator[tuple[str, str, str]]:
    for name, launcher in LAUNCHERS.items():
        if name in ("mpiexec", "orterun", "prun"):
            continue  # the same as mpirun
        for flag in launcher.flags:
            here = flag.none or "counts processes or hosts: the global batch follows"
            yield code(name), " ".join(map(code, flag.names)), escaped(here)


def _names(pattern: str) -> str:
    """A pattern of variables as people write it: `HCCL_*`."""
    return ", ".join(code(name.replace(r"\w+", "*").replace(r"\w*", "*")) for name in pattern.split("|"))


def _capability(row: Mapping[str, str]) -> tuple[str, str, str]:
    texts = [_with_code(row["here"])] if "here" in row else []
    texts += [f"**{key}**: {_with_code(row[key])}" for key in ("partly", "missing", "proof") if key in row]
    return escaped(row["name"]), escaped(row["programs"]), "<br>".join(texts)


def _with_code(text: str) -> str:
    """Text with fields and commands as code."""
    return escaped(
        re.sub(r"(?<![\w/])((?:reconv (?:[a-z]+ )*(?:--)?[a-z-]+)|[a-z_]+(?:\.[a-z_]+)+=?\w*)(?![\w/])", r"`\1`", text)
    )
