"""The flags of other programs, read from the TOML files in `tables/`: a line for each flag.

    "-b --batch-size" = { type = "int", default = 256, positive = true }

The key has the flag's names. `type` is one of TYPES (text without), `switch = true` a flag without a value, `arity` a
number of values or "+", "*" or "?" as in argparse. What becomes of a flag is said by `sets` (a field of the recipe,
with `convert` to a duration), `run` (an option of the new command), `none` (why it has no effect here), `missing` (what
to do instead) or, without any of them, by the code of the program. `example` and `beside` make a command for the
documentation: values, and words without which the flag means nothing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from reconv.migrate.flags import Flag, any_text_is_true, text_bool, yes_no

TABLES = Path(__file__).parent / "tables"


def step_range(text: str) -> tuple[int, int]:
    """`5,8` as the first and last step."""
    words = text.split(",")
    if len(words) != 2 or not all(word.strip().isdigit() for word in words):
        raise ValueError("two steps are needed, as in 5,8")
    return int(words[0]), int(words[1])


def yaml_file(text: str) -> str:
    """The name of a YAML file."""
    if not text.endswith((".yaml", ".yml")):
        raise ValueError("a YAML file is needed")
    return text


def optimiser(text: str) -> str:
    """The name of an optimizer as Graphcore's program has it; its documentation writes RMSProp, too."""
    return next((name for name in ("SGD", "RMSprop", "momentum", "LARS") if name.lower() == text.lower()), text)


def epochs(number: float) -> str:
    """A number of epochs as a duration."""
    return f"{number:.10g}ep"


def steps(number: int) -> str:
    """A number of steps as a duration."""
    return f"{number}step"


TYPES: Mapping[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "lower": str.lower,
    "upper": str.upper,
    "text_bool": text_bool,
    "yes_no": yes_no,
    "any_text": any_text_is_true,
    "range": step_range,
    "yaml_file": yaml_file,
    "optimiser": optimiser,
}
_CONVERTERS: Mapping[str, Callable[[Any], Any]] = {"epochs": epochs, "steps": steps}
_TEXTS = ("sets", "run", "none", "missing", "positive", "changes_result")


def read_flags(file: str, *tables: str) -> tuple[Flag, ...]:
    """The flags of some tables of a file; a later one replaces an earlier one of the same name."""
    content = _read(file)
    by_key = {flag.key: flag for table in tables for flag in content[table]}
    return tuple(by_key.values())


@cache
def _read(file: str) -> Mapping[str, tuple[Flag, ...]]:
    content = tomllib.loads((TABLES / f"{file}.toml").read_text(encoding="utf-8"))
    return {name: tuple(_flag(names, row) for names, row in table.items()) for name, table in content.items()}


def _flag(names: str, row: Mapping[str, Any]) -> Flag:
    is_switch = row.get("switch", False)
    return Flag(
        tuple(names.split()),
        bool if is_switch else TYPES[row.get("type", "str")],
        row.get("default", False if is_switch else None),
        0 if is_switch else row.get("arity", 1),
        row.get("const", True),
        tuple(row.get("choices", ())),
        convert=_CONVERTERS[row["convert"]] if "convert" in row else None,
        example=tuple(row.get("example", ())),
        beside=tuple(row.get("beside", ())),
        **{key: row[key] for key in _TEXTS if key in row},
    )
