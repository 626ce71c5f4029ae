"""ImageNet as TFRecords, in the two published layouts: train/ and validation/, or all shards in one folder.

Owns which features are read and the label's offset. Refuses to know framing and decoding. Invariant: label 1 of the
files is class 0, and no record is used whose checksums do not match.
"""

from __future__ import annotations

import hashlib
import re

from reconv.data.readers.shards.shard_dataset import ShardFormat, check_label
from reconv.data.readers.shards.shard_index import Scanned
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
from reconv.data.storage.local import ReadWindow
from reconv.io.protobuf import MalformedError

IMAGE, LABEL, SYNSET, TEXT = "image/encoded", "image/class/label", "image/class/synset", "image/class/text"
_WANTED = (LABEL, SYNSET, TEXT)
_MAX_RECORD_BYTES = (1 << 32) - 1  # what a row of the index can hold
_NAME = re.compile(r"(?P<split>train|validation|val)-\d+-of-\d+(\.tfrecords?)?")


def _scan(path: str) -> Scanned:
    """Every record's place and label; the image itself is skipped over."""
    window = ReadWindow(path)
    samples: list[tuple[int, int, int]] = []
    names: dict[int, str] = {}
    digest = hashlib.blake2b(digest_size=16)
    for start, length in record_spans(window):
        at = start - HEADER_BYTES
        if length > _MAX_RECORD_BYTES:
            raise broken(path, at, f"record of {length} bytes", "no image is that large")
        try:
            features = peek_features(window, start, length, _WANTED)
        except MalformedError as error:
            raise broken(path, at, "record that is no tf.train.Example", str(error)) from error
        label = check_label(TFRECORD.first_label, _label(path, at, features.get(LABEL, ())), f"{path}, byte {at}")
        if label not in names and (name := _text(features.get(SYNSET, ())) or _text(features.get(TEXT, ()))):
            names[label] = name
        samples.append((start, length, label))
        # The stored checksum stands for the record's content, which is not read here.
        digest.update(label.to_bytes(8, "little") + window.take(start + length, FOOTER_BYTES))
    return Scanned(samples, digest.digest(), names)


def _read(path: str, start: int, length: int) -> bytes:
    """The encoded image of a record."""
    at = start - HEADER_BYTES
    try:
        values = parse_example(read_record(path, start, length)).get(IMAGE, ())
    except MalformedError as error:
        raise broken(path, at, "record that is no tf.train.Example", str(error)) from error
    if len(values) != 1 or not isinstance(values[0], bytes):
        raise broken(path, at, f"record without {IMAGE}", f"{len(values)} values, one image is expected")
    return values[0]


def _label(path: str, at: int, values: Values) -> int:
    if len(values) != 1 or not isinstance(values[0], int):
        raise broken(path, at, f"record without {LABEL}", f"{len(values)} values, one number is expected")
    return values[0]


def _text(values: Values) -> str:
    return values[0].decode("utf-8", "replace") if values and isinstance(values[0], bytes) else ""


TFRECORD = ShardFormat("tfrecord", "TFRecords", _NAME, _NAME, 1, _scan, _read)
