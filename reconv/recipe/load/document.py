"""Read and write the YAML of recipes, with the line of every key.

The dialect has the booleans of YAML 1.2 (only true and false; `no`, `off` and `on` are text), `1e-4` is a number, and
dates, aliases, tags and duplicate keys are not allowed. `read(write(tree))` gives the tree back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path as FilePath
from typing import Any

import yaml

from reconv.core.errors import RecipeError
from reconv.storage import read_limits
from reconv.storage.bounded import read_text
from reconv.storage.files import system_error
from reconv.storage.transient import is_machine_fault

Path = tuple[str, ...]  # of keys, from the root

_MAX_DIGITS = 100  # of an integer; Python refuses to print one of many thousands
_SHELL_PIPES = ("/dev/fd/", "/proc/")
_TAG = "tag:yaml.org,2002:"
_SCALARS = (
    ("null", re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF")),
    ("int", re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"), list("-+0123456789")),
    (
        "float",
        re.compile(
            r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
        ),
        list("-+0123456789."),
    ),
)


@dataclass(frozen=True, slots=True)
class YamlProblem:
    """A problem at a line of a document, counted from 1."""

    line: int
    text: str


@dataclass(slots=True)
class Document:
    """A tree of plain values, the line of each key, and problems of the text."""

    tree: dict[str, Any] = field(default_factory=dict)
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[YamlProblem] = field(default_factory=list)
    broken: bool = False  # the text is not valid YAML; the tree is empty


class _Loader(yaml.SafeLoader):
    """Composes nodes only; values are made by `_value`, which knows just the tags of `_SCALARS`."""

    level = 0  # of the node that is being composed

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            text = "aliases (*name) are not allowed; write the value out, or share values of recipes with extends"
            raise yaml.composer.ComposerError(None, None, text, self.current_event.start_mark)
        self.level += 1
        if self.level > read_limits.NESTING:
            text = f"nested too deeply: more than {read_limits.NESTING} levels"
            raise yaml.composer.ComposerError(None, None, text, self.get_mark())
        node = super().compose_node(parent, index)
        self.level -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Writes plain scalars only where `_Loader` reads the same text back as a string."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _style(text: str) -> str | None:
    """Double quotes for control characters and unusual line ends, which PyYAML loses otherwise."""
    return None if text.isprintable() else '"'


_Loader.yaml_implicit_resolvers = {}
_Dumper.yaml_implicit_resolvers = {}
for _name, _pattern, _first in _SCALARS:
    _whole = re.compile(rf"^(?:{_pattern.pattern})\Z")
    _Loader.add_implicit_resolver(_TAG + _name, _whole, _first)
    _Dumper.add_implicit_resolver(_TAG + _name, _whole, _first)
_Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar(_TAG + "str", text, _style(text)))
_Dumper.add_representer(list, lambda dumper, items: dumper.represent_sequence(_TAG + "seq", items, flow_style=True))


def read_file(path: FilePath) -> str:
    """The text of a recipe file."""
    is_pipe = str(path).startswith(_SHELL_PIPES) and path.is_fifo()  # reconv train <(...)
    try:
        return (path.read_bytes() if is_pipe else read_text(path, read_limits.RECIPE_BYTES)).decode("utf-8-sig")
    except OSError as error:
        if is_machine_fault(error):
            raise system_error(error) from error
        raise RecipeError(f"cannot read the recipe: {error.strerror or error}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise RecipeError("the recipe is not UTF-8 text", where=str(path), hint="save it as UTF-8") from error


def read(text: str) -> Document:
    """The document in `text`; never raises on bad text, but lists its problems."""
    document = Document()
    if len(text) > read_limits.RECIPE_BYTES:
        long = f"it has {len(text):,} characters, more than {read_limits.RECIPE_BYTES:,}"
        return Document(problems=[YamlProblem(1, long)], broken=True)
    try:
        node = _compose(text)
        if isinstance(node, yaml.MappingNode):
            document.tree = _mapping(node, (), document)
            return document
        problem = None if node is None else YamlProblem(_line(node), "it must consist of `key: value` lines")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = YamlProblem(
            mark.line + 1 if mark else 1, f"not YAML: {_readable(error.problem or error.context or '')}"
        )
    except yaml.reader.ReaderError as error:
        problem = YamlProblem(text.count("\n", 0, error.position) + 1, f"not YAML: {error.reason}")
    except RecursionError:
        problem = YamlProblem(1, "nested too deeply")
    return Document(problems=[problem] if problem else [], broken=problem is not None)


def _readable(problem: str) -> str:
    """PyYAML's message in plain words."""
    if r"'\t'" in problem:
        return "a tab is not allowed here; indent with spaces"
    return problem.replace("'<stream end>'", "the end of the file")


@lru_cache(maxsize=128)  # a run reads the same recipe several times, at 20 ms each
def _compose(text: str) -> yaml.Node | None:
    """The root of the document; nodes are only read, so that they can be shared."""
    loader = _Loader(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
        return node
    finally:
        loader.dispose()


def read_value(text: str) -> Any:
    """The value of command-line text; text that is not YAML is returned unchanged."""
    document = read(f"value: {text}")
    return document.tree["value"] if not document.problems and list(document.tree) == ["value"] else text


def write(tree: Mapping[str, Any]) -> str:
    """The tree as YAML: sections in blocks, lists on one line, keys in the order given."""
    return str(yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _mapping(node: yaml.MappingNode, path: Path, document: Document) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "":
            document.problems.append(YamlProblem(_line(key_node), "a key must be text"))
            continue
        key = str(key_node.value)
        here = (*path, key)
        if key in result:
            text = f"{'.'.join(here)}: given twice (first on line {document.lines[here]})"
            document.problems.append(YamlProblem(_line(key_node), text))
            continue
        document.lines[here] = _line(key_node)
        result[key] = _value(value_node, here, document)
    return result


def _value(node: yaml.Node, path: Path, document: Document) -> Any:
    kind = node.tag.removeprefix(_TAG)
    if isinstance(node, yaml.MappingNode) and kind == "map":
        return _mapping(node, path, document)
    if isinstance(node, yaml.SequenceNode) and kind == "seq":
        return [_value(item, (*path, str(i)), document) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode) and kind in _MAKERS:
        try:
            return _MAKERS[kind](node.value)
        except (ValueError, KeyError):
            text = f"{'.'.join(path)}: cannot be read as {kind}: {node.value[:40]}"
    else:
        text = f"{'.'.join(path)}: tags ({node.tag}) are not allowed"
    document.problems.append(YamlProblem(_line(node), text))
    return None


def _int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError
    return int(text, 0 if text[:2] in ("0x", "0o") else 10)


def _float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


_MAKERS: Mapping[str, Callable[[str], Any]] = {
    "str": str,
    "null": lambda _: None,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "int": _int,
    "float": _float,
}
