"""A data set opened to be looked at: what training would refuse is told, and the rest is there.

Owns the patient listing of an image tree. Refuses to know decoding. Invariant: the samples are those training would
have if what is told were repaired, and nothing is written.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from reconv.data.dataset import Dataset, Sample, Split
from reconv.data.inspect.box_splits import box_reader, open_box_splits
from reconv.data.inspect.issue import SPLITS, DataIssue, Tell, printable
from reconv.data.readers.detect import detect
from reconv.data.readers.factory import NEED_NO_PATH, open_dataset
from reconv.data.readers.folder import is_image_name, split_folder
from reconv.data.readers.shards.map_shards import GroupedDataError
from reconv.data.storage.local import read
from reconv.errors import DataError
from reconv.recipe.data_fields import DataConfig


def open_splits(path: str, data: DataConfig, tell: Tell) -> dict[Split, Dataset]:
    """Each split there is, its faults told; `path` is a folder or the name of a data set in the package."""
    if path in NEED_NO_PATH and not Path(path).exists():
        return {split: open_dataset(path, None, split, data) for split in SPLITS}
    found = detect(Path(path), data.source)
    if (read_split := box_reader(found)) is not None:
        return dict(open_box_splits(found, read_split, tell))
    if found.kind == "folder":
        return _open_tree(found.path, tell)
    opened: dict[Split, Dataset] = {}
    refused: list[DataError] = []
    for split in SPLITS:
        try:
            opened[split] = open_dataset(data.source, Path(path), split, data)
        except DataError as error:
            refused.append(error)
    if not opened:
        raise refused[0]
    for refusal in refused:
        errors = refusal.errors if isinstance(refusal, GroupedDataError) else (refusal,)
        for text in dict.fromkeys(f"{error.what}: {error.why}" for error in errors):
            places = tuple(printable(error.where) for error in errors if f"{error.what}: {error.why}" == text)
            tell(DataIssue("fault", "unreadable-split", text, places))
    return opened


def _open_tree(root: Path, tell: Tell) -> dict[Split, Dataset]:
    listings = {split: Listing(folder) for split in SPLITS if (folder := split_folder(root, split)) is not None}
    if "val" not in listings:
        tell(DataIssue("fault", "no-validation", "there is no val/ or validation/ beside train/", (str(root),)))
    names = listings["train"].class_names
    unknown = [name for name in (listings["val"].class_names if "val" in listings else ()) if name not in names]
    if unknown:
        text = "classes in validation that training does not have"
        tell(DataIssue("fault", "unknown-class", text, tuple(unknown)))
    for split, listing in listings.items():
        listing.tell(split, tell)
    return {split: Tree(listing, (*names, *unknown)) for split, listing in listings.items()}


class Listing:
    """The files of one split by class, and what is odd about them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, list[str]] = {}
        self._astray: list[str] = []
        self._classless: list[str] = []
        self._ignored: list[str] = []
        self._unreadable: list[str] = []
        for entry in self._entries(str(folder)):
            if entry.is_dir():
                self.files[entry.name] = sorted(self._images(entry.path))
            elif entry.is_file():
                (self._classless if is_image_name(entry.name) else self._ignored).append(entry.path)
            else:
                self._astray.append(entry.path)
        self.class_names = tuple(sorted(self.files))

    def tell(self, split: Split, tell: Tell) -> None:
        """What training would refuse, and what it would silently leave out."""
        empty = tuple(name for name in self.class_names if not self.files[name])
        endings = Counter(os.path.splitext(path)[1].lower() or "no ending" for path in self._ignored)
        few = ", ".join(f"{ending} {count:,}" for ending, count in endings.most_common(5))
        broken = tuple(printable(name) for name in self.class_names if printable(name) != name)
        findings = (
            DataIssue("fault", "empty-class", f"class folders without images in {split}", empty),
            DataIssue("fault", "name", f"class folders in {split} whose names are not UTF-8", broken),
            DataIssue(
                "fault", "astray", f"links that lead nowhere, or no files at all, in {split}", _told(self._astray)
            ),
            DataIssue("fault", "unreadable", f"folders in {split} that cannot be listed", _told(self._unreadable)),
            DataIssue("warning", "stray", f"images in {split} that lie in no class's folder", _told(self._classless)),
            DataIssue(
                "warning", "ignored", f"files in {split} that are not taken for images: {few}", _told(self._ignored)
            ),
        )
        for finding in findings:
            if finding.paths:
                tell(finding)

    def _images(self, top: str) -> list[str]:
        """Paths of a class's images relative to its folder, at any depth."""
        images: list[str] = []
        pending = [top]
        while pending:
            for entry in self._entries(pending.pop()):
                if entry.is_file():
                    (images if is_image_name(entry.name) else self._ignored).append(entry.path)
                elif entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    self._astray.append(entry.path)
        return [os.path.relpath(path, top) for path in images]

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return sorted((e for e in entries if not e.name.startswith(".")), key=lambda e: e.name)
        except OSError:
            self._unreadable.append(folder)
            return []


class Tree:
    """One split of an image tree as it is listed."""

    kind = "folder"

    def __init__(self, listing: Listing, class_names: tuple[str, ...]) -> None:
        self.class_names = class_names
        self.origin = f"image folders at {listing.folder.parent}"
        self._listing = listing
        numbers = {name: number for number, name in enumerate(class_names)}
        self._targets, self._files = array("i"), list[str]()
        for name in listing.class_names:
            self._files += listing.files[name]
            self._targets.extend([numbers[name]] * len(listing.files[name]))

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Sample:
        """The encoded file and its class."""
        target = self._targets[index]
        path = os.path.join(self._listing.folder, self.class_names[target], self._files[index])
        return Sample(read(path), target, path)

    def fingerprint(self) -> str:
        """None: a tree that may be faulty is looked at, not trained on."""
        return ""


def _told(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(printable(path) for path in sorted(paths))
