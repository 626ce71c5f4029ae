"""ImageNet's validation images as unpacked: one folder without class folders, and a list of their labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reconv.core.errors import DataError
from reconv.data.readers.imagenet.labels import (
    DEVKIT_FOLDER,
    LIST_FILES,
    SOLUTION_FILE,
    TRUTH_FILE,
    has_labels,
    validation_synsets,
)

_LEVELS_UP = 3  # Kaggle's list is beside ILSVRC/, its images are in ILSVRC/Data/CLS-LOC/val/


def find_label_source(root: Path, folder: Path) -> Path | None:
    """Source of the labels of the images in `folder`: in it, in `root` beside it, or in Kaggle's file above."""
    for place in (folder, root):
        if has_labels(place):
            return place
    above = [parent / SOLUTION_FILE for parent in root.absolute().parents[:_LEVELS_UP]]
    return next((file for file in above if file.is_file()), None)


def label_images(root: Path, folder: Path, files: Sequence[str], class_names: Sequence[str]) -> list[str]:
    """The class (wnid) of each image in a folder without class folders."""
    source = find_label_source(root, folder)
    if source is None:
        raise DataError(
            f"{folder} has images, but neither class folders nor a list of labels",
            where=str(folder),
            why=f"looked there and in {root} for {', '.join(LIST_FILES)}, {SOLUTION_FILE}, {TRUTH_FILE} and the devkit",
            hint=f"sort the images into class folders, or put {LIST_FILES[1]} or {DEVKIT_FOLDER}.tar.gz into {root}",
        )
    synsets = validation_synsets(source, files, class_names, is_partial=True)
    return [synsets[file] for file in files]
