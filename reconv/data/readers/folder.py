"""Image folders: train/<class>/... and val/<class>/..., or only <class>/..., and then a share is held out.

Samples are in the order of class name, then path, so every machine with the same files sees the same indices. A class
folder without any file is left out with a warning; one whose files are no images is an error, and so is a broken link:
training must not run on a part of the data unnoticed.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from reconv.core.errors import DataError
from reconv.data.dataset import I64, FileBacked, Sample, SampleFiles, Split
from reconv.data.decode.pillow import INSTALL_HEIF, NEEDS_HEIF
from reconv.data.file_list import (
    EXTENSIONS,
    FileList,
    describe_unread_heic,
    digest_files,
    first_names,
    is_image_name,
    is_unread_heic,
)
from reconv.data.readers.imagenet.classes import imagenet_names
from reconv.data.readers.imagenet.raw_validation import label_images
from reconv.data.readers.validation_split import ValidationSplit
from reconv.recipe.parts.data import DataConfig
from reconv.storage.data_errors import unreadable
from reconv.storage.local import is_folder, is_regular_file, listing, read
from reconv.storage.remote_tree import shown_path

SPLIT_FOLDERS: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("val", "validation", "valid"),
    "test": ("test",),
}

SPLIT_TITLES: dict[Split, str] = {"train": "training", "val": "validation", "test": "testing"}

SPLIT_NAMES = tuple(name for names in SPLIT_FOLDERS.values() for name in names)


def split_folder(root: Path, split: Split) -> Path | None:
    """The folder of a split under `root`; None if there is none."""
    return next((root / name for name in SPLIT_FOLDERS[split] if (root / name).is_dir()), None)


def has_class_folders(root: Path) -> bool:
    """True if folders of images lie directly in `root`, without folders for the splits.

    A folder called train that holds images and no folders is a class, if there are others.
    """
    _, folders = listing(root)
    if any(_listing_or_none(root / name)[1] for name in folders if name in SPLIT_NAMES):
        return False
    return any(_holds_images(root / name) for name in folders if name not in SPLIT_NAMES)


def _holds_images(folder: Path) -> bool:
    return any(is_image_name(name) for name in _listing_or_none(folder)[0])


def _listing_or_none(folder: Path) -> tuple[list[str], list[str]]:
    """The files and folders in a folder; nothing if it may not be read."""
    try:
        return listing(folder)
    except DataError:
        return [], []


def is_unsorted(folder: Path) -> bool:
    """True if a folder holds images and no class folders, as ImageNet's validation images come."""
    return not _listing_or_none(folder)[1] and _holds_images(folder)


@dataclass(frozen=True, slots=True)
class SplitPlace:
    """Location of a split's images."""

    folder: Path
    is_shared: bool = False  # with the other split: a share of the images is held out for validation
    note: str = ""


def locate_split(root: Path, split: Split) -> SplitPlace:
    """The folder with a split's class folders; without val/ that is test/ for validation, else the one of training."""
    if has_class_folders(root):
        return SplitPlace(root, is_shared=True)
    train, own, test = (split_folder(root, name) for name in ("train", split, "test"))
    if split != "test" and test is not None and is_unsorted(test):
        test = None  # ImageNet's test images have no labels
    if own is not None:
        is_shared = split == "train" and test is None and split_folder(root, "val") is None
        return SplitPlace(own, is_shared)
    if split == "val" and test is not None:
        return SplitPlace(test, note="no val/: test/ is used for validation")
    if split == "val" and train is not None:
        return SplitPlace(train, is_shared=True)
    names = " or ".join(f"{name}/" for name in SPLIT_FOLDERS[split])
    raise DataError(
        f"no {names} under {root}",
        where=str(root),
        why="image folders are train/<class>/... and val/<class>/... (or validation/, valid/), or only <class>/...",
        hint="give the folder that holds them: --data DIR",
    )


_DEFAULTS = DataConfig()

FolderIndex = tuple[tuple[str, ...], FileList, npt.NDArray[np.int32]]  # class names, files, targets


class FolderDataset(FileBacked):
    """One split of a tree of image files; the index takes 12 bytes per sample plus the file name."""

    kind = "folder"

    def __init__(self, root: Path, split: Split, why: str = "", data: DataConfig = _DEFAULTS) -> None:
        place = locate_split(root, split)
        self.warnings: tuple[str, ...] = ()
        self._folder = place.folder
        self._is_unsorted = split != "train" and not place.is_shared and is_unsorted(place.folder)
        if self._is_unsorted:
            self.class_names, self._names, self.targets = _list_unsorted(root, place.folder)
            left_out: list[str] = []
        else:
            self.class_names, self._names, self.targets, left_out = _list_classes(root, place, split)
            self.warnings = _warn_of_empty(place.folder)
        note = self._hold_out(split, ValidationSplit.of(data)) if place.is_shared else place.note
        if num_outside := sum(map(is_image_name, listing(root)[0])) if place.folder == root else 0:
            note += f"; not used: {num_outside:,} image{'s' * (num_outside > 1)} beside the class folders"
        if left_out:
            note += f"; {describe_unread_heic(left_out)}"
        note = note.removeprefix("; ")
        self.origin = (
            f"image folders at {shown_path(root)}" + (f" ({why})" if why else "") + (f"; {note}" if note else "")
        )

    def _hold_out(self, split: Split, rule: ValidationSplit) -> str:
        """Keep the samples of one split of a folder that has both; returns a sentence about it."""
        names, targets = self._names, self.targets
        paths = (f"{self.class_names[target]}/{names[index]}" for index, target in enumerate(targets.tolist()))
        kept, note = rule.select(split, paths, targets, str(self._folder))
        self._names = FileList(names[index] for index in np.flatnonzero(kept).tolist())
        self.targets = self.targets[kept]
        return note

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def index_bytes(self) -> int:
        """Memory held by the index."""
        return self._names.num_bytes + self.targets.nbytes

    def path(self, index: int) -> str:
        """The path of a sample's file."""
        name = self._names[index]
        if self._is_unsorted:
            return os.path.join(self._folder, name)
        return os.path.join(self._folder, self.class_names[self.targets[index]], name)

    def __getitem__(self, index: int) -> Sample:
        """The encoded image and its class."""
        path = self.path(index)
        return Sample(read(path), int(self.targets[index]), shown_path(path))

    def files(self, indices: I64) -> SampleFiles:
        """The paths as bytes, and the classes."""
        targets, names = self.targets[indices], self._names.encoded(indices)
        if self._is_unsorted:
            folder = os.fsencode(self._folder) + b"/"
            return [folder + name for name in names], targets
        folders = self._encoded_folders
        return [folders[target] + name for target, name in zip(targets.tolist(), names, strict=True)], targets

    @cached_property
    def _encoded_folders(self) -> list[bytes]:
        """The folder of each class, with a slash at the end."""
        return [os.fsencode(os.path.join(self._folder, name, "")) for name in self.class_names]

    def fingerprint(self) -> str:
        """A digest of all names and targets, and of the sizes of up to 4096 files."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return digest_files(self.class_names, self._names, self.targets, self.path)


def _list_classes(root: Path, place: SplitPlace, split: Split) -> tuple[*FolderIndex, list[str]]:
    """The images in class folders, in the order of class and path, and the HEIC images that cannot be read here."""
    present, class_names = _classes(root, place, split)
    numbers = {name: number for number, name in enumerate(class_names)}
    targets = array("i")
    broken: list[str] = []
    left_out: list[str] = []

    def files() -> Iterator[str]:
        for class_name in present:
            found = _image_files(place.folder, class_name, broken, left_out)
            targets.extend([numbers[class_name]] * len(found))
            yield from found

    names = FileList(files())
    _check_broken(place.folder, broken)
    return class_names, names, np.frombuffer(targets, np.int32), left_out


def _list_unsorted(root: Path, folder: Path) -> FolderIndex:
    """The images of a folder without class folders, in the order of their names; their classes are in a list."""
    train = split_folder(root, "train")
    class_names = tuple(imagenet_names()) if train is None else _class_folders(train)
    files = [name for name in listing(folder)[0] if is_image_name(name)]
    numbers = {name: number for number, name in enumerate(class_names)}
    wnids = label_images(root, folder, files, class_names)
    return class_names, FileList(files), np.array([numbers[wnid] for wnid in wnids], np.int32)


def _classes(root: Path, place: SplitPlace, split: Split) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The class folders of a split, and the class names of training; without a training set they are the same."""
    present = _class_folders(place.folder)
    train = split_folder(root, "train")
    if place.is_shared or split == "train" or train is None:
        return present, present
    known = _class_folders(train)
    _check_known_classes(place.folder, present, known)
    return present, known


def _class_folders(folder: Path) -> tuple[str, ...]:
    """The sorted names of the class folders."""
    try:
        with os.scandir(folder) as entries:
            seen = [entry for entry in entries if not entry.name.startswith(".")]
            broken = [entry.path for entry in seen if is_broken_link(entry)]
            folders = [entry for entry in seen if is_folder(entry) and not is_own_output(entry.path)]
            names = tuple(sorted(entry.name for entry in folders if not is_empty_folder(entry.path)))
    except OSError as error:
        raise unreadable(folder, error) from error
    _check_broken(folder, broken)
    _check_names(folder, tuple(sorted(entry.name for entry in folders)))
    if folders and not names:
        raise DataError(
            f"the class folders in {folder} are empty",
            where=str(folder),
            why=f"there is no file in {first_names(sorted(entry.name for entry in folders))}",
            hint="add images to them, or give the folder that has some: --data DIR",
        )
    if not names:
        raise DataError(
            f"no class folders in {folder}",
            where=str(folder),
            why="each class is a folder of images, such as train/cat/1.jpg",
            hint="sort the images into one folder per class",
        )
    return names


def is_empty_folder(folder: str) -> bool:
    """True if there is no file in a folder, at any depth, but hidden ones."""
    pending = [folder]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if not entry.is_dir(follow_symlinks=False):
                    return False
                pending.append(entry.path)
    return True


def _warn_of_empty(folder: Path) -> tuple[str, ...]:
    """A warning about class folders that are left out; none if all have files."""
    names = sorted(
        name for name in listing(folder)[1] if not name.startswith(".") and is_empty_folder(str(folder / name))
    )
    if not names:
        return ()
    plural = "s" if len(names) > 1 else ""
    return (f"empty class folder{plural} in {shown_path(folder)} left out: {first_names(names)}",)


def is_broken_link(entry: os.DirEntry[str]) -> bool:
    """True if an entry is a link to nothing, to itself or to a folder that contains it."""
    if not entry.is_symlink() or is_regular_file(entry):
        return False
    return not is_folder(entry) or Path(entry.path).parent.resolve().is_relative_to(Path(entry.path).resolve())


def is_own_output(folder: str) -> bool:
    """True if a folder is a run directory or holds those of several recipes, as after `--data .`."""
    if os.path.isfile(os.path.join(folder, "recipe.yaml")):
        return True
    return os.path.basename(folder) == "runs" and next(Path(folder).glob("*/*/recipe.yaml"), None) is not None


def _check_names(folder: Path, names: tuple[str, ...]) -> None:
    """Class names are saved in checkpoints and reports as UTF-8; file names may be any bytes."""
    not_utf8 = [name for name in names if any("\udc80" <= letter <= "\udcff" for letter in name)]
    if not_utf8:
        shown = [os.fsencode(name).decode("utf-8", "backslashreplace") for name in not_utf8]
        raise DataError(
            f"names of class folders are not UTF-8: {first_names(shown)}",
            where=str(folder),
            why="class names are saved with the model as UTF-8 text",
            hint="rename them",
        )


def _check_broken(folder: Path, broken: list[str]) -> None:
    if broken:
        raise DataError(
            f"{len(broken)} entries in {folder} are neither images nor folders: {first_names(sorted(broken))}",
            where=str(folder),
            why="they are broken links, links to folders, or special files; a file system may not be mounted",
            hint="mount or copy what they point to, or remove them",
        )


def _check_known_classes(folder: Path, present: tuple[str, ...], known: tuple[str, ...]) -> None:
    unknown = sorted(set(present) - set(known))
    if unknown:
        raise DataError(
            f"classes that training does not have: {first_names(unknown)}",
            where=str(folder),
            why="validation may only have classes of training",
            hint="remove or rename these folders, or add them to train/",
        )


def _image_files(folder: Path, class_name: str, broken: list[str], left_out: list[str]) -> list[str]:
    """Sorted paths of a class's images relative to its folder, at any depth.

    Adds broken links to `broken`, and HEIC images that cannot be read here to `left_out`.
    """
    top = os.path.join(folder, class_name)
    files: list[str] = []
    num_broken = len(broken)
    pending = [""]
    try:
        while pending:
            inner = pending.pop()
            with os.scandir(os.path.join(top, inner)) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if is_regular_file(entry):
                        if is_image_name(entry.name):
                            files.append(os.path.join(inner, entry.name))
                        elif is_unread_heic(entry.name):
                            left_out.append(os.path.join(class_name, inner, entry.name))
                    elif entry.is_dir(follow_symlinks=False):
                        pending.append(os.path.join(inner, entry.name))
                    elif entry.is_symlink() or is_image_name(entry.name):
                        broken.append(entry.path)
    except OSError as error:
        raise unreadable(top, error) from error
    own_heic = [name for name in left_out if name.startswith(os.path.join(class_name, ""))]
    if not files and own_heic:
        raise DataError(
            f"class folder {class_name} has no images that can be read here",
            where=top,
            why=f"it has {len(own_heic):,} HEIC images: {NEEDS_HEIF}",
            hint=INSTALL_HEIF,
        )
    if not files and len(broken) == num_broken:
        raise DataError(
            f"class folder {class_name} has no images",
            where=top,
            why=f"no file in it has one of the extensions {', '.join(EXTENSIONS)}",
            hint="add its images or remove the folder",
        )
    return sorted(files)
