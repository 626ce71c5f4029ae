"""Malicious CIFAR pickles, lists of labels and class names."""

# ruff: noqa: E501
from __future__ import annotations

import gzip
import pickle

import numpy as np
from malicious_cases import CASES, DIGITS, Context, case, tar_bytes, train_arguments
from malicious_shards import TAR, TAR_END, tar_header

# CIFAR pickles


def _array(shape: tuple[int, ...]) -> bytes:
    return pickle.dumps({b"data": np.zeros(shape, np.uint8), b"labels": [0] * shape[0]}, protocol=2)


PICKLES = {
    "os-system": b"cos\nsystem\n(S'touch hacked'\ntR.",
    "labels-digits": pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10**30]}, protocol=2),
    "labels-text": pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": ["x"]}, protocol=2),
    "deep-lists": b"\x80\x02" + b"(" * 500_000 + b"." ,
    "long4": b"\x80\x02\x8b\xff\xff\xff\x7f",
    "binunicode8": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f",
    "bytearray8": b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.",
    "frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
    "bytearray8-40g": b"\x80\x05\x96\x00\x00\x00\x00\x0a\x00\x00\x00.",
    "put-huge": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "dup-bomb": b"\x80\x02](" + b"q\x00" + b"h\x00a" * 10 + b".",
    "laughs": b"\x80\x02]q\x00" + b"".join(b"]q" + bytes([n]) + b"(" + b"h" + bytes([n - 1]) + (b"h" + bytes([n - 1])) * 9 + b"e" for n in range(1, 40)) + b".",
    "ndarray-huge": b"\x80\x02cnumpy\nndarray\n(J\xff\xff\xff\x7fK\x10\x86tR.",
    "empty-dict": b"\x80\x02}.",
    "list": b"\x80\x02].",
    "object-array": pickle.dumps({b"data": np.array([None] * 3, object), b"labels": []}, protocol=2),
    "digits-int": b"I" + DIGITS.encode() + b"\n.",
    "digits-long": b"L" + DIGITS.encode() + b"L\n.",
}  # fmt: skip
for _name, _content in PICKLES.items():

    def _check_pickle(context: Context, content: bytes = _content) -> list[str]:
        root = context.data("cifar")
        (root / "cifar-10-batches-py/data_batch_1").write_bytes(content)
        return ["data", "check", str(root)]

    def _check_meta(context: Context, content: bytes = _content) -> list[str]:
        root = context.data("cifar")
        (root / "cifar-10-batches-py/batches.meta").write_bytes(content)
        return ["data", "check", str(root)]

    CASES[f"cifar-pickle/{_name}"] = _check_pickle
    CASES[f"cifar-meta-pickle/{_name}"] = _check_meta


# Lists of ImageNet's validation labels


LISTS = {
    "digits": f"ILSVRC2012_val_00000001.JPEG {DIGITS}\n" * 3,
    "one-digits": f"{DIGITS}\n" * 3,
    "negative": "ILSVRC2012_val_00000001.JPEG -1\n" * 3,
    "unicode": "ILSVRC2012_val_00000001.JPEG ٣\n" * 3,
    "superscript": "ILSVRC2012_val_00000001.JPEG ²\n" * 3,
    "long": "n" * 5_000_000,
}
for _name, _text in LISTS.items():

    def _check_labels(context: Context, text: str = _text) -> list[str]:
        root = context.data("imagenet")
        (root / "val.txt").write_text(text)
        return ["data", "check", str(root)]

    CASES[f"imagenet-list/{_name}"] = _check_labels


@case("imagenet-kit/bomb")
def _(context: Context) -> list[str]:
    root = context.data("imagenet")
    size = 3 << 30
    header = tar_header(b"ILSVRC2012_validation_ground_truth.txt", b"%011o\0" % size, b"0")
    with gzip.open(root / "ILSVRC2012_devkit_t12.tar.gz", "wb", compresslevel=1) as file:
        file.write(header)
        for _ in range(size >> 24):
            file.write(bytes(1 << 24))
    return ["data", "check", str(root)]


@case("imagenet-kit/other-bomb")
def _(context: Context) -> list[str]:
    root = context.data("imagenet")
    CASES["imagenet-kit/bomb"](Context(context.folder / "x", context.finished_run))
    kit = context.folder / "x/data/ILSVRC2012_devkit_t12.tar.gz"
    content = gzip.compress(tar_header(b"other", b"%011o\0" % (3 << 30), b"0"))
    (root / kit.name).write_bytes(content + kit.read_bytes())
    return ["data", "check", str(root)]


@case("imagenet-kit/truth-link")
def _(context: Context) -> list[str]:
    root = context.data("imagenet")
    content = tar_header(b"ILSVRC2012_validation_ground_truth.txt", b"00000000000\0", b"2") + TAR_END
    (root / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(gzip.compress(content))
    return ["data", "check", str(root)]


@case("imagenet-kit/chain")
def _(context: Context) -> list[str]:
    root = context.data("imagenet")
    (root / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(gzip.compress(TAR["pax-chain"]))
    return ["data", "check", str(root)]


@case("imagenet-kit/meta-mat")
def _(context: Context) -> list[str]:
    root = context.data("imagenet")
    members = {
        "data/ILSVRC2012_validation_ground_truth.txt": b"1\n2\n1\n",
        "data/meta.mat": b"MATLAB 5.0 MAT-file" + bytes(200),
    }
    (root / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(gzip.compress(tar_bytes(members)))
    return ["data", "check", str(root)]


@case("imagenet-kit/synsets-digits")
def _(context: Context) -> list[str]:
    root = context.data("imagenet")
    members = {"ILSVRC2012_validation_ground_truth.txt": b"1\n2\n1\n", "synsets.txt": f"{DIGITS} n01440764\n".encode()}
    (root / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(gzip.compress(tar_bytes(members)))
    return ["data", "check", str(root)]


CLASS_NAMES = {
    "digits": '{"0": ' + DIGITS + ', "1": "b"}',
    "nested": '{"0": ["a", ["b", ["c"]]], "1": {"x": 1}}',
    "nan": '{"0": NaN, "1": Infinity}',
    "surrogate": '{"0": "\\ud800", "1": "b"}',
    "control": '{"0": "\\u001b[31m", "1": "b"}',
    "long": '{"0": "' + "n" * 2_000_000 + '", "1": "b"}',
}
for _name, _text in CLASS_NAMES.items():

    def _train_names(context: Context, text: str = _text) -> list[str]:
        root = context.data("folder")
        (root / "class_names.json").write_text(text)
        return train_arguments(root)

    CASES[f"class-names-content/{_name}"] = _train_names
