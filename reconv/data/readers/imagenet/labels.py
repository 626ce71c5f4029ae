"""Labels of ImageNet's validation images, from a list or the development kit (devkit).

n01751748                                 one line per image, in the order of the file names
ILSVRC2012_val_00000001.JPEG n01751748    one line per image, in any order
ILSVRC2012_val_00000001.JPEG 65           the class index from 0, in the order of the synset names
ILSVRC2012_val_00000001,n01751748 10 ...  LOC_val_solution.csv: the synset, then a box
490                                       the devkit's class number from 1, translated by its mapping
"""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import io
import re
import tarfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from reconv.core.errors import DataError, UsageError
from reconv.storage import read_limits
from reconv.storage.local import ReadStream, read, read_bounded_text

DEVKIT_FOLDER = "ILSVRC2012_devkit_t12"
TRUTH_FILE = "ILSVRC2012_validation_ground_truth.txt"
LIST_FILES = (
    "imagenet_2012_validation_synset_labels.txt",
    "synset_labels.txt",
    "val.txt",
)
SOLUTION_FILE = "LOC_val_solution.csv"
MAPPING_FILES = ("synsets.txt", "meta.mat")
_MAX_DIGITS = 9  # of a class number
_VAL_NUMBER = re.compile(r"_val_(\d{8})\.")

_NO_LIST = f"it has none of {', '.join(LIST_FILES)}, {SOLUTION_FILE}, {TRUTH_FILE} and {DEVKIT_FOLDER}.tar.gz"

ReadFile = Callable[[str], "bytes | None"]


def has_labels(folder: Path) -> bool:
    """True if a folder holds a list of labels, or a devkit."""
    try:
        _find_list(folder)
    except DataError as error:
        return error.why != _NO_LIST
    return True


def validation_synsets(
    labels: Path, files: Sequence[str], class_names: Sequence[str], is_partial: bool = False
) -> dict[str, str]:
    """The class name (synset) of each validation file; `labels` is a list, or a folder or devkit that has one.

    With `is_partial`, there may be labels of files that are not there.
    """
    where, text, mapping = _find_list(labels)
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if len(lines) != len(files) and is_partial:
        lines = _lines_of(files, lines)
    if len(lines) != len(files):
        raise _labels_error(where, f"{len(lines):,} labels for {len(files):,} validation images")
    known = set(class_names)
    synsets: dict[str, str] = {}
    for number, words in enumerate(lines):
        has_file = len(words) > 1
        file = PurePosixPath(words[0]).name if has_file else files[number]
        synsets[file] = _synset_of(
            words[-1] if not has_file else words[1], has_file, class_names, mapping, where, number + 1
        )
        if synsets[file] not in known:
            raise _labels_error(where, f"line {number + 1}: {synsets[file]} is not a class of training")
    unlabeled = sorted(set(files) - set(synsets))
    if unlabeled:
        raise _labels_error(where, f"no label for {unlabeled[0]} ({len(unlabeled):,} such images)")
    return synsets


def _lines_of(files: Sequence[str], lines: list[list[str]]) -> list[list[str]]:
    """The lines of some of the files: by the names in the lines, else by the numbers in the names of the files."""
    if all(len(words) > 1 for words in lines):
        wanted = set(files)
        return [words for words in lines if PurePosixPath(words[0]).name in wanted]
    numbers = [int(match[1]) for file in files if (match := _VAL_NUMBER.search(file))]
    if len(numbers) < len(files) or not 0 < min(numbers) <= max(numbers) <= len(lines):
        return lines
    return [lines[number - 1] for number in numbers]


def _solution_lines(text: str) -> str:
    """The lines of LOC_val_solution.csv as file and synset."""
    rows = [line.replace(",", " ").split()[:2] for line in text.splitlines()[1:] if line.strip()]
    return "\n".join(f"{words[0]}.JPEG {' '.join(words[1:])}" for words in rows)


def _synset_of(
    word: str, has_file: bool, class_names: Sequence[str], mapping: dict[int, str], where: str, line: int
) -> str:
    if not word.isdecimal():
        return word
    if len(word) > _MAX_DIGITS:
        raise _labels_error(where, f"line {line}: a class number of {len(word):,} digits")
    number = int(word)
    if has_file:
        if number >= len(class_names):
            raise _labels_error(where, f"line {line}: class {number} is not one of 0 to {len(class_names) - 1}")
        return class_names[number]
    if not mapping:
        raise _labels_error(
            where,
            f"line {line}: {word} is a class number of the devkit, but meta.mat or synsets.txt is missing",
        )
    if number not in mapping:
        raise _labels_error(where, f"line {line}: the devkit's mapping has no class {word}")
    return mapping[number]


def _find_list(labels: Path) -> tuple[str, str, dict[int, str]]:
    """Path and text of the list, and the devkit's mapping from numbers to synsets if there is one."""
    if labels.name == SOLUTION_FILE:
        return str(labels), _solution_lines(_text(read_bounded_text(labels, read_limits.TABLE_BYTES), labels)), {}
    if labels.is_file() and not labels.name.endswith((".tar", ".tar.gz", ".tgz")):
        text = _text(read_bounded_text(labels, read_limits.TABLE_BYTES), labels)
        return str(labels), text, _devkit_mapping(_reader_of_folder(labels.parent))
    if labels.is_file():
        return _find_in_devkit(str(labels), _reader_of_archive(labels))
    for name in LIST_FILES:
        if (labels / name).is_file():
            return (
                str(labels / name),
                _text(read_bounded_text(labels / name, read_limits.TABLE_BYTES), labels / name),
                {},
            )
    if (labels / SOLUTION_FILE).is_file():
        return _find_list(labels / SOLUTION_FILE)
    for folder in (labels, labels / "data", labels / DEVKIT_FOLDER / "data"):
        if (folder / TRUTH_FILE).is_file():
            return _find_in_devkit(str(folder), _reader_of_folder(folder))
    for ending in (".tar.gz", ".tgz", ".tar"):
        if (kit := labels / f"{DEVKIT_FOLDER}{ending}").is_file():
            return _find_in_devkit(str(kit), _reader_of_archive(kit))
    raise _labels_error(str(labels), _NO_LIST)


def _find_in_devkit(where: str, read_file: ReadFile) -> tuple[str, str, dict[int, str]]:
    truth = read_file(TRUTH_FILE)
    if truth is None:
        raise _labels_error(where, f"it has no {TRUTH_FILE}")
    return f"{where}: {TRUTH_FILE}", _text(truth, Path(where)), _devkit_mapping(read_file)


def _reader_of_folder(folder: Path) -> ReadFile:
    return lambda name: read(folder / name) if (folder / name).is_file() else None


def _reader_of_archive(archive: Path) -> ReadFile:
    wanted = {TRUTH_FILE, *MAPPING_FILES}
    contents: dict[str, bytes] = {}
    try:
        for member, file in _unpacked(archive, wanted):
            contents[member] = file
    except (OSError, EOFError, ValueError, OverflowError, RecursionError, zlib.error, tarfile.TarError) as error:
        raise _labels_error(str(archive), f"cannot unpack it: {error}") from error
    return contents.get


def _unpacked(archive: Path, wanted: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """The wanted files of an archive, of which no more than `read_limits.DEVKIT_BYTES` are unpacked."""
    raw = ReadStream(archive)
    is_gzip = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    content = _inflate(raw) if is_gzip else raw.read(read_limits.DEVKIT_BYTES)
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
        for member in tar:
            name = PurePosixPath(member.name).name
            if name in wanted and member.isfile() and (file := tar.extractfile(member)) is not None:
                yield name, file.read()


def _inflate(raw: ReadStream) -> bytes:
    with gzip.GzipFile(fileobj=raw) as file:
        content = file.read(read_limits.DEVKIT_BYTES + 1)
    if len(content) > read_limits.DEVKIT_BYTES:
        raise ValueError(f"unpacked it has more than {read_limits.DEVKIT_BYTES:,} bytes")
    return content


def _devkit_mapping(read_file: ReadFile) -> dict[int, str]:
    """Synsets by the devkit's numbers: from synsets.txt (`1 n02119789`, or line 1 is number 1), else from meta.mat."""
    text = read_file("synsets.txt")
    if text is not None:
        lines = [line.split() for line in _text(text, Path("synsets.txt")).splitlines() if line.strip()]
        if all(words[0].isdecimal() and len(words[0]) <= _MAX_DIGITS and len(words) > 1 for words in lines):
            return {int(words[0]): words[1] for words in lines}
        return {number: words[0] for number, words in enumerate(lines, 1)}
    meta = read_file("meta.mat")
    if meta is None:
        return {}
    return _read_meta_mat(meta)


def _read_meta_mat(content: bytes) -> dict[int, str]:
    if importlib.util.find_spec("scipy") is None:
        raise UsageError(
            "cannot read the devkit's meta.mat",
            why="the package scipy is not installed",
            hint="pip install 'reconv[imagenet]', or write synsets.txt beside it (lines such as `1 n02119789`)",
        )
    scipy_io = importlib.import_module("scipy.io")
    try:
        synsets = scipy_io.loadmat(io.BytesIO(content), variable_names=["synsets"], squeeze_me=True)["synsets"]
        numbers, names = np.atleast_1d(synsets["ILSVRC2012_ID"]), np.atleast_1d(synsets["WNID"])
        return {int(number): str(name) for number, name in zip(numbers, names, strict=True)}
    except Exception as error:  # scipy may raise anything for a damaged file
        why = f"{type(error).__name__}: {error}; synsets.txt beside it is used instead (lines such as `1 n02119789`)"
        raise _labels_error("meta.mat", why) from error


def _text(data: bytes, where: Path) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _labels_error(str(where), "it is not UTF-8 text") from error


def _labels_error(where: str, why: str) -> DataError:
    return DataError(
        "cannot read the labels of the validation images",
        where=where,
        why=why,
        hint=f"--labels FILE with one synset per line, or --labels {DEVKIT_FOLDER}.tar.gz",
    )
