"""Open a dataset for inspection: what training would refuse is reported as an issue, and the rest is readable.

Nothing is written. Detection datasets opened here hold every box of the files, including unusable ones.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from reconv.core.custom_code import anchor
from reconv.core.errors import DataError
from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.boxes.table import BAD_BOX_KINDS, PROBLEMS, BoxTable, describe_boxes, find_bad_boxes
from reconv.data.dataset import Dataset, Sample, Split
from reconv.data.file_list import is_image_name
from reconv.data.readers.csv_table import has_several_labels
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.detect import DetectedDataset, detect
from reconv.data.readers.detection.box_table_dataset import BoxTableDataset
from reconv.data.readers.detection.box_tfrecord import BoxTFRecordDataset, read_box_records, records_have_boxes
from reconv.data.readers.detection.coco import read_coco
from reconv.data.readers.detection.voc import read_voc
from reconv.data.readers.detection.yolo import read_yolo
from reconv.data.readers.folder import (
    FolderDataset,
    SplitPlace,
    has_class_folders,
    is_broken_link,
    is_empty_folder,
    is_own_output,
    is_unsorted,
    locate_split,
    split_folder,
)
from reconv.data.readers.shards.memory_map import GroupedDataError
from reconv.data.readers.validation_split import ValidationSplit
from reconv.recipe.parts.code import names_code
from reconv.recipe.parts.data import NEED_NO_PATH, DataConfig
from reconv.storage.local import is_folder, is_regular_file, read

SPLITS: tuple[Split, ...] = ("train", "val")

ReadSplit = Callable[[Path, Split, DataConfig], BoxTable]
_BOX_READERS: dict[str, ReadSplit] = {"coco": read_coco, "voc": read_voc, "yolo": read_yolo}
_MAX_NAMED = 1000  # boxes or images that are named; all are counted


@dataclass(frozen=True, slots=True)
class DataIssue:
    """Something wrong with a dataset; an error is what would stop or mislead training."""

    level: Literal["error", "warning"]
    kind: str
    text: str
    paths: tuple[str, ...] = ()
    count: int = 0  # 0: as many as there are paths

    @property
    def total(self) -> int:
        return self.count or len(self.paths)


D = TypeVar("D", bound=Dataset)
Report = Callable[[DataIssue], None]


def printable(name: str) -> str:
    """A file name as text, with bytes that are not UTF-8 escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def open_leniently(path: str, data: DataConfig, report: Report) -> dict[Split, Dataset]:
    """The readable splits at `path`: a folder, the name of a dataset in the package or an import path; reports their
    issues."""
    if path in NEED_NO_PATH and not Path(path).exists():
        return {split: open_dataset(path, None, split, data) for split in SPLITS}
    if names_code(path) and not Path(path).exists():
        source, folder = anchor(path, Path()), os.environ.get("DATA_DIR")
        return {split: open_dataset(source, Path(folder) if folder else None, split, data) for split in SPLITS}
    detected = detect(Path(path), data.source)
    if (read_split := find_box_reader(detected)) is not None:
        return dict(_open_with_boxes(detected, read_split, data, report))
    if detected.kind == "folder":
        return _open_folder(detected.path, data, report)
    multilabel = detected.kind == "csv" and has_several_labels(detected.path)
    return _open_readable(
        lambda split: open_dataset(data.source, Path(path), split, data, multilabel=multilabel), report
    )


def find_box_reader(detected: DetectedDataset) -> ReadSplit | None:
    """The function that reads the boxes of a dataset; None if it has no boxes."""
    if detected.kind == "tfrecord" and records_have_boxes(detected.path):
        return read_box_records
    return _BOX_READERS.get(detected.kind)


def _open_readable(open_split: Callable[[Split], D], report: Report) -> dict[Split, D]:
    """The splits that open; the errors of the others are reported, or raised if none opens."""
    opened: dict[Split, D] = {}
    refused: list[DataError] = []
    for split in SPLITS:
        try:
            opened[split] = open_split(split)
        except DataError as error:
            refused.append(error)
    if not opened:
        raise refused[0]
    for refusal in refused:
        errors = refusal.errors if isinstance(refusal, GroupedDataError) else (refusal,)
        for text in dict.fromkeys(f"{error.what}: {error.why}" for error in errors):
            places = tuple(printable(error.where) for error in errors if f"{error.what}: {error.why}" == text)
            report(DataIssue("error", "unreadable-split", text, places))
    return opened | _open_test(open_split, opened)


def _open_test(open_split: Callable[[Split], D], opened: Mapping[Split, D]) -> dict[Split, D]:
    """The test split, if there is one that is not already used for validation."""
    try:
        test = open_split("test")
    except DataError:
        return {}
    return {} if "val" in opened and test.fingerprint() == opened["val"].fingerprint() else {"test": test}


def _open_with_boxes(
    detected: DetectedDataset, read_split: ReadSplit, data: DataConfig, report: Report
) -> dict[Split, DetectionDataset]:
    tables: dict[Split, BoxTable] = {}

    def open_split(split: Split) -> DetectionDataset:
        table = read_split(detected.path, split, data)
        dataset = _detection_dataset(detected, split, table)
        tables[split] = table
        return dataset

    opened = _open_readable(open_split, report)
    for split, table in tables.items():
        for issue in _box_issues(split, table):
            report(issue)
    if "train" in tables:
        seen = np.unique(tables["train"].labels)
        unseen = tuple(name for label, name in enumerate(tables["train"].class_names) if label not in seen)
        if unseen:
            report(DataIssue("warning", "never-trained", "classes without a box in training", unseen))
    return opened


def _detection_dataset(detected: DetectedDataset, split: Split, table: BoxTable) -> DetectionDataset:
    if detected.kind == "tfrecord":
        return BoxTFRecordDataset(detected.path, split, DataConfig(), detected.why, is_lenient=True)
    origin = f"{detected.kind} data at {detected.path} ({detected.why})" + (f"; {table.note}" if table.note else "")
    return BoxTableDataset(detected.kind, table, np.arange(len(table)), origin)


def _box_issues(split: Split, table: BoxTable) -> Iterator[DataIssue]:
    """Issues with the annotation files of a split, then with its boxes."""
    problems = [problem for problem in table.problems if problem.kind != "unknown-class"]  # its boxes are found below
    for kind in dict.fromkeys(problem.kind for problem in problems):
        own = [f"{printable(problem.where)}: {problem.text}" for problem in problems if problem.kind == kind]
        yield DataIssue("error", kind, f"{PROBLEMS[kind]}, in {split}", tuple(own[:_MAX_NAMED]), len(own))
    for defect, rows in find_bad_boxes(table).items():
        if len(rows):
            named = tuple(printable(text) for text in describe_boxes(table, rows[:_MAX_NAMED].tolist()))
            yield DataIssue(
                "error", defect, f"boxes in {split}, each of which {BAD_BOX_KINDS[defect]}", named, len(rows)
            )
    empty = np.flatnonzero(np.diff(table.offsets) == 0)
    if len(empty):
        named = tuple(printable(table.files[index]) for index in empty[:_MAX_NAMED].tolist())
        yield DataIssue("warning", "unannotated", f"images in {split} without a box", named, len(empty))


def _open_folder(root: Path, data: DataConfig, report: Report) -> dict[Split, Dataset]:
    places = dict(_folder_places(root, report))
    unsorted = {split for split, place in places.items() if split != "train" and is_unsorted(place.folder)}
    listings = {place.folder: FolderListing(place.folder) for split, place in places.items() if split not in unsorted}
    names = next((listings[place.folder].class_names for split, place in places.items() if split not in unsorted), ())
    unknown = [
        name for name in dict.fromkeys(n for own in listings.values() for n in own.class_names) if name not in names
    ]
    if unknown:
        text = "classes in validation that training does not have"
        report(DataIssue("error", "unknown-class", text, tuple(unknown)))
    for folder, listing in listings.items():
        users = " and ".join(split for split, place in places.items() if place.folder == folder)
        for issue in listing.issues(users):
            if issue.paths:
                report(issue)
    opened: dict[Split, Dataset] = {}
    for split, place in places.items():
        if split not in unsorted:
            listing = listings[place.folder]
            opened[split] = LenientFolderDataset(listing, (*names, *unknown), root, split, place, data)
        elif (dataset := _open_unsorted(root, split, report, is_only=len(places) == 1)) is not None:
            opened[split] = dataset
    return opened


def _open_unsorted(root: Path, split: Split, report: Report, is_only: bool) -> Dataset | None:
    """A split without class folders, whose labels are in a list; a test set may have none."""
    try:
        return FolderDataset(root, split)
    except DataError as error:
        if is_only:
            raise
        level: Literal["error", "warning"] = "warning" if split == "test" else "error"
        report(DataIssue(level, "unreadable-split", f"{error.what}: {error.why}", (printable(error.where),)))
        return None


def _folder_places(root: Path, report: Report) -> Iterator[tuple[Split, SplitPlace]]:
    """Folder of each split; test/ is left out if it is used for validation."""
    if not has_class_folders(root) and split_folder(root, "train") is None:
        report(DataIssue("warning", "no-training", "there is no train/: this data can only be evaluated", (str(root),)))
    else:
        yield "train", locate_split(root, "train")
    val = locate_split(root, "val")
    yield "val", val
    test = split_folder(root, "test")
    if test not in (None, val.folder) and not has_class_folders(root):
        yield "test", locate_split(root, "test")


class FolderListing:
    """The files of one split by class, and the files and folders that training would refuse or ignore."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, list[str]] = {}
        self._broken_links: list[str] = []
        self._outside_classes: list[str] = []
        self._ignored: list[str] = []
        self._unreadable: list[str] = []
        for entry in self._entries(str(folder)):
            if is_broken_link(entry):
                self._broken_links.append(entry.path)
            elif is_own_output(entry.path):
                continue
            elif is_folder(entry):
                self.files[entry.name] = sorted(self._images(entry.path))
            elif is_regular_file(entry):
                (self._outside_classes if is_image_name(entry.name) else self._ignored).append(entry.path)
            else:
                self._broken_links.append(entry.path)
        self.class_names = tuple(sorted(self.files))

    def issues(self, split: str) -> tuple[DataIssue, ...]:
        """Possible issues of the split; those without paths did not occur."""
        without = [name for name in self.class_names if not self.files[name]]
        empty = tuple(name for name in without if is_empty_folder(str(self.folder / name)))
        imageless = tuple(name for name in without if name not in empty)
        extensions = Counter(os.path.splitext(path)[1].lower() or "no extension" for path in self._ignored)
        most_common = ", ".join(f"{extension} {count:,}" for extension, count in extensions.most_common(5))
        not_utf8 = tuple(printable(name) for name in self.class_names if printable(name) != name)
        ignored = f"files in {split} that are not images by their extension: {most_common}"
        return (
            DataIssue("warning", "empty-class", f"empty class folders in {split}, which are left out", empty),
            DataIssue("error", "empty-class", f"class folders without images in {split}", imageless),
            DataIssue("error", "name", f"class folders in {split} whose names are not UTF-8", not_utf8),
            DataIssue("error", "broken-link", f"broken links or special files in {split}", _names(self._broken_links)),
            DataIssue("error", "unreadable", f"folders in {split} that cannot be listed", _names(self._unreadable)),
            DataIssue("warning", "stray", f"images in {split} outside of class folders", _names(self._outside_classes)),
            DataIssue("warning", "ignored", ignored, _names(self._ignored)),
        )

    def _images(self, top: str) -> list[str]:
        """Paths of a class's images relative to its folder, at any depth."""
        images: list[str] = []
        pending = [top]
        while pending:
            for entry in self._entries(pending.pop()):
                if is_regular_file(entry):
                    (images if is_image_name(entry.name) else self._ignored).append(entry.path)
                elif entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    self._broken_links.append(entry.path)
        return [os.path.relpath(path, top) for path in images]

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return sorted((e for e in entries if not e.name.startswith(".")), key=lambda e: e.name)
        except OSError:
            self._unreadable.append(folder)
            return []


class LenientFolderDataset:
    """One split of a tree of image files as it was listed."""

    kind = "folder"

    def __init__(
        self,
        listing: FolderListing,
        class_names: tuple[str, ...],
        root: Path,
        split: Split,
        place: SplitPlace,
        data: DataConfig,
    ) -> None:
        self.class_names = class_names
        self._folder = listing.folder
        numbers = {name: number for number, name in enumerate(class_names)}
        samples = [(numbers[name], file) for name in listing.class_names for file in listing.files[name]]
        note = place.note
        if place.is_shared:
            paths = (f"{class_names[target]}/{file}" for target, file in samples)
            targets = np.array([target for target, _ in samples], np.int64)
            kept, note = ValidationSplit.of(data).select(split, paths, targets, str(root))
            samples = [sample for sample, is_kept in zip(samples, kept, strict=True) if is_kept]
        self._targets, self._files = array("i", (target for target, _ in samples)), [file for _, file in samples]
        self.origin = f"image folders at {root}" + (f"; {note}" if note else "")

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Sample:
        target = self._targets[index]
        path = os.path.join(self._folder, self.class_names[target], self._files[index])
        return Sample(read(path), target, path)

    def fingerprint(self) -> str:
        """Empty: such a dataset is inspected, not trained on."""
        return ""


def _names(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(printable(path) for path in sorted(paths))
