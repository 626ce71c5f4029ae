"""Pascal VOC's layout: JPEGImages/, Annotations/ of XML files, and ImageSets/Main/ of lists.

Owns the lists and the XML. Refuses to know policies and pixels. Invariant: images are in the order of their list;
pixels of the files count from 1 and both ends are part of a box, so a left or top edge moves by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from reconv.data.boxes.box_table import UNKNOWN, BoxTable, TableBuilder
from reconv.data.dataset import Split
from reconv.data.readers.detection.box_table_dataset import BoxTableDataset, class_lines, file_lines, open_box_table
from reconv.data.storage.local import read
from reconv.errors import DataError
from reconv.recipe.data_fields import DataConfig

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
_IMAGES, _ANNOTATIONS, _LISTS = "JPEGImages", "Annotations", "ImageSets/Main"
_NAMES = "classes.txt"
_ENDINGS = (".jpg", ".jpeg", ".png")
_MOST_PX = 2**31  # of a side that a table holds
_FLAG = re.compile(r"\s+(-1|0|1)$")


def why_voc(folder: Path) -> str | None:
    """The reason to take a folder for VOC's layout; None: it is not."""
    is_voc = (folder / _IMAGES).is_dir() and (folder / _ANNOTATIONS).is_dir()
    return f"it has {_IMAGES}/ and {_ANNOTATIONS}/" if is_voc else None


def open_voc(root: Path, split: Split, data: DataConfig, why: str = "") -> BoxTableDataset:
    """One split, by the recipe's policies."""
    title = f"VOC data at {root}, list {list_of(root, split).stem}"
    return open_box_table("voc", partial(read_voc, root, split), split, data, title, why)


def list_of(root: Path, split: Split) -> Path:
    """train and val; where there is no val, as in the test year 2007, trainval and test."""
    names = ("train", "val") if (root / _LISTS / "val.txt").is_file() else ("trainval", "test")
    return root / _LISTS / f"{names[split == 'val']}.txt"


def read_voc(root: Path, split: Split) -> BoxTable:
    """A split as its files say; classes are VOC's, those of classes.txt, or those of the training images."""
    stems = _stems(list_of(root, split))
    trees = [_parse(root / _ANNOTATIONS / f"{stem}.xml") for stem in stems]
    names = _class_names(root, split, trees)
    builder = TableBuilder(names, tuple(range(1, len(names) + 1)))
    numbers = {name: label for label, name in enumerate(names)}
    seen: set[str] = set()
    for stem, tree in zip(stems, trees, strict=True):
        place = root / _ANNOTATIONS / f"{stem}.xml"
        if stem in seen:
            builder.problem("duplicate-id", f"{stem} is there twice", str(list_of(root, split)), "remove one of them")
        seen.add(stem)
        file = str(_picture(root, stem))
        if isinstance(tree, str):
            builder.picture(file, str(place), stem)
            builder.problem("no-annotation", f"the annotation of {stem} cannot be read: {tree}", str(place))
        else:
            _add(builder, tree, file, place, stem, numbers)
    return builder.table()


def _add(
    builder: TableBuilder, tree: ElementTree.Element, file: str, place: Path, stem: str, numbers: dict[str, int]
) -> None:
    """One image and its boxes."""
    height, width = (_number(tree, f"size/{side}") for side in ("height", "width"))
    has_size = height is not None and width is not None and 0 < height < _MOST_PX and 0 < width < _MOST_PX
    builder.picture(file, str(place), stem, *((int(height or 0), int(width or 0)) if has_size else (0, 0)))
    if not has_size:
        builder.problem("no-size", f"{stem} has no size", str(place), "write its width and height under <size>")
    for entry in tree.findall("object"):
        name = (entry.findtext("name") or "").strip()
        corners = [_number(entry, f"bndbox/{edge}") for edge in ("xmin", "ymin", "xmax", "ymax")]
        left, top, right, bottom = (float("nan") if value is None else value for value in corners)
        # Some programs count from 0 instead: their first pixel stays where it is.
        edges = (max(left - 1, min(left, 0.0)), max(top - 1, min(top, 0.0)), right, bottom)
        is_difficult = (entry.findtext("difficult") or "0").strip() == "1"
        builder.box(edges, numbers.get(name, UNKNOWN), is_difficult)
        if name not in numbers:
            builder.problem("unknown-class", f"class {name!r} of {stem} is in no list", str(place), "correct its name")


def _class_names(root: Path, split: Split, trees: Iterable[ElementTree.Element | str]) -> tuple[str, ...]:
    if (root / _NAMES).is_file():
        return tuple(class_lines(root / _NAMES))
    if split == "val":
        trees = (_parse(root / _ANNOTATIONS / f"{stem}.xml") for stem in _stems(list_of(root, "train")))
    seen = {
        (entry.findtext("name") or "").strip()
        for tree in trees
        if not isinstance(tree, str)
        for entry in tree.findall("object")
    }
    return CLASSES if seen <= set(CLASSES) else tuple(sorted(seen - {""}))


def _stems(file: Path) -> list[str]:
    """The names in a list; where every line ends in a flag, as in lists of single classes, those are left out."""
    stems = file_lines(file)
    if all(_FLAG.search(stem) for stem in stems):
        stems = [_FLAG.sub("", stem) for stem in stems]
    if not stems:
        raise DataError(f"{file.name} is empty", where=str(file), then="name images in it, one a line, no ending")
    return stems


def _picture(root: Path, stem: str) -> Path:
    for ending in _ENDINGS[1:]:
        if (other := root / _IMAGES / f"{stem}{ending}").is_file():
            return other
    return root / _IMAGES / f"{stem}{_ENDINGS[0]}"


def _parse(file: Path) -> ElementTree.Element | str:
    """The root of an XML file, or why there is none."""
    try:
        return ElementTree.fromstring(read(file))
    except ElementTree.ParseError as error:
        return f"no XML: {error}"
    except DataError as error:
        return error.why


def _number(tree: ElementTree.Element, path: str) -> float | None:
    text = tree.findtext(path)
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
