"""Images with boxes as TFRecords, in the layout of TensorFlow's object detection programs.

Owns which features are read and what they mean. Refuses to know framing and decoding. Invariant: classes are those of
`label_map.pbtxt` beside the shards, which names those that no record has too, or else labels of the training shards;
in their order, which may have gaps. Boxes are fractions in the files; no record is used whose checksums do not match.

The index keeps, instead of a label, how many boxes of a record are usable and how many are not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from reconv.data.boxes.annotations import NO_TARGET, Annotation, AnnotationError, DetectionDataset
from reconv.data.boxes.box_table import UNKNOWN, BoxTable, TableBuilder, find_faults, joined, settled
from reconv.data.dataset import I64, Sample, Split
from reconv.data.readers.shards.shard_dataset import Naming, find_shards, first_shard
from reconv.data.readers.shards.shard_index import Index, Scanned, open_index
from reconv.data.readers.shards.tfrecord_format import (
    FOOTER_BYTES,
    HEADER_BYTES,
    Values,
    broken,
    parse_example,
    peek_features,
    read_record,
    record_spans,
)
from reconv.data.storage.local import ReadWindow, read
from reconv.io.protobuf import MalformedError
from reconv.recipe.data_fields import DataConfig

IMAGE = "image/encoded"
HEIGHT, WIDTH, FILE, ID = "image/height", "image/width", "image/filename", "image/source_id"
EDGES = tuple(f"image/object/bbox/{edge}" for edge in ("xmin", "ymin", "xmax", "ymax"))
LABEL, TEXT = "image/object/class/label", "image/object/class/text"
CROWD, DIFFICULT, AREA = "image/object/is_crowd", "image/object/difficult", "image/object/area"
_ABOUT = (HEIGHT, WIDTH, FILE, ID, *EDGES, LABEL, TEXT, CROWD, DIFFICULT, AREA)
_NAME = re.compile(r"(?:coco_)?(?P<split>train|validation|val)(?:\.record)?-\d+-of-\d+(\.tfrecords?)?")
BOX_TFRECORD = Naming("tfrecord", "TFRecords", _NAME, _NAME)
LABEL_MAP = "label_map.pbtxt"  # what TensorFlow's programs call it
_ITEM = re.compile(r"item\s*\{([^{}]*)\}")
_ITEM_ID = re.compile(r"\bid\s*:\s*(\d+)")
_ITEM_NAME = re.compile(r"""\bname\s*:\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""")
_BAD_BITS = 16  # the index's number: usable boxes, and above these bits the others
_MOST = (1 << _BAD_BITS) - 1

Features = dict[str, Values]


class BoxTFRecordDataset(DetectionDataset):
    """One split of a set of record files."""

    kind = "tfrecord"

    def __init__(self, root: Path, split: Split, data: DataConfig, why: str = "", is_patient: bool = False) -> None:
        self._shards = find_shards(BOX_TFRECORD, root, split)
        index = _open_index(root, split)
        names = _class_names(root, index if split == "train" else _open_index(root, "train"))
        self.class_ids = tuple(sorted(names))
        self.class_names = tuple(names[number] for number in self.class_ids)
        self._index = index
        self._data, self._split = data, split
        self._is_patient = is_patient  # looked at as it is, whatever is wrong with it
        self.origin = f"TFRecords with boxes at {root}" + (f" ({why})" if why else "") + f"; index {index.kept}"
        counts = index.rows["label"].astype(np.int64)
        self._usable, bad = counts & _MOST, counts >> _BAD_BITS
        self._used = np.arange(len(counts))
        if not is_patient:
            self._choose(bad)

    def _choose(self, bad: I64) -> None:
        """Leave out, or refuse, what the recipe says."""
        data, split, counts = self._data, self._split, self._usable
        if split == "train" and data.empty_images == "drop":
            self._used = np.flatnonzero(counts > 0)
        if not len(self._used):
            raise AnnotationError("no training image has a usable box", where=str(self._shards.folder))
        if bad.sum() and data.bad_boxes == "stop":
            self._annotation_of_row(int(bad.argmax()))
        elif bad.sum() and split == "train":
            self.notes += (f"{int(bad.sum()):,} boxes are not usable as they are ({data.bad_boxes})",)
        if len(self._used) < len(counts):
            text = f"{len(self._used):,} of {len(counts):,} images have a usable box, the others are left out"
            self.notes += (text,)
        self.origin = "; ".join((self.origin, *self.notes))

    def __len__(self) -> int:
        return len(self._used)

    def __getitem__(self, index: int) -> Sample:
        """The image and its boxes."""
        path, start, length = self._place(int(self._used[index]))
        features = _parse(path, start, read_record(path, start, length))
        values = features.get(IMAGE, ())
        where = f"{path}, byte {start}"
        if len(values) != 1 or not isinstance(values[0], bytes):
            why = f"{len(values)} values, one image is expected"
            raise broken(path, start - HEADER_BYTES, f"record without {IMAGE}", why)
        return Sample(values[0], NO_TARGET, where, self._annotation(features, where))

    def annotation(self, index: int) -> Annotation:
        """The boxes; the image is skipped over."""
        return self._annotation_of_row(int(self._used[index]))

    def _annotation_of_row(self, row: int) -> Annotation:
        path, start, length = self._place(row)
        return self._annotation(peek_features(ReadWindow(path), start, length, _ABOUT), f"{path}, byte {start}")

    def _annotation(self, features: Features, where: str) -> Annotation:
        """The boxes of a record, by the recipe's policies."""
        table = _table(features, where, self.class_ids)
        if not self._is_patient:
            table, _, _ = settled(table, _keeping_empty(self._data), self._split)
        size = int(_one(features, HEIGHT)), int(_one(features, WIDTH))
        return table.annotation(0, size)

    def _place(self, row: int) -> tuple[str, int, int]:
        offset, length, shard, _ = self._index.rows[row].item()
        return str(self._shards.folder / self._shards.names[shard]), offset, length

    def box_counts(self) -> I64:
        """How many usable boxes each image has."""
        return self._usable[self._used]

    def fingerprint(self) -> str:
        """The digest of all records, taken when they were indexed, with the policies."""
        return f"{self._index.digest}/{len(self.class_ids)}/{len(self)}/{self._data.bad_boxes}"


def has_boxes(root: Path) -> bool:
    """Whether the first record of a set has places for boxes."""
    file = first_shard(BOX_TFRECORD, root)
    if file is None:
        return False
    window = ReadWindow(file)
    first = next(record_spans(window), None)
    return first is not None and bool({LABEL, *EDGES} & set(peek_features(window, *first, (LABEL, *EDGES))))


def read_box_records(root: Path, split: Split) -> BoxTable:
    """All boxes of a split in one table, in the order of the records."""
    shards, names = find_shards(BOX_TFRECORD, root, split), _class_names(root, _open_index(root, "train"))
    class_ids = tuple(sorted(names))
    tables = []
    for name in shards.names:
        path = str(shards.folder / name)
        window = ReadWindow(path)
        for start, length in record_spans(window):
            tables.append(_table(peek_features(window, start, length, _ABOUT), f"{path}, byte {start}", class_ids))
    return replace(joined(tables), class_names=tuple(names[number] for number in class_ids))


def label_map(names: Mapping[int, str]) -> str:
    """The text of a label map."""
    items = (f"item {{\n  id: {number}\n  name: {_quoted(name)}\n}}\n" for number, name in sorted(names.items()))
    return "".join(items)


def _quoted(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _class_names(root: Path, trained: Index) -> dict[int, str]:
    """Names by number: those of the label map, else those that the training records have."""
    file = find_shards(BOX_TFRECORD, root, "train").folder / LABEL_MAP
    if not file.is_file():
        return dict(trained.names)
    names: dict[int, str] = {}
    for item in _ITEM.findall(read(file).decode("utf-8-sig", "surrogateescape")):
        number, name = _ITEM_ID.search(item), _ITEM_NAME.search(item)
        if number is None or name is None:
            why = f"one of its items is {{{item}}}"
            raise AnnotationError(
                f"an item of {LABEL_MAP} has no id or no name", where=str(file), why=why, then="name it"
            )
        names[int(number[1])] = re.sub(r"\\(.)", r"\1", name[1][1:-1])
    if not names:
        raise AnnotationError(f"{LABEL_MAP} has no item", where=str(file), then="name the classes in it, or remove it")
    return names


def _keeping_empty(data: DataConfig) -> DataConfig:
    return data.model_copy(update={"empty_images": "keep"})


def _open_index(root: Path, split: Split) -> Index:
    shards = find_shards(BOX_TFRECORD, root, split)
    return open_index("boxes", split, shards.folder, shards.names, _scan)


def _scan(path: str) -> Scanned:
    """Every record's place and how many boxes it has; the image itself is skipped over."""
    window = ReadWindow(path)
    samples: list[tuple[int, int, int]] = []
    names: dict[int, str] = {}
    digest = hashlib.blake2b(digest_size=16)
    for start, length in record_spans(window):
        try:
            features = peek_features(window, start, length, _ABOUT)
        except MalformedError as error:
            raise broken(path, start - HEADER_BYTES, "record that is no tf.train.Example", str(error)) from error
        labels, texts = _ints(features, LABEL), features.get(TEXT, ())
        for place, label in enumerate(labels):
            text = texts[place] if place < len(texts) else b""
            said = text.decode("utf-8", "replace") if isinstance(text, bytes) else ""
            if label not in names:
                names[label] = said or f"class{label}"
        table = _table(features, f"{path}, byte {start}", tuple(sorted(set(labels))))
        num_bad = sum(len(rows) for rows in find_faults(table).values())
        samples.append((start, length, min(len(labels) - num_bad, _MOST) | num_bad << _BAD_BITS))
        digest.update(window.take(start + length, FOOTER_BYTES))
    return Scanned(samples, digest.digest(), names)


def _table(features: Features, where: str, class_ids: tuple[int, ...]) -> BoxTable:
    """The table of one record; crowds and areas come with it."""
    builder = TableBuilder(tuple(map(str, class_ids)), class_ids, is_relative=True)
    name = _one_text(features, ID) or _one_text(features, FILE)
    builder.picture(name, where, int(name) if name.isdecimal() else name)
    labels = _ints(features, LABEL)
    numbers = {number: label for label, number in enumerate(class_ids)}
    edges = [_floats(features, edge) for edge in EDGES]
    if len({len(labels), *map(len, edges)}) != 1:
        counts = ", ".join(f"{key.rpartition('/')[2]} {len(features.get(key, ()))}" for key in (LABEL, *EDGES))
        raise AnnotationError("record with lists of different lengths", where=where, why=counts, then="write it again")
    difficult = _flags(features, DIFFICULT, len(labels))
    for label, corners, is_difficult in zip(labels, zip(*edges, strict=True), difficult, strict=True):
        left, top, right, bottom = corners
        builder.box((left, top, right, bottom), numbers.get(label, UNKNOWN), is_difficult)
    table = builder.table()
    areas = _floats(features, AREA)
    if areas and len(areas) == len(labels):
        pixels = max(1.0, _one(features, HEIGHT) * _one(features, WIDTH))
        table = replace(table, area=(np.array(areas) / pixels).astype(np.float32))
    return replace(table, is_crowd=np.array(_flags(features, CROWD, len(labels)), bool))


def _parse(path: str, start: int, content: bytes) -> Features:
    try:
        return parse_example(content)
    except MalformedError as error:
        raise broken(path, start - HEADER_BYTES, "record that is no tf.train.Example", str(error)) from error


def _floats(features: Features, key: str) -> list[float]:
    return [float(value) for value in features.get(key, ()) if not isinstance(value, bytes)]


def _ints(features: Features, key: str) -> list[int]:
    return [value for value in features.get(key, ()) if isinstance(value, int)]


def _flags(features: Features, key: str, count: int) -> list[bool]:
    """As many flags as there are boxes; a writer that leaves them out means none."""
    flags = [bool(value) for value in _ints(features, key)]
    return flags if len(flags) == count else [False] * count


def _one(features: Features, key: str) -> float:
    values = _ints(features, key)
    return values[0] if values else 0


def _one_text(features: Features, key: str) -> str:
    values = features.get(key, ())
    return values[0].decode("utf-8", "replace") if values and isinstance(values[0], bytes) else ""
