"""The data a conversion reads: any source of the trainer, or the archives that ImageNet is handed out as.

Owns the choice and the check of counts. Refuses to know what becomes of the samples. Invariant: both splits are open
and have the same classes, or an error says why not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from reconv.data.dataset import Dataset, Split
from reconv.data.inspect.box_splits import box_reader
from reconv.data.readers.detect import detect
from reconv.data.readers.factory import open_dataset
from reconv.data.readers.folder import split_folder
from reconv.data.readers.imagenet.imagenet_archives import TRAIN_FILE, VAL_FILE, is_archives, open_archives
from reconv.errors import DataError, UsageError
from reconv.recipe.data_fields import DataConfig

SPLITS: tuple[Split, ...] = ("train", "val")
IN_PACKAGE = ("digits", "scattered-digits")
ARCHIVES = "archives"
_AS_PUBLISHED = DataConfig(bad_boxes="skip")  # the published converter of COCO leaves boxes out that are not usable


def open_splits(
    text: str, kind: str, labels: Path | None, expected: Mapping[Split, int] | None, data: DataConfig = _AS_PUBLISHED
) -> tuple[dict[Split, Dataset], Path | None]:
    """Training and validation of what the user named, and the folder they lie in; boxes as `data` says."""
    path = Path(text)
    if text in IN_PACKAGE and not path.exists():
        return _checked({split: open_dataset(text, None, split, data) for split in SPLITS}, expected), None
    is_named = path.name in (TRAIN_FILE, VAL_FILE)
    folder = path.parent if is_named else path
    if (is_named or kind in ("auto", ARCHIVES)) and is_archives(folder):
        if kind == "auto" and not is_named and split_folder(folder, "train") is not None:
            raise UsageError(
                f"{folder} holds the original archives and an image tree",
                where=str(folder),
                why="either could be meant",
                then=f"--from folder or --from {ARCHIVES}",
            )
        return dict(open_archives(folder, labels, expected)), folder
    if labels is not None:
        raise UsageError(
            "--labels is for the ImageNet archives", why=f"there is no {TRAIN_FILE} in {folder}", then="leave it out"
        )
    found = detect(path, kind)
    boxes = box_reader(found) is not None
    sources = {split: open_dataset(found.kind, found.path, split, data, boxes=boxes) for split in SPLITS}
    return _checked(sources, expected), found.path


def _checked(sources: dict[Split, Dataset], expected: Mapping[Split, int] | None) -> dict[Split, Dataset]:
    for split, source in sources.items():
        wanted = (expected or {}).get(split)
        if wanted is not None and wanted != len(source):
            raise DataError(
                f"{len(source):,} {split} samples instead of the expected {wanted:,}",
                where=source.origin,
                why="something is missing, or --expect is wrong",
                then="complete the data, or correct --expect TRAIN,VAL",
            )
    return sources
