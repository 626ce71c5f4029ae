"""Malicious tar, TFRecord and packed shards, and indexes of shards."""

# ruff: noqa: E501
from __future__ import annotations

import gzip
import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from malicious_cases import (
    CASES,
    DEEP,
    DIGITS,
    IMAGE,
    Case,
    Context,
    box_example,
    case,
    edit_packed,
    example,
    packed_shard,
    tar_bytes,
    train_arguments,
)

from reconv.data.readers.shards.tfrecord_format import write_records
from reconv.storage.tensorflow_encoding import encode_bytes_field, encode_varint, masked_crc32c

# tar


def tar_header(name: bytes, size: bytes, kind: bytes) -> bytes:
    header = bytearray(512)
    header[: len(name)] = name
    header[100:108], header[108:116], header[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    header[124 : 124 + len(size)] = size
    header[136:148] = b"00000000000\0"
    header[156:157] = kind
    header[257:265] = b"ustar\x0000"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def _pax(content: bytes) -> bytes:
    padded = content + bytes(-len(content) % 512)
    return tar_header(b"pax", b"%011o\0" % len(content), b"x") + padded + tar_header(b"a.jpg", b"00000000000\0", b"0")


TAR_END = bytes(1024)
TAR = {
    "truncated": tar_bytes({"a.jpg": IMAGE, "a.cls": b"0"})[:900],
    "huge-size": tar_header(b"a.jpg", b"77777777777\0", b"0") + TAR_END,
    "base256-size": tar_header(b"a.jpg", b"\x80" + b"\xff" * 11, b"0") + TAR_END,
    "negative-size": tar_header(b"a.jpg", b"\xff" * 12, b"0") + TAR_END,
    "longname-huge": tar_header(b"L", b"77777777777\0", b"L") + TAR_END,
    "longname-chain": (tar_header(b"L", b"00000000001\0", b"L") + bytes(512)) * 20_000 + TAR_END,
    "pax-chain": tar_header(b"p", b"00000000000\0", b"x") * 20_000 + TAR_END,
    "pax-size": _pax(b"30 size=" + b"9" * 20 + b"\n") + TAR_END,
    "pax-size-digits": _pax(b"%d size=%b\n" % (5012, DIGITS.encode()[:5000])) + TAR_END,
    "pax-length-digits": _pax(DIGITS.encode() + b" size=1\n") + TAR_END,
    "pax-sparse": _pax(b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n") + TAR_END,
    "pax-sparse-map": _pax(b"33 GNU.sparse.map=0,99999999,1,1\n") + TAR_END,
    "sparse": tar_header(b"a.jpg", b"00000000000\0", b"S") + TAR_END,
    "symlink": tar_header(b"a.jpg", b"00000000000\0", b"2") + TAR_END,
    "device": tar_header(b"a.jpg", b"00000000000\0", b"3") + TAR_END,
    "fifo": tar_header(b"a.jpg", b"00000000000\0", b"6") + TAR_END,
    "label-digits": tar_bytes({"a.jpg": IMAGE, "a.cls": DIGITS.encode()}),
    "label-64-digits": tar_bytes({"a.jpg": IMAGE, "a.cls": b"9" * 60}),
    "label-nan": tar_bytes({"a.jpg": IMAGE, "a.cls": b"nan"}),
    "label-negative": tar_bytes({"a.jpg": IMAGE, "a.cls": b"-1"}),
    "label-million": tar_bytes({"a.jpg": IMAGE, "a.cls": b"1048576"}),
    "name-up": tar_bytes({"../../a.jpg": IMAGE, "../../a.cls": b"0"}),
    "name-not-utf8": tar_bytes({"\udcff.jpg": IMAGE, "\udcff.cls": b"0"}),
    "many-members": b"".join(tar_header(b"%d.txt" % n, b"00000000000\0", b"0") for n in range(20_000)) + TAR_END,
}  # fmt: skip
for _name, _content in TAR.items():

    def _check_tar(context: Context, content: bytes = _content) -> list[str]:
        root = context.data("tar")
        (root / "train-0000.tar").write_bytes(content)
        return ["data", "check", str(root)]

    CASES[f"tar-content/{_name}"] = _check_tar


@case("tar-content/label-million-train")
def _(context: Context) -> list[str]:
    root = context.data("tar")
    members = {"a.jpg": IMAGE, "a.cls": b"1048576", "b.jpg": IMAGE, "b.cls": b"1", "c.jpg": IMAGE, "c.cls": b"1"}
    (root / "train-0000.tar").write_bytes(tar_bytes(members))
    return train_arguments(root)


@case("tar-content/shard-number")
def _(context: Context) -> list[str]:
    root = context.data("tar")
    (root / "train-0000.tar").rename(root / "train-99999999999999.tar")
    return ["data", "check", str(root)]


@case("tar-content/shard-count")
def _(context: Context) -> list[str]:
    root = context.data("tfrecord")
    (root / "train-00000-of-00001").rename(root / "train-00000-of-99999999999999")
    return ["data", "check", str(root)]


@case("packed-content/shard-count")
def _(context: Context) -> list[str]:
    root = context.data("packed")
    packed_shard(root / "train-00000-of-00001.packed", "train", num_shards=10**14)
    return ["data", "check", str(root)]


# TFRecord


def _record(length: int, content: bytes) -> bytes:
    head = length.to_bytes(8, "little")
    return head + masked_crc32c(head).to_bytes(4, "little") + content + masked_crc32c(content).to_bytes(4, "little")


def _feature(name: bytes, value: bytes) -> bytes:
    entry = encode_bytes_field(1, name) + encode_bytes_field(2, value)
    return encode_bytes_field(1, encode_bytes_field(1, entry))


def _nested(depth: int) -> bytes:
    content = b""
    for _ in range(depth):
        content = encode_bytes_field(1, content)
    return content


_LABEL = b"image/class/label"
RECORDS = {
    "length-huge": _record(2**63, b"abc"),
    "length-max": _record(2**64 - 1, b"abc"),
    "length-4g": _record(5 << 30, b"abc"),
    "nested": _record(len(_nested(3000)), _nested(3000)),
    "no-example": _record(3, b"abc"),
    "empty-record": _record(0, b""),
    "many-empty-records": _record(0, b"") * 50_000,
    "group-wire-type": _record(1, b"\x0b"),
    "varint-long": _record(12, b"\x08" + b"\xff" * 11),
    "label-many": _record(len(_c := _feature(_LABEL, encode_bytes_field(3, encode_bytes_field(1, b"\1" * 1_000_000)))), _c),
    "label-bytes": _record(len(_c := _feature(_LABEL, encode_bytes_field(1, encode_bytes_field(1, b"1")))), _c),
    "label-float": _record(len(_c := _feature(_LABEL, encode_bytes_field(2, encode_bytes_field(1, b"\0\0\xc0\x7f")))), _c),
    "label-float-odd": _record(len(_c := _feature(_LABEL, encode_bytes_field(2, encode_bytes_field(1, b"\0\0\xc0")))), _c),
    "label-negative": _record(len(_c := example(0, label=[-5])), _c),
    "label-zero": _record(len(_c := example(0, label=[0])), _c),
    "label-huge": _record(len(_c := example(0, label=[2**62])), _c),
    "label-million": _record(len(_c := example(0, label=[1 << 20])), _c) + _record(len(_c := example(1)), _c),
    "name-not-utf8": _record(len(_c := _feature(b"\xff\xfe", b"")), _c),
    "synset-not-utf8": _record(len(_c := example(0, synset=[b"\xff\xfe\x1b[31m"])), _c) * 3,
    "synset-long": _record(len(_c := example(0, synset=[b"n" * 5_000_000])), _c) * 3,
    "gzip": gzip.compress(bytes(100_000)),
    "feature-number": _record(len(_c := encode_bytes_field(1, encode_varint(8) + encode_varint(7))), _c),
}  # fmt: skip
for _name, _content in RECORDS.items():

    def _check_records(context: Context, content: bytes = _content) -> list[str]:
        root = context.data("tfrecord")
        (root / "train-00000-of-00001").write_bytes(content)
        return ["data", "check", str(root)]

    CASES[f"tfrecord-content/{_name}"] = _check_records

BOX_RECORDS: dict[str, dict[str, Any]] = {
    "nan": {"image__object__bbox__xmin": [float("nan")]},
    "inf": {"image__object__bbox__xmax": [float("inf")]},
    "id-digits": {"image__source_id": [DIGITS.encode()]},
    "id-unicode": {"image__source_id": ["٣".encode()]},
    "id-not-utf8": {"image__source_id": [b"\xff\xfe"]},
    "label-text": {"image__object__class__label": [b"cat"]},
    "label-float": {"image__object__class__label": [1.5]},
    "label-huge": {"image__object__class__label": [2**62]},
    "label-negative": {"image__object__class__label": [-7]},
    "xmin-text": {"image__object__bbox__xmin": [b"left"]},
    "xmin-int": {"image__object__bbox__xmin": [2**62]},
    "height-huge": {"image__height": [2**62], "image__width": [2**62]},
    "height-negative": {"image__height": [-1]},
    "height-text": {"image__height": [b"x"]},
    "area-nan": {"image__object__area": [float("nan")]},
    "no-boxes": {"image__object__bbox__xmin": []},
    "many-boxes": {
        f"image__object__{name}": [value] * 100_000
        for name, value in (("bbox__xmin", 0.1), ("bbox__ymin", 0.1), ("bbox__xmax", 0.2), ("bbox__ymax", 0.2), ("class__label", 1))
    },
    "many-bad-boxes": {
        f"image__object__{name}": [value] * 100_000
        for name, value in (("bbox__xmin", 0.1), ("bbox__ymin", 0.1), ("bbox__xmax", 0.1), ("bbox__ymax", 0.2), ("class__label", 1))
    },
    "image-number": {"image__encoded": [7]},
    "text-not-utf8": {"image__object__class__text": [b"\xff\xfe"]},
}  # fmt: skip
for _name, _changes in BOX_RECORDS.items():

    def _check_boxes(context: Context, changes: dict[str, Any] = _changes) -> list[str]:
        root = context.data("box_tfrecord")
        write_records(root / "train-00000-of-00001", [box_example(0, **changes), box_example(1)])
        return ["data", "check", str(root)]

    CASES[f"box-tfrecord-content/{_name}"] = _check_boxes

LABEL_MAPS = {
    "digits": "item { id: " + DIGITS + " name: 'cat' }",
    "regex": "item {" * 20_000,
    "regex-space": "item" + " " * 100_000,
    "quotes": "item { id: 1 name: '" + "\\" * 50_000,
    "no-name": "item { id: 1 }",
    "huge-item": "item { id: 1 " + "a" * 2_000_000 + "}",
}
for _name, _text in LABEL_MAPS.items():

    def _check_map(context: Context, text: str = _text) -> list[str]:
        root = context.data("box_tfrecord")
        (root / "label_map.pbtxt").write_text(text)
        return ["data", "check", str(root)]

    CASES[f"label-map-content/{_name}"] = _check_map


# packed


def _packed_meta(**changes: Any) -> bytes:
    facts = {
        "split": "train", "shard": 0, "num_shards": 1, "per_shard": 4, "num_samples": 4, "source": "s", "form": "",
        "class_names": ["cat", "dog"], "digest": "d", **changes,
    }  # fmt: skip
    text = json.dumps({name: value for name, value in facts.items() if value != "REMOVE"}).encode()
    return text.replace(b'"DIGITS"', DIGITS.encode())


PACKED: dict[str, dict[str, Any]] = {
    "meta-list": {"meta": b"[]"},
    "meta-deep": {"meta": b"[" * DEEP},
    "meta-digits": {"meta": _packed_meta(per_shard="DIGITS")},
    "meta-text": {"meta": b"hello"},
    "meta-not-utf8": {"meta": b"\xff\xfe"},
    "meta-missing": {"meta": _packed_meta(split="REMOVE")},
    "meta-more": {"meta": _packed_meta(extra=1)},
    "per-shard-zero": {"meta": _packed_meta(per_shard=0)},
    "per-shard-text": {"meta": _packed_meta(per_shard="4")},
    "per-shard-huge": {"meta": _packed_meta(per_shard=10**30)},
    "num-samples-huge": {"meta": _packed_meta(num_samples=10**30)},
    "num-samples-negative": {"meta": _packed_meta(num_samples=-4)},
    "num-shards-text": {"meta": _packed_meta(num_shards="x")},
    "num-shards-zero": {"meta": _packed_meta(num_shards=0)},
    "num-shards-negative": {"meta": _packed_meta(num_shards=-1)},
    "classes-number": {"meta": _packed_meta(class_names=7)},
    "classes-numbers": {"meta": _packed_meta(class_names=[1, 2])},
    "classes-empty": {"meta": _packed_meta(class_names=[])},
    "digest-number": {"meta": _packed_meta(digest=7)},
    "form-list": {"meta": _packed_meta(form=[1])},
    "start-huge": {"entry": {"start": 2**63}},
    "length-huge": {"entry": {"length": 2**32 - 1}},
    "target-huge": {"entry": {"target": 2**31 - 1}},
    "target-negative": {"entry": {"target": -1}},
    "shape": {"entry": {"height": 9, "width": 9, "channels": 3}},
    "shape-huge": {"entry": {"height": 65535, "width": 65535, "channels": 65535}},
    "shape-channels": {"entry": {"height": 1, "width": 1, "channels": 0}},
    "name": {"entry": {"name_start": 2**32 - 1, "name_length": 65535}},
}
for _name, _changes in PACKED.items():

    def _check_packed(context: Context, changes: dict[str, Any] = _changes) -> list[str]:
        root = context.data("packed")
        edit_packed(root / "train-00000-of-00001.packed", **changes)
        return ["data", "check", str(root)]

    def _train_packed(context: Context, build: Case = _check_packed) -> list[str]:
        return train_arguments(Path(build(context)[2]))

    CASES[f"packed-content/{_name}"] = _check_packed
    CASES[f"packed-train/{_name}"] = _train_packed


@case("packed-content/header-counts")
def _(context: Context) -> list[str]:
    root = context.data("packed")
    path = root / "train-00000-of-00001.packed"
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, 16, 2**63)
    path.write_bytes(data)
    return ["data", "check", str(root)]


@case("packed-content/meta-length-odd")
def _(context: Context) -> list[str]:
    root = context.data("packed")
    path = root / "train-00000-of-00001.packed"
    data = bytearray(path.read_bytes())
    meta, index = struct.unpack_from("<QQ", data, 32)
    struct.pack_into("<QQ", data, 32, meta - 1, index + 1)
    path.write_bytes(data)
    return ["data", "check", str(root)]


# The index of shards, written by somebody else for these very files


def _index_file(context: Context, edit: Callable[[dict[str, Any]], Any], rows: bytes | None = None) -> list[str]:
    from reconv.data.readers.shards.index import _shards_key

    root = context.data("tar")
    content = (0).to_bytes(20, "little") if rows is None else rows
    header: Any = {
        "key": _shards_key(root, ["train-0000.tar"]), "digest": "d", "names": {}, "rows": 1,
        "rows_digest": hashlib.blake2b(content, digest_size=16).hexdigest(),
    }  # fmt: skip
    edited = edit(header)
    text = (json.dumps(header) if edited is None else edited).encode().replace(b'"DIGITS"', DIGITS.encode())
    data = b"reconv index 1\n" + len(text).to_bytes(8, "little") + text + content
    (root / ".reconv-tar-train.index").write_bytes(data)
    return ["data", "check", str(root)]


INDEXES: dict[str, tuple[Callable[[dict[str, Any]], Any], bytes | None]] = {
    "list": (lambda header: "[]", None),
    "number": (lambda header: "7", None),
    "deep": (lambda header: "[" * DEEP, None),
    "digits": (lambda header: header.update(names={"1": "DIGITS"}), None),
    "names-list": (lambda header: header.update(names=[1]), None),
    "names-text": (lambda header: header.update(names={"x": "y"}), None),
    "names-digits": (lambda header: header.update(names={DIGITS: "y"}), None),
    "no-digest": (lambda header: header.pop("digest") and None, None),
    "odd-rows": (lambda header: None, b"123"),
    "no-rows": (lambda header: None, b""),
    "far-shard": (lambda header: None, struct.pack("<QIIi", 0, 10, 99, 0)),
    "far-offset": (lambda header: None, struct.pack("<QIIi", 2**63, 10, 0, 0)),
    "big-length": (lambda header: None, struct.pack("<QIIi", 0, 2**32 - 1, 0, 0)),
    "huge-label": (lambda header: None, struct.pack("<QIIi", 0, 10, 0, 2**31 - 1)),
    "negative-label": (lambda header: None, struct.pack("<QIIi", 0, 10, 0, -5)),
}
for _name, (_edit, _rows) in INDEXES.items():

    def _check_index(context: Context, edit: Any = _edit, rows: bytes | None = _rows) -> list[str]:
        return _index_file(context, edit, rows)

    CASES[f"shard-index/{_name}"] = _check_index
