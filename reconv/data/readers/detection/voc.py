"""Pascal VOC's layout: JPEGImages/, Annotations/ with XML files, and ImageSets/Main/ with lists of images."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

from reconv.core.errors import DataError
from reconv.data.boxes.table import UNKNOWN, BoxTable, BoxTableBuilder
from reconv.data.dataset import Split
from reconv.data.readers.detection.box_table_dataset import (
    BoxTableDataset,
    hold_out,
    open_box_table,
    read_class_names,
    read_file_names,
)
from reconv.recipe.parts.data import DataConfig
from reconv.storage import read_limits
from reconv.storage.local import is_possible_path, listing, read

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
_IMAGES, _ANNOTATIONS, _LISTS = "JPEGImages", "Annotations", "ImageSets/Main"
_NAMES = "classes.txt"
_EXTENSIONS = (".jpg", ".jpeg", ".png")
_MAX_SIDE_PX = 2**31  # that a table can hold
_FLAG = re.compile(r"\s+(-1|0|1)$")


def detect_voc(folder: Path) -> str | None:
    """Evidence that the folder is in VOC's layout, or None."""
    is_voc = (folder / _IMAGES).is_dir() and (folder / _ANNOTATIONS).is_dir()
    return f"it has {_IMAGES}/ and {_ANNOTATIONS}/" if is_voc else None


def open_voc(root: Path, split: Split, data: DataConfig, why: str = "") -> BoxTableDataset:
    """One split after the recipe's policies."""
    title = f"VOC data at {root}, {locate_list(root, split).title}"
    return open_box_table("voc", read_voc(root, split, data), split, data, title, why)


@dataclass(frozen=True, slots=True)
class ImageList:
    """The list of a split's images."""

    file: Path | None  # None: there are no lists, and every annotated image is meant
    is_shared: bool = False  # with the other split: a share of the images is held out for validation
    note: str = ""

    @property
    def title(self) -> str:
        return "all annotations" if self.file is None else f"list {self.file.stem}"


def locate_list(root: Path, split: Split) -> ImageList:
    """train and val, or trainval and test if there is no val (as for VOC 2007 test), or the only list for both."""
    lists = root / _LISTS
    present = {name for name in ("train", "val", "trainval", "test") if (lists / f"{name}.txt").is_file()}
    train = "train" if "val" in present or "trainval" not in present else "trainval"
    if split == "test" or (split == "train" and present & {"val", "test"}) or "val" in present:
        return ImageList(lists / f"{train if split == 'train' else split}.txt")
    if split == "val" and "test" in present:
        return ImageList(lists / "test.txt", note="no list val: test is used for validation")
    return ImageList(lists / f"{train}.txt" if present else None, is_shared=True)


def read_voc(root: Path, split: Split, data: DataConfig) -> BoxTable:
    """A split as the files have it; classes are those of classes.txt, VOC's, or those of the training images."""
    own = locate_list(root, split)
    stems = _stems(root, own)
    trees = [_parse(root / _ANNOTATIONS / f"{stem}.xml") for stem in stems]
    names = _class_names(root, split, trees)
    builder = BoxTableBuilder(names, tuple(range(1, len(names) + 1)))
    numbers = {name: label for label, name in enumerate(names)}
    seen: set[str] = set()
    for stem, tree in zip(stems, trees, strict=True):
        xml_file = root / _ANNOTATIONS / f"{stem}.xml"
        if stem in seen:
            builder.add_problem("duplicate-id", f"{stem} is listed twice", str(own.file), "remove one of them")
        seen.add(stem)
        file = str(_image_path(root, stem))
        if isinstance(tree, str):
            builder.add_image(file, str(xml_file), stem)
            builder.add_problem("no-annotation", f"the annotation of {stem} cannot be read: {tree}", str(xml_file))
        else:
            _add_annotation(builder, tree, file, xml_file, stem, numbers)
    table = builder.build()
    return hold_out(table, root, split, data) if own.is_shared else replace(table, note=own.note)


def _add_annotation(
    builder: BoxTableBuilder, tree: ElementTree.Element, file: str, xml_file: Path, stem: str, numbers: dict[str, int]
) -> None:
    """Add one image and its boxes."""
    height, width = (_number(tree, f"size/{side}") for side in ("height", "width"))
    has_size = height is not None and width is not None and 0 < height < _MAX_SIDE_PX and 0 < width < _MAX_SIDE_PX
    builder.add_image(file, str(xml_file), stem, *((int(height or 0), int(width or 0)) if has_size else (0, 0)))
    if not has_size:
        builder.add_problem("no-size", f"{stem} has no size", str(xml_file), "write its width and height under <size>")
    for entry in tree.findall("object"):
        name = (entry.findtext("name") or "").strip()
        corners = [_number(entry, f"bndbox/{edge}") for edge in ("xmin", "ymin", "xmax", "ymax")]
        left, top, right, bottom = (float("nan") if value is None else value for value in corners)
        # Pixels count from 1 and both ends belong to the box. Some programs count from 0: their first pixel stays 0.
        edges = (max(left - 1, min(left, 0.0)), max(top - 1, min(top, 0.0)), right, bottom)
        is_difficult = (entry.findtext("difficult") or "0").strip() == "1"
        builder.add_box(edges, numbers.get(name, UNKNOWN), is_difficult)
        if name not in numbers:
            builder.add_problem(
                "unknown-class", f"{stem} has the unknown class {name!r:.80}", str(xml_file), "correct its name"
            )


def _class_names(root: Path, split: Split, trees: Iterable[ElementTree.Element | str]) -> tuple[str, ...]:
    if (root / _NAMES).is_file():
        return tuple(read_class_names(root / _NAMES))
    train = locate_list(root, "train")
    if split != "train" and not train.is_shared and train.file is not None and train.file.is_file():
        trees = (_parse(root / _ANNOTATIONS / f"{stem}.xml") for stem in _stems(root, train))
    seen = {
        (entry.findtext("name") or "").strip()
        for tree in trees
        if not isinstance(tree, str)
        for entry in tree.findall("object")
    }
    return CLASSES if seen <= set(CLASSES) else tuple(sorted(seen - {""}))


def _stems(root: Path, images: ImageList) -> list[str]:
    """The names in a list, without the flags at the line ends that lists of single classes have."""
    if (file := images.file) is None:
        return [name.removesuffix(".xml") for name in listing(root / _ANNOTATIONS)[0] if name.endswith(".xml")]
    stems = read_file_names(file)
    if all(_FLAG.search(stem) for stem in stems):
        stems = [_FLAG.sub("", stem) for stem in stems]
    for number, stem in enumerate(stems, 1):
        if not is_possible_path(stem):
            raise DataError(
                f"name {number} in {file.name} cannot be a file: {stem!r:.80}",
                where=str(file),
                hint="list image names without extension in it, one per line",
            )
    if not stems:
        raise DataError(
            f"{file.name} is empty", where=str(file), hint="list image names without extension in it, one per line"
        )
    return stems


def _image_path(root: Path, stem: str) -> Path:
    for extension in _EXTENSIONS[1:]:
        if os.path.isfile(path := root / _IMAGES / f"{stem}{extension}"):  # Path.is_file raises for a long name
            return path
    return root / _IMAGES / f"{stem}{_EXTENSIONS[0]}"


def _parse(file: Path) -> ElementTree.Element | str:
    """The root element of an XML file, or the reason why it cannot be read."""
    try:
        return ElementTree.fromstring(
            read(file, max_bytes=read_limits.XML_BYTES), ElementTree.XMLParser(target=_BuilderWithoutDTD())
        )
    except (ElementTree.ParseError, ValueError, LookupError) as error:  # LookupError: an unknown encoding
        return f"not valid XML: {error}"
    except DataError as error:
        return error.why


class _BuilderWithoutDTD(ElementTree.TreeBuilder):
    """Refuses document types: only they can define entities, which expand without bound."""

    def doctype(self, name: str, public_id: str, system_id: str) -> None:
        raise ValueError("it has a document type (<!DOCTYPE>), and annotations have none")


def _number(tree: ElementTree.Element, path: str) -> float | None:
    text = tree.findtext(path)
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
