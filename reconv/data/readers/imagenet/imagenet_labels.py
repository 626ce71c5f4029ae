"""What the ImageNet validation images show: a list of labels, or the development kit.

Owns the forms such lists are found in. Refuses to know archives and pixels. Invariant: every image gets a class that
training has, by name, or an error says which line is wrong; a bare number is never guessed at.

    n01751748                                 a line an image, in the order of the file names
    ILSVRC2012_val_00000001.JPEG n01751748    a line an image, in any order
    ILSVRC2012_val_00000001.JPEG 65           the number of the class, from 0, in the order of the synset names
    490                                       the kit's own numbers (from 1), which its mapping translates
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from reconv.data.readers.matlab import MatlabError, struct_columns
from reconv.data.storage.local import Stream, read
from reconv.errors import DataError

KIT_FOLDER = "ILSVRC2012_devkit_t12"
TRUTH_FILE = "ILSVRC2012_validation_ground_truth.txt"
LIST_FILES = (
    "imagenet_2012_validation_synset_labels.txt",
    "synset_labels.txt",
    "val.txt",
)
MAPPING_FILES = ("synsets.txt", "meta.mat")

ReadFile = Callable[[str], "bytes | None"]


def validation_synsets(labels: Path, files: Sequence[str], class_names: Sequence[str]) -> dict[str, str]:
    """The class name of each validation file; `labels` is a list, or a folder or kit with one in it."""
    where, text, mapping = _find(labels)
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if len(lines) != len(files):
        raise _wrong(where, f"{len(lines):,} labels for {len(files):,} validation images")
    known = set(class_names)
    answers: dict[str, str] = {}
    for number, words in enumerate(lines):
        named = len(words) > 1
        file = PurePosixPath(words[0]).name if named else files[number]
        answers[file] = _synset(words[-1] if not named else words[1], named, class_names, mapping, where, number + 1)
        if answers[file] not in known:
            raise _wrong(where, f"line {number + 1}: {answers[file]} is no class of the training archive")
    unlabelled = sorted(set(files) - set(answers))
    if unlabelled:
        raise _wrong(where, f"no label for {unlabelled[0]} ({len(unlabelled):,} such images)")
    return answers


def _synset(word: str, named: bool, class_names: Sequence[str], mapping: dict[int, str], where: str, line: int) -> str:
    if not word.isdecimal():
        return word
    number = int(word)
    if named:
        if number >= len(class_names):
            raise _wrong(where, f"line {line}: class {number}, but there are {len(class_names)}, counted from 0")
        return class_names[number]
    if not mapping:
        raise _wrong(where, f"line {line}: {word} is a number of the development kit, and its mapping is not there")
    if number not in mapping:
        raise _wrong(where, f"line {line}: the mapping has no number {word}")
    return mapping[number]


def _find(labels: Path) -> tuple[str, str, dict[int, str]]:
    """Where the list is, its text, and the kit's numbers if a mapping lies beside it."""
    if labels.is_file() and not labels.name.endswith((".tar", ".tar.gz", ".tgz")):
        return str(labels), _text(read(labels), labels), _mapping(_beside(labels.parent))
    if labels.is_file():
        return _in_kit(str(labels), _inside(labels))
    for name in LIST_FILES:
        if (labels / name).is_file():
            return str(labels / name), _text(read(labels / name), labels / name), {}
    for folder in (labels, labels / "data", labels / KIT_FOLDER / "data"):
        if (folder / TRUTH_FILE).is_file():
            return _in_kit(str(folder), _beside(folder))
    for ending in (".tar.gz", ".tgz", ".tar"):
        if (kit := labels / f"{KIT_FOLDER}{ending}").is_file():
            return _in_kit(str(kit), _inside(kit))
    raise _wrong(str(labels), f"none of {', '.join(LIST_FILES)}, {TRUTH_FILE} or {KIT_FOLDER}.tar.gz is there")


def _in_kit(where: str, read_file: ReadFile) -> tuple[str, str, dict[int, str]]:
    truth = read_file(TRUTH_FILE)
    if truth is None:
        raise _wrong(where, f"there is no {TRUTH_FILE} in it")
    return f"{where}: {TRUTH_FILE}", _text(truth, Path(where)), _mapping(read_file)


def _beside(folder: Path) -> ReadFile:
    return lambda name: read(folder / name) if (folder / name).is_file() else None


def _inside(archive: Path) -> ReadFile:
    wanted = {TRUTH_FILE, *MAPPING_FILES}
    held: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=Stream(archive)) as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                if name in wanted and (file := tar.extractfile(member)) is not None:
                    held[name] = file.read()
    except (OSError, EOFError, tarfile.TarError) as error:
        raise _wrong(str(archive), f"it does not unpack: {error}") from error
    return held.get


def _mapping(read_file: ReadFile) -> dict[int, str]:
    """The kit's numbers: from synsets.txt (`1 n02119789`, or line 1 is number 1), else from the kit's meta.mat."""
    text = read_file("synsets.txt")
    if text is not None:
        lines = [line.split() for line in _text(text, Path("synsets.txt")).splitlines() if line.strip()]
        if all(words[0].isdecimal() and len(words) > 1 for words in lines):
            return {int(words[0]): words[1] for words in lines}
        return {number: words[0] for number, words in enumerate(lines, 1)}
    meta = read_file("meta.mat")
    if meta is None:
        return {}
    try:
        columns = struct_columns(meta, "synsets", ("ILSVRC2012_ID", "WNID"))
    except MatlabError as error:
        raise _wrong("meta.mat", f"{error}; synsets.txt beside it would do (lines like `1 n02119789`)") from error
    return {int(number): str(name) for number, name in zip(*columns, strict=True)}


def _text(data: bytes, where: Path) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _wrong(str(where), "it is no text") from error


def _wrong(where: str, why: str) -> DataError:
    return DataError(
        "the validation images have no usable labels",
        where=where,
        why=why,
        then=f"--labels FILE with a synset a line, or --labels {KIT_FOLDER}.tar.gz",
    )
