"""Image folders: train/<class>/..., and val/ or validation/ beside it.

Samples are in the order of class name, then path, so every machine with the same files sees the same indices. A class
folder without images is an error, and so is a broken link: training must not run on a part of the data unnoticed.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from reconv.data.dataset import I64, FileBacked, Sample, SampleFiles, Split
from reconv.data.storage.file_list import FileList, digest_files
from reconv.data.storage.local import read, unreadable
from reconv.errors import DataError

EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff")
SPLIT_FOLDERS: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("val", "validation")}

_SUFFIXES = tuple(f".{extension}" for extension in EXTENSIONS)


def is_image_name(name: str) -> bool:
    """Whether a file is an image by its extension."""
    return name.lower().endswith(_SUFFIXES) and not name.startswith(".")


def split_folder(root: Path, split: Split) -> Path | None:
    """The folder of a split under `root`; None if there is none."""
    return next((root / name for name in SPLIT_FOLDERS[split] if (root / name).is_dir()), None)


class FolderDataset(FileBacked):
    """One split of a tree of image files; the index takes 12 bytes per sample plus the file name."""

    kind = "folder"

    def __init__(self, root: Path, split: Split, why: str = "") -> None:
        self._folder = _find_split(root, split)
        self.class_names = _class_folders(_find_split(root, "train"))
        self.origin = f"image folders at {root}" + (f" ({why})" if why else "")
        present = self.class_names if split == "train" else _class_folders(self._folder)
        _check_known_classes(self._folder, present, self.class_names)
        numbers = {name: number for number, name in enumerate(self.class_names)}
        targets = array("i")
        broken: list[str] = []

        def files() -> Iterator[str]:
            for class_name in present:
                found = _image_files(self._folder, class_name, broken)
                targets.extend([numbers[class_name]] * len(found))
                yield from found

        self._names = FileList(files())
        _check_broken(self._folder, broken)
        self.targets = np.frombuffer(targets, np.int32)

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def index_bytes(self) -> int:
        """Memory held by the index."""
        return self._names.num_bytes + self.targets.nbytes

    def path(self, index: int) -> str:
        """The path of a sample's file."""
        name = self._names[index]
        return os.path.join(self._folder, self.class_names[self.targets[index]], name)

    def __getitem__(self, index: int) -> Sample:
        """The encoded image and its class."""
        path = self.path(index)
        return Sample(read(path), int(self.targets[index]), path)

    def files(self, indices: I64) -> SampleFiles:
        """The paths as bytes, and the classes."""
        return [os.fsencode(self.path(int(index))) for index in indices], self.targets[indices]

    def fingerprint(self) -> str:
        """A digest of all names and targets, and of the sizes of up to 4096 files."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return digest_files(self.class_names, self._names, self.targets, self.path)


def _find_split(root: Path, split: Split) -> Path:
    folder = split_folder(root, split)
    if folder is None:
        names = " or ".join(f"{name}/" for name in SPLIT_FOLDERS[split])
        raise DataError(
            f"no {names} under {root}",
            where=str(root),
            why="image folders are train/<class>/... and val/<class>/... (or validation/)",
            then="give the folder that holds train/ and val/: --data DIR",
        )
    return folder


def _class_folders(folder: Path) -> tuple[str, ...]:
    """The sorted names of the class folders."""
    try:
        with os.scandir(folder) as entries:
            seen = [entry for entry in entries if not entry.name.startswith(".")]
            names = tuple(sorted(entry.name for entry in seen if entry.is_dir()))
            broken = [entry.path for entry in seen if entry.is_symlink() and not entry.is_dir() and not entry.is_file()]
    except OSError as error:
        raise unreadable(folder, error) from error
    _check_broken(folder, broken)
    if not names:
        raise DataError(
            f"no class folders in {folder}",
            where=str(folder),
            why="each class is a folder of images, such as train/cat/1.jpg",
            then="sort the images into one folder per class",
        )
    _check_names(folder, names)
    return names


def _check_names(folder: Path, names: tuple[str, ...]) -> None:
    """Class names are saved in checkpoints and reports as UTF-8; file names may be any bytes."""
    not_utf8 = [name for name in names if any("\udc80" <= letter <= "\udcff" for letter in name)]
    if not_utf8:
        shown = [os.fsencode(name).decode("utf-8", "backslashreplace") for name in not_utf8]
        raise DataError(
            f"names of class folders are not UTF-8: {_first(shown)}",
            where=str(folder),
            why="class names are saved with the model as UTF-8 text",
            then="rename them",
        )


def _check_broken(folder: Path, broken: list[str]) -> None:
    if broken:
        raise DataError(
            f"{len(broken)} entries in {folder} are neither images nor folders: {_first(sorted(broken))}",
            where=str(folder),
            why="they are broken links, links to folders, or special files; a file system may not be mounted",
            then="mount or copy what they point to, or remove them",
        )


def _first(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _check_known_classes(folder: Path, present: tuple[str, ...], known: tuple[str, ...]) -> None:
    unknown = sorted(set(present) - set(known))
    if unknown:
        raise DataError(
            f"classes that training does not have: {_first(unknown)}",
            where=str(folder),
            why="validation may only have classes of training",
            then="remove or rename these folders, or add them to train/",
        )


def _image_files(folder: Path, class_name: str, broken: list[str]) -> list[str]:
    """Sorted paths of a class's images relative to its folder, at any depth; adds broken links to `broken`."""
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
                    if entry.is_file():
                        files += [os.path.join(inner, entry.name)] if is_image_name(entry.name) else []
                    elif entry.is_dir(follow_symlinks=False):
                        pending.append(os.path.join(inner, entry.name))
                    elif entry.is_symlink() or is_image_name(entry.name):
                        broken.append(entry.path)
    except OSError as error:
        raise unreadable(top, error) from error
    if not files and len(broken) == num_broken:
        raise DataError(
            f"class folder {class_name} has no images",
            where=top,
            why=f"no file in it has one of the extensions {', '.join(EXTENSIONS)}",
            then="add its images or remove the folder",
        )
    return sorted(files)
