"""ImageNet as TFRecords, in the two published layouts: train/ and validation/, or all shards in one folder.

Label 1 of the files is class 0. No record is used whose checksums do not match.
"""

from __future__ import annotations

import hashlib
import re

from reconv.data.readers.shards.dataset import ShardFormat, check_label
from reconv.data.readers.shards.index import ScannedShard
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
from reconv.storage.local import ReadWindow
from reconv.storage.tensorflow_encoding import MalformedError

IMAGE, LABEL, SYNSET, TEXT = "image/encoded", "image/class/label", "image/class/synset", "image/class/text"
_WANTED = (LABEL, SYNSET, TEXT)
_MAX_RECORD_BYTES = (1 << 32) - 1  # that a row of the index can hold
_NAME = re.compile(r"(?P<split>train|validation|val|test)-\d+-of-\d+(\.tfrecords?)?")


def _scan_shard(path: str) -> ScannedShard:
    """Offset, length and label of every record; the images are not read."""
    window = ReadWindow(path)
    samples: list[tuple[int, int, int]] = []
    names: dict[int, str] = {}
    digest = hashlib.blake2b(digest_size=16)
    for start, length in record_spans(window):
        at = start - HEADER_BYTES
        if length > _MAX_RECORD_BYTES:
            raise record_error(path, at, f"record has {length} bytes", "the index supports records below 4 GiB")
        try:
            features = peek_features(window, start, length, _WANTED)
        except MalformedError as error:
            raise record_error(path, at, "record is not a tf.train.Example", str(error)) from error
        label = check_label(TFRECORD.first_label, _label(path, at, features.get(LABEL, ())), f"{path}, byte {at}")
        if label not in names and (name := _text(features.get(SYNSET, ())) or _text(features.get(TEXT, ()))):
            names[label] = name
        samples.append((start, length, label))
        # The stored checksum stands for the record's content, which is not read here.
        digest.update(label.to_bytes(8, "little") + window.read(start + length, FOOTER_BYTES))
    return ScannedShard(samples, digest.digest(), names)


def _read_image(path: str, start: int, length: int) -> bytes:
    """The encoded image of a record."""
    at = start - HEADER_BYTES
    try:
        values = parse_example(read_record(path, start, length)).get(IMAGE, ())
    except MalformedError as error:
        raise record_error(path, at, "record is not a tf.train.Example", str(error)) from error
    if len(values) != 1 or not isinstance(values[0], bytes):
        raise record_error(path, at, f"record has no {IMAGE}", f"{len(values)} values instead of one image")
    return values[0]


def _label(path: str, at: int, values: Values) -> int:
    if len(values) != 1 or not isinstance(values[0], int):
        raise record_error(path, at, f"record has no {LABEL}", f"{len(values)} values instead of one number")
    return values[0]


def _text(values: Values) -> str:
    return values[0].decode("utf-8", "replace") if values and isinstance(values[0], bytes) else ""


TFRECORD = ShardFormat("tfrecord", "TFRecords", _NAME, _NAME, 1, _scan_shard, _read_image)
