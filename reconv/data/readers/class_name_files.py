"""Names for people, from a file beside the data, where class folders or labels are ids.

JSON files hold {"n01440764": "tench"}, {"0": "rose"}, {"0": ["n01440764", "tench"]} or ["rose", "tulip"]; text files a
name per line in the order of the classes, or a class or index and its name per line.

The order of the classes is that of the dataset: sorted folder names. The names change what people see, never the order,
the fingerprint of the data or the names that classes are matched by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reconv.core.errors import DataError
from reconv.data.dataset import BACKGROUND, name_problem
from reconv.data.readers.imagenet.classes import with_imagenet_names
from reconv.storage import read_limits
from reconv.storage.bounded import parse_shallow_json
from reconv.storage.local import read_bounded_text

FILES = (
    "class_names.json",
    "classes.json",
    "class_names.txt",
    "classes.txt",
    "labels.txt",
    "names.txt",
    "LOC_synset_mapping.txt",
)
_SEPARATORS = ("\t", ",", ":", ";", " ")


def display_names(folder: Path | None, class_names: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """A name for people for each class, and a sentence on where it comes from; empty if the names are as they were."""
    classes = tuple(name for name in class_names if name != BACKGROUND)
    background = tuple(class_names[: len(class_names) - len(classes)])
    notes = []
    for file in [folder / name for name in FILES if (folder / name).is_file()] if folder is not None else []:
        try:
            names = _read_names(file, classes)
        except (ValueError, DataError) as error:
            why = error.why if isinstance(error, DataError) else error
            notes.append(f"{file.name} is not used for class names: {why}")
            continue
        if names != classes:
            return (*background, *names), f"class names from {file.name}"
    return (*background, *with_imagenet_names(classes)), "; ".join(notes)


def _read_names(file: Path, classes: tuple[str, ...]) -> tuple[str, ...]:
    """The names in a file; raises ValueError with the reason if it does not fit the classes."""
    text = read_bounded_text(file, read_limits.NAMES_BYTES).decode("utf-8-sig", "replace")
    content = parse_shallow_json(text) if file.suffix == ".json" else _parse_lines(text, classes)
    if isinstance(content, list):
        if set(map(str, content)) == set(classes):
            return classes
        if len(content) != len(classes):
            raise ValueError(f"{len(content):,} names for {len(classes):,} classes")
        if known := set(map(str, content)) & set(classes):
            raise ValueError(f"{len(known):,} of its names are classes, the others are not")
        return _checked(tuple(map(str, content)))
    if not isinstance(content, dict):
        raise ValueError("it is neither a list nor a mapping")
    return _checked(_by_key({str(key): value for key, value in content.items()}, classes))


def _parse_lines(text: str, classes: tuple[str, ...]) -> list[str] | dict[str, str]:
    """A mapping if every line starts with a class or an index, else the list of lines."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    known = set(classes)
    for keys in (known, {str(number) for number in range(len(lines))}):
        pairs = [_split_key(line, keys) for line in lines]
        if pairs and all(pairs):
            return dict(pair for pair in pairs if pair is not None)
    return lines


def _split_key(line: str, keys: set[str]) -> tuple[str, str] | None:
    """The key that a line begins with, and the rest."""
    for separator in _SEPARATORS:
        key, found, rest = line.partition(separator)
        if found and key.strip() in keys and rest.strip():
            return key.strip(), rest.strip()
    return None


def _by_key(content: dict[str, Any], classes: tuple[str, ...]) -> tuple[str, ...]:
    names = {key: str(value[-1] if isinstance(value, list) and value else value) for key, value in content.items()}
    if set(names) & set(classes):
        return tuple(names.get(name, name) for name in classes)
    ids = {str(v[0]): names[k] for k, v in content.items() if isinstance(v, list) and len(v) == 2}
    if ids and set(classes) <= set(ids):
        return tuple(ids[name] for name in classes)
    if set(names) == {str(number) for number in range(len(classes))}:
        return tuple(names[str(number)] for number in range(len(classes)))
    raise ValueError(f"its keys are neither classes nor the numbers 0 to {len(classes) - 1}")


def _checked(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if (problem := name_problem(name)) is not None:
            raise ValueError(problem)
    if len(set(names)) < len(names):
        [(repeated, _)] = Counter(names).most_common(1)
        raise ValueError(f"{repeated!r} occurs twice")
    return names
