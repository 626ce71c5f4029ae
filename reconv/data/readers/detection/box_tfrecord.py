"""TFRecords of images with boxes, in the layout of TensorFlow's object detection programs.

Classes are those of `label_map.pbtxt` beside the shards, else the labels of the training shards; ids may have gaps.
Boxes are relative to the image. No record is used whose checksums do not match.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from reconv.core.errors import DataError
from reconv.data.boxes.annotations import NO_TARGET, AnnotationError, DetectionDataset
from reconv.data.boxes.table import (
    UNKNOWN,
    BoxTable,
    BoxTableBuilder,
    apply_box_policies,
    concat_tables,
    find_bad_boxes,
)
from reconv.data.dataset import I64, Sample, Split
from reconv.data.readers.shards.dataset import ShardNaming, find_shards, first_shard
from reconv.data.readers.shards.index import ScannedShard, ShardIndex, open_index
from reconv.data.readers.shards.tfrecord_format import (
    FOOTER_BYTES,
    HEADER_BYTES,
    Values,
    parse_example,
    peek_features,
    read_record,
    record_error,
    record_spans,
)
from reconv.detection.annotation import Annotation
from reconv.recipe.parts.data import DataConfig
from reconv.storage import read_limits
from reconv.storage.local import ReadWindow, read_bounded_text
from reconv.storage.tensorflow_encoding import MalformedError

IMAGE = "image/encoded"
HEIGHT, WIDTH, FILE, ID = "image/height", "image/width", "image/filename", "image/source_id"
EDGES = tuple(f"image/object/bbox/{edge}" for edge in ("xmin", "ymin", "xmax", "ymax"))
LABEL, TEXT = "image/object/class/label", "image/object/class/text"
CROWD, DIFFICULT, AREA = "image/object/is_crowd", "image/object/difficult", "image/object/area"
_ANNOTATION = (HEIGHT, WIDTH, FILE, ID, *EDGES, LABEL, TEXT, CROWD, DIFFICULT, AREA)
_NAME = re.compile(r"(?:coco_)?(?P<split>train|validation|val|test)(?:\.record)?-\d+-of-\d+(\.tfrecords?)?")
BOX_TFRECORD = ShardNaming("tfrecord", "TFRecords", _NAME, _NAME)
LABEL_MAP = "label_map.pbtxt"  # TensorFlow's name for it
_ITEM = re.compile(r"item\s*\{([^{}]*)\}")
_ITEM_ID = re.compile(r"\bid\s*:\s*(\d+)")
_ITEM_NAME = re.compile(r"""\bname\s*:\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""")
_MAX_DIGITS = 18  # of an id: an int64 holds it
_MAX_ID = 1000  # characters of an id that is a text
_COUNT_BITS = 16  # the index stores the number of usable boxes in the low bits, of unusable ones above
_MAX_COUNT = (1 << _COUNT_BITS) - 1

Features = dict[str, Values]


class BoxTFRecordDataset(DetectionDataset):
    """One split of TFRecords; the index stores box counts instead of labels."""

    kind = "tfrecord"

    def __init__(self, root: Path, split: Split, data: DataConfig, why: str = "", is_lenient: bool = False) -> None:
        self._shards = find_shards(BOX_TFRECORD, root, split)
        index = _open_index(root, split)
        names = _class_names(root, index if split == "train" else _open_index(root, "train"))
        self.class_ids = tuple(sorted(names))
        self.class_names = tuple(names[number] for number in self.class_ids)
        self._index = index
        self._data, self._split = data, split
        self._is_lenient = is_lenient  # for inspection: keep every box and image
        self.origin = f"TFRecords with boxes at {root}" + (f" ({why})" if why else "") + f"; index {index.stored}"
        counts = index.rows["label"].astype(np.int64)
        self._usable, bad = counts & _MAX_COUNT, counts >> _COUNT_BITS
        self._used = np.arange(len(counts))
        if not is_lenient:
            self._apply_policies(bad)

    def _apply_policies(self, bad: I64) -> None:
        """Leave out or refuse images and boxes as the recipe says; `bad` are the unusable boxes of each record."""
        data, split, counts = self._data, self._split, self._usable
        if split == "train" and data.empty_images == "drop":
            self._used = np.flatnonzero(counts > 0)
        if not len(self._used):
            raise AnnotationError("no training image has a usable box", where=str(self._shards.folder))
        if bad.sum() and data.bad_boxes == "stop":
            self._annotation_of_row(int(bad.argmax()))
        elif bad.sum() and split == "train":
            self.notes += (f"{int(bad.sum()):,} boxes are unusable (data.bad_boxes: {data.bad_boxes})",)
        if len(self._used) < len(counts):
            text = f"{len(self._used):,} of {len(counts):,} images have a usable box; the others are left out"
            self.notes += (text,)
        self.origin = "; ".join((self.origin, *self.notes))

    def __len__(self) -> int:
        return len(self._used)

    def __getitem__(self, index: int) -> Sample:
        """The image and its boxes."""
        path, start, length = self._locate(int(self._used[index]))
        features = _parse(path, start, read_record(path, start, length))
        values = features.get(IMAGE, ())
        where = f"{path}, byte {start}"
        if len(values) != 1 or not isinstance(values[0], bytes):
            why = f"{len(values)} values instead of one image"
            raise record_error(path, start - HEADER_BYTES, f"record has no {IMAGE}", why)
        return Sample(values[0], NO_TARGET, where, self._annotation(features, where))

    def annotation(self, index: int) -> Annotation:
        """The boxes; the image is not read."""
        return self._annotation_of_row(int(self._used[index]))

    def _annotation_of_row(self, row: int) -> Annotation:
        path, start, length = self._locate(row)
        return self._annotation(_peek_annotation(ReadWindow(path), path, start, length), f"{path}, byte {start}")

    def _annotation(self, features: Features, where: str) -> Annotation:
        """The boxes of a record after the recipe's policies."""
        table = _record_table(features, where, self.class_ids)
        if not self._is_lenient:
            table, _, _ = apply_box_policies(table, _keep_empty_images(self._data), self._split)
        size = int(_first_number(features, HEIGHT)), int(_first_number(features, WIDTH))
        return table.annotation(0, size)

    def _locate(self, row: int) -> tuple[str, int, int]:
        offset, length, shard, _ = self._index.rows[row].item()
        return str(self._shards.folder / self._shards.names[shard]), offset, length

    def box_counts(self) -> I64:
        """The number of usable boxes of each image."""
        return self._usable[self._used]

    def fingerprint(self) -> str:
        """The digest of all records from the index, and the policies."""
        return f"{self._index.digest}/{len(self.class_ids)}/{len(self)}/{self._data.bad_boxes}"


def records_have_boxes(root: Path) -> bool:
    """True if the first record has features for boxes."""
    file = first_shard(BOX_TFRECORD, root)
    if file is None:
        return False
    window = ReadWindow(file)
    first = next(record_spans(window), None)
    try:
        return first is not None and bool({LABEL, *EDGES} & set(peek_features(window, *first, (LABEL, *EDGES))))
    except MalformedError as error:
        raise _no_example(str(file), first[0] if first else 0, error) from error


def read_box_records(root: Path, split: Split, data: DataConfig) -> BoxTable:
    """All boxes of a split in the order of the records."""
    shards, names = find_shards(BOX_TFRECORD, root, split), _class_names(root, _open_index(root, "train"))
    class_ids = tuple(sorted(names))
    tables = []
    for name in shards.names:
        path = str(shards.folder / name)
        window = ReadWindow(path)
        for start, length in record_spans(window):
            features = _peek_annotation(window, path, start, length)
            tables.append(_record_table(features, f"{path}, byte {start}", class_ids))
    return replace(concat_tables(tables), class_names=tuple(names[number] for number in class_ids))


def format_label_map(names: Mapping[int, str]) -> str:
    """The content of label_map.pbtxt."""
    items = (f"item {{\n  id: {number}\n  name: {_quote(name)}\n}}\n" for number, name in sorted(names.items()))
    return "".join(items)


def _quote(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _class_names(root: Path, train_index: ShardIndex) -> dict[int, str]:
    """Class names by id: from label_map.pbtxt, else from the training records."""
    file = find_shards(BOX_TFRECORD, root, "train").folder / LABEL_MAP
    if not file.is_file():
        return dict(train_index.names)
    names: dict[int, str] = {}
    for item in _ITEM.findall(read_bounded_text(file, read_limits.NAMES_BYTES).decode("utf-8-sig", "surrogateescape")):
        number, name = _ITEM_ID.search(item), _ITEM_NAME.search(item)
        if number is None or name is None or len(number[1]) > _MAX_DIGITS:
            why = f"one of its items is {{{item:.200}}}"
            raise AnnotationError(
                f"an item of {LABEL_MAP} has no id or no name", where=str(file), why=why, hint="add it"
            )
        names[int(number[1])] = re.sub(r"\\(.)", r"\1", name[1][1:-1])
    if not names:
        raise AnnotationError(f"{LABEL_MAP} has no items", where=str(file), hint="add the classes, or remove the file")
    return names


def _keep_empty_images(data: DataConfig) -> DataConfig:
    return data.model_copy(update={"empty_images": "keep"})


def _open_index(root: Path, split: Split) -> ShardIndex:
    shards = find_shards(BOX_TFRECORD, root, split)
    return open_index("boxes", split, shards.folder, shards.names, _scan_shard)


def _scan_shard(path: str) -> ScannedShard:
    """Offset, length and box counts of every record; the images are not read."""
    window = ReadWindow(path)
    samples: list[tuple[int, int, int]] = []
    names: dict[int, str] = {}
    digest = hashlib.blake2b(digest_size=16)
    for start, length in record_spans(window):
        features = _peek_annotation(window, path, start, length)
        labels, texts = _ints(features, LABEL), features.get(TEXT, ())
        for number, label in enumerate(labels):
            text = texts[number] if number < len(texts) else b""
            name = text.decode("utf-8", "replace") if isinstance(text, bytes) else ""
            if label not in names:
                names[label] = name or f"class{label}"
        table = _record_table(features, f"{path}, byte {start}", tuple(sorted(set(labels))))
        num_bad = sum(len(rows) for rows in find_bad_boxes(table).values())
        samples.append((start, length, min(len(labels) - num_bad, _MAX_COUNT) | num_bad << _COUNT_BITS))
        digest.update(window.read(start + length, FOOTER_BYTES))
    return ScannedShard(samples, digest.digest(), names)


def _record_table(features: Features, where: str, class_ids: tuple[int, ...]) -> BoxTable:
    """The table of one record."""
    builder = BoxTableBuilder(tuple(map(str, class_ids)), class_ids, is_relative=True)
    name = _first_text(features, ID) or _first_text(features, FILE)
    builder.add_image(name, where, int(name) if name.isdecimal() and len(name) <= _MAX_DIGITS else name[:_MAX_ID])
    labels = _ints(features, LABEL)
    labels_by_id = {number: label for label, number in enumerate(class_ids)}
    edges = [_floats(features, edge) for edge in EDGES]
    if len({len(labels), *map(len, edges)}) != 1:
        counts = ", ".join(f"{key.rpartition('/')[2]} {len(features.get(key, ()))}" for key in (LABEL, *EDGES))
        raise AnnotationError(
            "record has box features of different lengths", where=where, why=counts, hint="write the record again"
        )
    difficult = _flags(features, DIFFICULT, len(labels))
    for label, corners, is_difficult in zip(labels, zip(*edges, strict=True), difficult, strict=True):
        left, top, right, bottom = corners
        builder.add_box((left, top, right, bottom), labels_by_id.get(label, UNKNOWN), is_difficult)
    table = builder.build()
    areas = _floats(features, AREA)
    if areas and len(areas) == len(labels):
        pixels = max(1.0, _first_number(features, HEIGHT) * _first_number(features, WIDTH))
        table = replace(table, area=(np.array(areas) / pixels).astype(np.float32))
    return replace(table, is_crowd=np.array(_flags(features, CROWD, len(labels)), bool))


def _parse(path: str, start: int, content: bytes) -> Features:
    try:
        return parse_example(content)
    except MalformedError as error:
        raise _no_example(path, start, error) from error


def _peek_annotation(window: ReadWindow, path: str, start: int, length: int) -> Features:
    """The features of a record without its image."""
    try:
        return peek_features(window, start, length, _ANNOTATION)
    except MalformedError as error:
        raise _no_example(path, start, error) from error


def _no_example(path: str, start: int, error: MalformedError) -> DataError:
    return record_error(path, start - HEADER_BYTES, "record is not a tf.train.Example", str(error))


def _floats(features: Features, key: str) -> list[float]:
    return [float(value) for value in features.get(key, ()) if not isinstance(value, bytes)]


def _ints(features: Features, key: str) -> list[int]:
    return [value for value in features.get(key, ()) if isinstance(value, int)]


def _flags(features: Features, key: str, count: int) -> list[bool]:
    """One flag per box; False if the record has none."""
    flags = [bool(value) for value in _ints(features, key)]
    return flags if len(flags) == count else [False] * count


def _first_number(features: Features, key: str) -> float:
    values = _ints(features, key)
    return values[0] if values else 0


def _first_text(features: Features, key: str) -> str:
    values = features.get(key, ())
    return values[0].decode("utf-8", "replace") if values and isinstance(values[0], bytes) else ""
