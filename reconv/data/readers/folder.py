"""A tree of image files: train/<class>/..., and val/ or validation/ beside it.

Owns the listing and its compact index. Refuses to know decoding. Invariant: samples are in the order of class name,
then path, so every machine with the same tree sees the same indices; a class folder without images is an error, and
so is a link that leads nowhere: a half-mounted data set must not train on what is left of it.
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

_ENDINGS = tuple(f".{extension}" for extension in EXTENSIONS)


def is_image_name(name: str) -> bool:
    """Whether a file of this name is taken for an image."""
    return name.lower().endswith(_ENDINGS) and not name.startswith(".")


def split_folder(root: Path, split: Split) -> Path | None:
    """The folder of a split under `root`, if it is there."""
    return next((root / name for name in SPLIT_FOLDERS[split] if (root / name).is_dir()), None)


class FolderDataset(FileBacked):
    """One split of a tree of image files, indexed in 12 bytes a sample plus its file name."""

    kind = "folder"

    def __init__(self, root: Path, split: Split, why: str = "") -> None:
        self._folder = _existing_split(root, split)
        self.class_names = _class_folders(_existing_split(root, "train"))
        self.origin = f"image folders at {root}" + (f" ({why})" if why else "")
        present = self.class_names if split == "train" else _class_folders(self._folder)
        _refuse_unknown_classes(self._folder, present, self.class_names)
        numbers = {name: number for number, name in enumerate(self.class_names)}
        targets = array("i")
        astray: list[str] = []

        def files() -> Iterator[str]:
            for class_name in present:
                found = _image_files(self._folder, class_name, astray)
                targets.extend([numbers[class_name]] * len(found))
                yield from found

        self._names = FileList(files())
        _refuse_astray(self._folder, astray)
        self.targets = np.frombuffer(targets, np.int32)

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def index_bytes(self) -> int:
        """Memory held by the index."""
        return self._names.num_bytes + self.targets.nbytes

    def path(self, index: int) -> str:
        """The file of a sample."""
        name = self._names[index]
        return os.path.join(self._folder, self.class_names[self.targets[index]], name)

    def __getitem__(self, index: int) -> Sample:
        """The encoded file and its class."""
        path = self.path(index)
        return Sample(read(path), int(self.targets[index]), path)

    def files(self, indices: I64) -> SampleFiles:
        """The paths, as the disk spells them, and the classes."""
        return [os.fsencode(self.path(int(index))) for index in indices], self.targets[indices]

    def fingerprint(self) -> str:
        """A digest of all names and targets and of the sizes of up to 4096 files spread over the set."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return digest_files(self.class_names, self._names, self.targets, self.path)


def _existing_split(root: Path, split: Split) -> Path:
    folder = split_folder(root, split)
    if folder is None:
        names = " or ".join(f"{name}/" for name in SPLIT_FOLDERS[split])
        raise DataError(
            f"no {names} under {root}",
            where=str(root),
            why="an image tree has train/<class>/... and val/<class>/... (or validation/)",
            then="name the folder that holds train/ and val/: --data DIR",
        )
    return folder


def _class_folders(folder: Path) -> tuple[str, ...]:
    """Names of the class folders, sorted."""
    try:
        with os.scandir(folder) as entries:
            seen = [entry for entry in entries if not entry.name.startswith(".")]
            names = tuple(sorted(entry.name for entry in seen if entry.is_dir()))
            astray = [entry.path for entry in seen if entry.is_symlink() and not entry.is_dir() and not entry.is_file()]
    except OSError as error:
        raise unreadable(folder, error) from error
    _refuse_astray(folder, astray)
    if not names:
        raise DataError(
            f"no class folders in {folder}",
            where=str(folder),
            why="each class is a folder of images: train/cat/1.jpg",
            then="sort the images into one folder per class",
        )
    _refuse_unwritable_names(folder, names)
    return names


def _refuse_unwritable_names(folder: Path, names: tuple[str, ...]) -> None:
    """Class names go into checkpoints, reports and answers; file names go nowhere and may be any bytes."""
    broken = [name for name in names if any("\udc80" <= letter <= "\udcff" for letter in name)]
    if broken:
        shown = [os.fsencode(name).decode("utf-8", "backslashreplace") for name in broken]
        raise DataError(
            f"class folders whose names are not UTF-8: {_first(shown)}",
            where=str(folder),
            why="the name of a class is saved with the model, as UTF-8 text",
            then="rename them",
        )


def _refuse_astray(folder: Path, astray: list[str]) -> None:
    if astray:
        raise DataError(
            f"{len(astray)} under {folder} cannot be read as images or folders of them: {_first(sorted(astray))}",
            where=str(folder),
            why="links that lead nowhere or to a folder, or not files at all: is everything mounted?",
            then="mount or copy what they stand for, or remove them",
        )


def _first(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _refuse_unknown_classes(folder: Path, present: tuple[str, ...], known: tuple[str, ...]) -> None:
    unknown = sorted(set(present) - set(known))
    if unknown:
        raise DataError(
            f"classes that training does not have: {_first(unknown)}",
            where=str(folder),
            why="validation classes are looked up in the list of training classes",
            then="remove or rename these folders, or add them to train/",
        )


def _image_files(folder: Path, class_name: str, astray: list[str]) -> list[str]:
    """Paths of the class's images relative to its folder, at any depth, sorted; adds to `astray` what is no file."""
    top = os.path.join(folder, class_name)
    files: list[str] = []
    num_astray = len(astray)
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
                        astray.append(entry.path)
    except OSError as error:
        raise unreadable(top, error) from error
    if not files and len(astray) == num_astray:
        raise DataError(
            f"class folder {class_name} has no images",
            where=top,
            why=f"no file in it ends in {', '.join(EXTENSIONS)}",
            then="add its images or remove the folder",
        )
    return sorted(files)
