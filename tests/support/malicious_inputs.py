"""Malicious inputs: small files that hang, exhaust the memory or end a careless parser, each with the command to try.

A case writes its files into an empty folder and returns the arguments of `reconv`. `context.run` is a finished run of
the recipe quickstart that the case may change; `context.data(kind)` a small valid dataset of a format.
"""

# ruff: noqa: E501
from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pickle
import shutil
import socket
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from box_examples import write_coco, write_voc, write_yolo
from data_examples import encode, noise

from reconv.data.dataset import Sample
from reconv.data.readers.shards.packed_format import PackedShardInfo, write_shard
from reconv.data.readers.shards.tfrecord_format import encode_example, write_records
from reconv.io.tensorflow_encoding import encode_bytes_field, encode_varint, masked_crc32c

DIGITS = "7" * 5000
DEEP = 200_000
SPARSE_BYTES = 200 << 30
_IMAGE = encode(noise(16, 16, 3, 0), "JPEG")


@dataclass(frozen=True)
class Context:
    """An empty folder, and a finished run to copy from."""

    folder: Path
    finished_run: Path

    def data(self, kind: str) -> Path:
        """A small valid dataset of a format."""
        return _DATASETS[kind](self.folder / "data")

    @property
    def run(self) -> Path:
        """A copy of the finished run."""
        target = self.folder / "run"
        if not target.exists():
            shutil.copytree(self.finished_run, target)
        return target

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint of the copy."""
        return sorted((self.run / "checkpoints").glob("step-*"))[-1]

    def image(self) -> Path:
        """A valid image file."""
        path = self.folder / "image.png"
        path.write_bytes(encode(noise(8, 8, 1, 3)[:, :, 0], "PNG"))
        return path


Case = Callable[[Context], list[str]]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        assert name not in CASES, name
        CASES[name] = function
        return function

    return register


# Datasets


def _folder(root: Path) -> Path:
    for split in ("train", "val"):
        for number, label in enumerate(("cat", "dog")):
            (root / split / label).mkdir(parents=True)
            for index in range(3):
                content = encode(noise(16, 16, 3, 100 * number + index + 10 * len(split)), "JPEG")
                (root / split / label / f"{index}.jpg").write_bytes(content)
    return root


def _coco(root: Path) -> Path:
    boxes = [{"category_id": 1, "bbox": [1, 2, 5, 6]}, {"category_id": 18, "bbox": [0, 0, 9, 9]}]
    images = [(f"{number}.jpg", 20, 24, boxes) for number in range(3)]
    return write_coco(root, {"train": images, "val": images[:2]}, {1: "person", 18: "dog"})


def _voc(root: Path) -> Path:
    images = {f"i{number}": (20, 24, [("cat", (2, 3, 9, 9), 0)]) for number in range(4)}
    return write_voc(root, {"train": ["i0", "i1"], "val": ["i2", "i3"]}, images)


def _yolo(root: Path) -> Path:
    lines = {f"i{number}": ["0 0.5 0.5 0.2 0.2", "1 0.4 0.4 0.1 0.1"] for number in range(3)}
    return write_yolo(root, "images/train", lines, ["cat", "dog"])


def _csv(root: Path) -> Path:
    root.mkdir(parents=True)
    rows = []
    for index in range(8):
        (root / f"{index}.jpg").write_bytes(encode(noise(16, 16, 3, index), "JPEG"))
        rows.append(f"{index}.jpg,{'cat' if index % 2 else 'dog'},{'train' if index < 6 else 'val'}\n")
    (root / "labels.csv").write_text("file,label,split\n" + "".join(rows))
    return root


def tar_bytes(members: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def _tar(root: Path) -> Path:
    root.mkdir(parents=True)
    for split in ("train", "val"):
        members: dict[str, bytes] = {}
        for index in range(4):
            members[f"{index}.jpg"] = encode(noise(16, 16, 3, index + len(split)), "JPEG")
            members[f"{index}.cls"] = str(index % 2).encode()
        (root / f"{split}-0000.tar").write_bytes(tar_bytes(members))
    return root


def example(index: int, **changes: Any) -> bytes:
    """A record of ImageNet's TFRecords; `changes` replaces features by their name's last part."""
    features: dict[str, Any] = {
        "image/encoded": [encode(noise(16, 16, 3, index), "JPEG")],
        "image/class/label": [1 + index % 2],
        "image/class/synset": [f"n{index % 2:08d}".encode()],
    }
    features |= {f"image/class/{name}": value for name, value in changes.items()}
    return encode_example({name: value for name, value in features.items() if value is not None})


def _tfrecord(root: Path) -> Path:
    root.mkdir(parents=True)
    for split in ("train", "validation"):
        write_records(root / f"{split}-00000-of-00001", [example(index + len(split)) for index in range(4)])
    return root


def box_example(index: int, **changes: Any) -> bytes:
    """A record with a box; `changes` replaces features, with __ for /."""
    features: dict[str, Any] = {
        "image/encoded": [encode(noise(20, 24, 3, index), "JPEG")],
        "image/height": [20],
        "image/width": [24],
        "image/source_id": [str(index).encode()],
        "image/object/bbox/xmin": [0.1],
        "image/object/bbox/ymin": [0.1],
        "image/object/bbox/xmax": [0.5],
        "image/object/bbox/ymax": [0.6],
        "image/object/class/label": [1],
        "image/object/class/text": [b"cat"],
    }
    features |= {name.replace("__", "/"): value for name, value in changes.items()}
    return encode_example({name: value for name, value in features.items() if value is not None})


def _box_tfrecord(root: Path) -> Path:
    root.mkdir(parents=True)
    for split in ("train", "val"):
        write_records(root / f"{split}-00000-of-00001", [box_example(index + len(split)) for index in range(3)])
    return root


def packed_shard(path: Path, split: str, **changes: Any) -> None:
    facts: dict[str, Any] = {
        "split": split, "shard": 0, "num_shards": 1, "per_shard": 4, "num_samples": 4, "source": "s", "form": "",
        "class_names": ("cat", "dog"), **changes,
    }  # fmt: skip
    samples = [Sample(encode(noise(16, 16, 3, i + len(split)), "JPEG"), i % 2, f"{i}.jpg") for i in range(4)]
    with path.open("wb") as file:
        write_shard(file, PackedShardInfo(**facts), samples)


def _packed(root: Path) -> Path:
    root.mkdir(parents=True)
    for split in ("train", "val"):
        packed_shard(root / f"{split}-00000-of-00001.packed", split)
    return root


def edit_packed(path: Path, *, meta: bytes | None = None, entry: Mapping[str, int] | None = None) -> None:
    """Change the metadata or the first index entry of a packed shard, with right checksums."""
    header = struct.Struct("<8sII6Q")
    data = path.read_bytes()
    magic, version, _, count, position, meta_size, index_size, names_size, _ = header.unpack(data[: header.size])
    old_meta = data[position : position + meta_size]
    index = bytearray(data[position + meta_size : position + meta_size + index_size])
    names = data[position + meta_size + index_size :]
    if entry:
        from reconv.data.readers.shards import packed_format

        table = np.frombuffer(index, packed_format._ENTRY)
        for name, value in entry.items():
            table[name][0] = value
    tail = (old_meta if meta is None else meta) + bytes(index) + names
    sizes = (len(old_meta if meta is None else meta), index_size, names_size, position + len(tail))
    head = header.pack(magic, version, zlib.crc32(tail), count, position, *sizes)
    path.write_bytes(head + data[header.size : position] + tail)


def _cifar(root: Path) -> Path:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    pixels = noise(4, 3072, 1, 0)[:, :, 0]
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(pickle.dumps({b"data": pixels, b"labels": [0, 1, 2, 3]}, protocol=2))
    names = [f"class{number}".encode() for number in range(10)]
    (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": names}, protocol=2))
    return root


def _imagenet_val(root: Path) -> Path:
    for label in ("n01440764", "n01443537"):
        (root / "train" / label).mkdir(parents=True)
        for index in range(3):
            content = encode(noise(16, 16, 3, index + int(label[-3:])), "JPEG")
            (root / "train" / label / f"{index}.JPEG").write_bytes(content)
    (root / "val").mkdir()
    for index in range(1, 4):
        content = encode(noise(16, 16, 3, 50 + index), "JPEG")
        (root / "val" / f"ILSVRC2012_val_{index:08d}.JPEG").write_bytes(content)
    return root


_DATASETS: dict[str, Callable[[Path], Path]] = {
    "folder": _folder, "coco": _coco, "voc": _voc, "yolo": _yolo, "csv": _csv, "tar": _tar, "tfrecord": _tfrecord,
    "box_tfrecord": _box_tfrecord, "packed": _packed, "cifar": _cifar, "imagenet": _imagenet_val,
}  # fmt: skip


# Files of other kinds


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def zeros(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def link_loop(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def unix_socket(path: Path) -> None:
    path.unlink(missing_ok=True)
    before = os.getcwd()
    os.chdir(path.parent)  # the path of a socket may have 107 bytes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
    os.chdir(before)


def sparse(path: Path) -> None:
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(SPARSE_BYTES)


def directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def not_utf8(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\xfd\x00\x80" * 50)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def deep_json(path: Path) -> None:
    path.write_text("[" * DEEP)


def deep_object(path: Path) -> None:
    path.write_text('{"a":' * DEEP)


def json_digits(path: Path) -> None:
    path.write_text('{"step": ' + DIGITS + "}")


def json_list(path: Path) -> None:
    path.write_text("[1, 2]")


SPECIAL = {"fifo": fifo, "zeros": zeros, "loop": link_loop, "socket": unix_socket, "sparse": sparse}
CONTENT = {"directory": directory, "not-utf8": not_utf8, "empty": empty}
JSON = {"deep": deep_json, "deep-object": deep_object, "digits": json_digits, "list": json_list}


def _register_files(
    prefix: str, place: Callable[[Context], tuple[Path, list[str]]], *groups: Mapping[str, Any]
) -> None:
    for group in groups:
        for name, make in group.items():

            def build(context: Context, make: Any = make) -> list[str]:
                path, arguments = place(context)
                make(path)
                return arguments

            CASES[f"{prefix}/{name}"] = build


def _check(kind: str, file: str) -> Callable[[Context], tuple[Path, list[str]]]:
    def place(context: Context) -> tuple[Path, list[str]]:
        root = context.data(kind)
        return root / file, ["data", "check", str(root)]

    return place


def _dry_run(kind: str, file: str, recipe: str = "resnet18") -> Callable[[Context], tuple[Path, list[str]]]:
    def place(context: Context) -> tuple[Path, list[str]]:
        root = context.data(kind)
        return root / file, train_arguments(root, recipe)

    return place


def train_arguments(root: Path, recipe: str = "resnet18") -> list[str]:
    """A dry run of one step on the data."""
    if recipe == "ssd300":
        recipe = "ssd-resnet34"
        extra = ["--set", "data.empty_images=keep"]
    else:
        extra = ["--set", "model.name=resnet8_cifar", "--set", "data.preprocess.size=16"]
        extra += ["--set", "data.preprocess.resize=16"]
    return ["train", recipe, "--data", str(root), "--dry-run", "1", "--batch-size", "2", "--device", "cpu", *extra]


_register_files("folder-image", _check("folder", "train/cat/0.jpg"), SPECIAL, CONTENT)
_register_files("folder-image-train", _dry_run("folder", "train/cat/0.jpg"), SPECIAL, CONTENT)
_register_files("class-names", _check("folder", "class_names.json"), SPECIAL, CONTENT, JSON)
_register_files("class-names-train", _dry_run("folder", "class_names.json"), SPECIAL, CONTENT, JSON)
_register_files("classes-txt", _check("folder", "classes.txt"), SPECIAL, CONTENT)
_register_files("coco-json", _check("coco", "annotations/instances_train2017.json"), SPECIAL, CONTENT, JSON)
_register_files("coco-val-json", _check("coco", "annotations/instances_val2017.json"), SPECIAL, JSON)
_register_files("coco-one-file", _check("folder", "boxes.json"), SPECIAL, JSON)
_register_files("voc-xml", _check("voc", "Annotations/i0.xml"), SPECIAL, CONTENT)
_register_files("voc-list", _check("voc", "ImageSets/Main/train.txt"), SPECIAL, CONTENT)
_register_files("voc-classes", _check("voc", "classes.txt"), SPECIAL, CONTENT)
_register_files("yolo-yaml", _check("yolo", "data.yaml"), SPECIAL, CONTENT)
_register_files("yolo-label", _check("yolo", "labels/train/i0.txt"), SPECIAL, CONTENT)
_register_files("csv", _check("csv", "labels.csv"), SPECIAL, CONTENT)
_register_files("csv-train", _dry_run("csv", "labels.csv"), SPECIAL)
_register_files("tar", _check("tar", "train-0000.tar"), SPECIAL, CONTENT)
_register_files("tar-classes", _check("tar", "classes.txt"), SPECIAL, CONTENT)
_register_files("tar-index", _check("tar", ".reconv-tar-train.index"), SPECIAL, CONTENT)
_register_files("tfrecord", _check("tfrecord", "train-00000-of-00001"), SPECIAL, CONTENT)
_register_files("box-tfrecord", _check("box_tfrecord", "train-00000-of-00001"), SPECIAL, CONTENT)
_register_files("label-map", _check("box_tfrecord", "label_map.pbtxt"), SPECIAL, CONTENT)
_register_files("packed", _check("packed", "train-00000-of-00001.packed"), SPECIAL, CONTENT)
_register_files("cifar", _check("cifar", "cifar-10-batches-py/data_batch_1"), SPECIAL, CONTENT)
_register_files("cifar-meta", _check("cifar", "cifar-10-batches-py/batches.meta"), SPECIAL, CONTENT)
_register_files("imagenet-val", _check("imagenet", "val.txt"), SPECIAL, CONTENT)
_register_files("imagenet-devkit", _check("imagenet", "ILSVRC2012_devkit_t12.tar.gz"), SPECIAL, CONTENT)
_register_files("hf", _check("folder", "dataset_dict.json"), SPECIAL, CONTENT, JSON)


# Image files


def png(width: int, height: int, *chunks: bytes, data: bytes = b"", bits: int = 8, color: int = 2) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0))
    extra = b"".join(chunk(c[:4], c[4:]) for c in chunks)
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def _bomb_text(kind: bytes, size: int = 300 << 20) -> bytes:
    return kind + b"key\0\0" + zlib.compress(bytes(size), 9)


def tiff(tags: list[tuple[int, int, int, int]], *, next_ifd: int = 0, tail: bytes = b"") -> bytes:
    """A little-endian TIFF of one directory."""
    entries = b"".join(struct.pack("<HHII", *tag) for tag in sorted(tags))
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(tags)) + entries + struct.pack("<I", next_ifd) + tail


_TIFF_TAGS = [(256, 4, 1, 8), (257, 4, 1, 8), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 0),
              (277, 3, 1, 1), (278, 4, 1, 8), (279, 4, 1, 64)]  # fmt: skip


def _with(
    tags: list[tuple[int, int, int, int]], *changes: tuple[int, int, int, int]
) -> list[tuple[int, int, int, int]]:
    changed = {tag[0] for tag in changes}
    return [tag for tag in tags if tag[0] not in changed] + list(changes)


def jpeg_of_size(width: int, height: int) -> bytes:
    """A valid JPEG whose header says another size."""
    at = _IMAGE.index(b"\xff\xc0")
    return _IMAGE[: at + 5] + struct.pack(">HH", height, width) + _IMAGE[at + 9 :]


def bmp(width: int, height: int, bits: int = 24) -> bytes:
    return (
        b"BM"
        + struct.pack("<IHHI", 54, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, 0, 0, 0, 0, 0, 0)
    )


IMAGES: dict[str, bytes | Callable[[], bytes]] = {
    "png-50000": png(50_000, 50_000, data=bytes(1000)),
    "png-max": png(2**31 - 1, 2**31 - 1, data=bytes(1000)),
    "png-zero": png(0, 0),
    "png-ztxt-bomb": lambda: png(4, 4, _bomb_text(b"zTXt"), data=bytes(13 * 4)),
    "png-iccp-bomb": lambda: png(4, 4, _bomb_text(b"iCCP"), data=bytes(13 * 4)),
    "png-9000-black": lambda: png(9400, 9400, data=bytes((9400 * 3 + 1) * 9400)),
    "png-many-chunks": png(4, 4, *[b"tEXta\0b"] * 100_000, data=bytes(13 * 4)),
    "jpeg-65500": jpeg_of_size(65_500, 65_500),
    "jpeg-9000": jpeg_of_size(9000, 9000),
    "jpeg-9459": jpeg_of_size(9459, 9459),
    "jpeg-many-app": b"\xff\xd8" + b"\xff\xe1\x00\x10Exif\0\0MM\0*\0\0\0\x08" * 50_000 + _IMAGE[2:],
    "jpeg-cut": _IMAGE[: len(_IMAGE) // 2],
    "bmp-huge": bmp(2**31 - 1, 2**31 - 1),
    "bmp-negative": bmp(16, -(2**31)),
    "bmp-bits": bmp(16, 16, 77),
    "gif-huge": b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b"," + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0) + b"\x08\x00;",
    "ppm-digits": b"P6\n" + DIGITS.encode() + b" 4\n255\n" + bytes(100),
    "ppm-huge": b"P6\n99999999 99999999\n255\n" + bytes(100),
    "ppm-comment": b"P6\n#" + b"a" * 5_000_000 + b"\n4 4\n255\n" + bytes(48),
    "webp-huge": b"RIFF\x1a\0\0\0WEBPVP8L\x0d\0\0\0/\xff\xff\xff\x0f" + bytes(20),
    "tiff-loop": tiff(_TIFF_TAGS, next_ifd=8, tail=bytes(64)),
    "tiff-counts": tiff(_with(_TIFF_TAGS, (273, 4, 0xFFFFFFFF, 8), (279, 4, 0xFFFFFFFF, 8)), tail=bytes(64)),
    "tiff-huge": tiff(_with(_TIFF_TAGS, (256, 4, 1, 2**32 - 1), (257, 4, 1, 2**32 - 1)), tail=bytes(64)),
    "tiff-float-size": tiff(_with(_TIFF_TAGS, (256, 11, 1, 0x7FC00000)), tail=bytes(64)),
    "tiff-tags": tiff(_TIFF_TAGS + [(60_000, 4, 1, 0)] * 4000, tail=bytes(64)),
    "tiff-zero-tile": tiff(_with(_TIFF_TAGS, (322, 4, 1, 0), (323, 4, 1, 0), (324, 4, 1, 0)), tail=bytes(64)),
    "exif-loop": _IMAGE[:2] + b"\xff\xe1" + struct.pack(">H", 2 + 6 + 26) + b"Exif\0\0II*\0\x08\0\0\0\x01\0\x69\x87\x04\0\x01\0\0\0\x08\0\0\0\x08\0\0\0" + _IMAGE[2:],
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 99999 99999\n",
    "text": b"hello",
}  # fmt: skip


def made(content: bytes | Callable[[], bytes]) -> bytes:
    return content if isinstance(content, bytes) else content()


for _name, _content in IMAGES.items():

    def _check_image(context: Context, content: Any = _content) -> list[str]:
        root = context.data("folder")
        (root / "train/cat/0.jpg").write_bytes(made(content))
        return ["data", "check", str(root)]

    def _train_image(context: Context, content: Any = _content) -> list[str]:
        root = context.data("folder")
        for file in (root / "train").glob("*/*.jpg"):
            file.write_bytes(made(content))
        return train_arguments(root)

    def _predict_image(context: Context, content: Any = _content) -> list[str]:
        (context.folder / "odd.png").write_bytes(made(content))
        return ["predict", str(context.run), str(context.folder / "odd.png"), "--device", "cpu"]

    def _yolo_image(context: Context, content: Any = _content) -> list[str]:
        root = context.data("yolo")
        (root / "images/train/i0.jpg").write_bytes(made(content))
        return ["data", "check", str(root)]

    CASES[f"image-check/{_name}"] = _check_image
    CASES[f"image-train/{_name}"] = _train_image
    CASES[f"image-predict/{_name}"] = _predict_image
    CASES[f"image-yolo/{_name}"] = _yolo_image


# Folders


@case("folder/class-is-root")
def _(context: Context) -> list[str]:
    root = context.data("folder")
    (root / "train/everything").symlink_to("/")
    return ["data", "check", str(root)]


@case("folder/class-is-root-train")
def _(context: Context) -> list[str]:
    root = context.data("folder")
    (root / "train/everything").symlink_to("/")
    return train_arguments(root)


@case("folder/class-is-proc")
def _(context: Context) -> list[str]:
    root = context.data("folder")
    (root / "train/proc").symlink_to("/proc")
    return ["data", "check", str(root)]


@case("folder/inner-link-to-root")
def _(context: Context) -> list[str]:
    root = context.data("folder")
    (root / "train/cat/all").symlink_to("/")
    return train_arguments(root)


@case("folder/link-to-parent")
def _(context: Context) -> list[str]:
    root = context.data("folder")
    (root / "train/cat/up").symlink_to("..")
    return ["data", "check", str(root)]


@case("folder/link-beside-train")
def _(context: Context) -> list[str]:
    root = context.data("folder")
    (root / "all").symlink_to("/")
    return ["data", "check", str(root)]


@case("folder/data-is-root")
def _(context: Context) -> list[str]:
    return ["data", "check", "/"]


@case("folder/data-is-proc")
def _(context: Context) -> list[str]:
    return ["data", "check", "/proc"]


@case("folder/train-on-root")
def _(context: Context) -> list[str]:
    return train_arguments(Path("/"))


@case("folder/data-is-dev")
def _(context: Context) -> list[str]:
    return ["data", "check", "/dev"]


@case("folder/eval-root")
def _(context: Context) -> list[str]:
    return ["eval", str(context.run), "--data", "/", "--device", "cpu"]


@case("folder/deep")
def _(context: Context) -> list[str]:
    root = context.data("folder")
    before = os.getcwd()
    os.chdir(root / "train/cat")
    for _ in range(2500):
        os.mkdir("d")
        os.chdir("d")
    os.chdir(before)
    return ["data", "check", str(root)]


@case("folder/deep-train")
def _(context: Context) -> list[str]:
    CASES["folder/deep"](context)
    return train_arguments(context.folder / "data")


@case("folder/long-names")
def _(context: Context) -> list[str]:
    root = context.data("folder")
    (root / "train" / ("c" * 255)).mkdir()
    (root / "train" / ("c" * 255) / ("i" * 251 + ".jpg")).write_bytes(_IMAGE)
    return train_arguments(root)


@case("folder/not-utf8-image")
def _(context: Context) -> list[str]:
    root = context.data("folder")
    Path(os.fsdecode(os.fsencode(root) + b"/train/cat/\xff\xfe.jpg")).write_bytes(_IMAGE)
    return ["data", "check", str(root), "--json"]


@case("folder/not-utf8-class")
def _(context: Context) -> list[str]:
    root = context.data("folder")
    folder = Path(os.fsdecode(os.fsencode(root) + b"/train/\xff\xfe"))
    folder.mkdir()
    (folder / "a.jpg").write_bytes(_IMAGE)
    return train_arguments(root)


@case("folder/not-utf8-root")
def _(context: Context) -> list[str]:
    root = context.data("folder")
    odd = Path(os.fsdecode(os.fsencode(root) + b"\xff\xfe"))
    root.rename(odd)
    return train_arguments(odd)


@case("folder/not-utf8-root-check")
def _(context: Context) -> list[str]:
    return ["data", "check", CASES["folder/not-utf8-root"](context)[3], "--json"]


# COCO


def _coco_edit(change: Callable[[dict[str, Any]], object]) -> Case:
    def build(context: Context) -> list[str]:
        root = context.data("coco")
        file = root / "annotations/instances_train2017.json"
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content).replace('"DIGITS"', DIGITS).replace('"HUGE"', "1e999"))
        return ["data", "check", str(root)]

    return build


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(content: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        node: Any = content
        for name in parents:
            node = node[int(name)] if name.isdigit() else node[name]
        node[int(last) if last.isdigit() else last] = value

    return change


for _name, _path, _value in (
    ("nan-box", "annotations.0.bbox.0", float("nan")),
    ("inf-box", "annotations.0.bbox.2", float("inf")),
    ("1e999-box", "annotations.0.bbox.2", "HUGE"),
    ("text-box", "annotations.0.bbox.1", "seven"),
    ("null-box", "annotations.0.bbox.1", None),
    ("box-digits", "annotations.0.bbox.1", "DIGITS"),
    ("box-object", "annotations.0.bbox", {"x": 1}),
    ("box-long", "annotations.0.bbox", [1] * 100_000),
    ("nan-area", "annotations.0.area", float("nan")),
    ("text-area", "annotations.0.area", "big"),
    ("id-digits", "images.0.id", "DIGITS"),
    ("id-list", "images.0.id", [1]),
    ("id-huge", "images.0.id", 10**30),
    ("category-huge", "categories.0.id", 10**30),
    ("category-negative", "categories.0.id", -(10**30)),
    ("category-bool", "categories.0.id", True),
    ("category-name-list", "categories.0.name", ["a"]),
    ("category-name-surrogate", "categories.0.name", "\ud800\udfff\ud800"),
    ("category-name-long", "categories.0.name", "n" * 1_000_000),
    ("category-id-huge", "annotations.0.category_id", 10**30),
    ("width-nan", "images.0.width", float("nan")),
    ("width-inf", "images.0.width", float("inf")),
    ("width-digits", "images.0.width", "DIGITS"),
    ("width-text", "images.0.width", "wide"),
    ("height-zero", "images.0.height", 0),
    ("file-nul", "images.0.file_name", "a\0b.jpg"),
    ("file-surrogate", "images.0.file_name", "\ud800.jpg"),
    ("file-long", "images.0.file_name", "x" * 100_000),
    ("file-zero", "images.0.file_name", "/dev/zero"),
    ("file-passwd", "images.0.file_name", "/etc/passwd"),
    ("file-up", "images.0.file_name", "../../../../../../etc/passwd"),
    ("file-empty", "images.0.file_name", ""),
    ("iscrowd-list", "annotations.0.iscrowd", [0]),
    ("iscrowd-nan", "annotations.0.iscrowd", float("nan")),
    ("images-numbers", "images", [1, 2, 3]),
    ("images-empty", "images", []),
    ("annotations-empty", "annotations", []),
    ("categories-empty", "categories", []),
    ("categories-numbers", "categories", [1]),
    ("categories-many", "categories", [{"id": i, "name": f"c{i}"} for i in range(100_000)]),
):
    CASES[f"coco/{_name}"] = _coco_edit(_set(_path, _value))

for _name in (
    "nan-box",
    "file-nul",
    "id-digits",
    "category-huge",
    "file-zero",
    "category-name-surrogate",
    "images-empty",
):

    def _coco_train(context: Context, build: Case = CASES[f"coco/{_name}"]) -> list[str]:
        return train_arguments(Path(build(context)[2]), "ssd300")

    CASES[f"coco-train/{_name}"] = _coco_train


@case("coco/categories-deep")
def _(context: Context) -> list[str]:
    root = context.data("coco")
    (root / "annotations/instances_train2017.json").write_text(
        '{"images": [], "annotations": [], "categories": ' + "[" * DEEP
    )
    return ["data", "check", str(root)]


@case("coco/two-gigabyte-hole")
def _(context: Context) -> list[str]:
    root = context.data("coco")
    file = root / "annotations/instances_train2017.json"
    with file.open("r+b") as opened:
        opened.truncate(3 << 30)
    return ["data", "check", str(root)]


# VOC


_LAUGHS = (
    "<!DOCTYPE a [<!ENTITY e0 'haha'>" + "".join(f"<!ENTITY e{n} '{f'&e{n - 1};' * 10}'>" for n in range(1, 12)) + "]>"
)
XML = {
    "billion-laughs": _LAUGHS + "<annotation><filename>&e11;</filename></annotation>",
    "laughs-in-name": _LAUGHS + "<annotation><object><name>&e11;</name></object></annotation>",
    "quadratic": "<!DOCTYPE a [<!ENTITY a '" + "x" * 200_000 + "'>]><annotation>" + "&a;" * 20_000 + "</annotation>",
    "external": "<!DOCTYPE a [<!ENTITY x SYSTEM 'file:///etc/passwd'>]><annotation><object><name>&x;</name></object></annotation>",
    "external-zero": "<!DOCTYPE a [<!ENTITY x SYSTEM 'file:///dev/zero'>]><annotation>&x;</annotation>",
    "external-dtd": "<!DOCTYPE a SYSTEM 'http://127.0.0.1:9/a.dtd'><annotation/>",
    "deep": "<a>" * DEEP,
    "deep-closed": "<a>" * DEEP + "</a>" * DEEP,
    "many-attributes": "<annotation " + " ".join(f"a{n}='1'" for n in range(100_000)) + "/>",
    "many-objects": "<annotation><size><width>24</width><height>20</height></size>" + "<object/>" * 100_000 + "</annotation>",
    "nan-size": "<annotation><size><width>nan</width><height>inf</height></size></annotation>",
    "digits-size": f"<annotation><size><width>{DIGITS}</width><height>{DIGITS}</height></size></annotation>",
    "nan-box": "<annotation><size><width>24</width><height>20</height></size><object><name>cat</name><bndbox><xmin>nan</xmin><ymin>text</ymin><xmax>inf</xmax><ymax>1e999</ymax></bndbox></object></annotation>",
    "no-root": "",
    "encoding": "<?xml version='1.0' encoding='utf-99'?><annotation/>",
    "encoding-utf7": "<?xml version='1.0' encoding='utf-7'?><annotation/>",
    "encoding-idna": "<?xml version='1.0' encoding='idna'?><annotation/>",
    "name-surrogate": "<annotation><object><name>&#xD800;</name></object></annotation>",
    "name-long": "<annotation><size><width>24</width><height>20</height></size><object><name>" + "n" * 1_000_000 + "</name></object></annotation>",
}  # fmt: skip

for _name, _text in XML.items():

    def _check_xml(context: Context, text: str = _text) -> list[str]:
        root = context.data("voc")
        (root / "Annotations/i0.xml").write_text(text)
        return ["data", "check", str(root)]

    CASES[f"voc/{_name}"] = _check_xml

for _name, _text in {
    "nul": "i\0\n",
    "up": "../../../etc/passwd\n",
    "long": "x" * 100_000 + "\n",
    "zero": "/dev/zero\n",
}.items():

    def _check_list(context: Context, text: str = _text) -> list[str]:
        root = context.data("voc")
        (root / "ImageSets/Main/train.txt").write_text(text)
        return ["data", "check", str(root)]

    CASES[f"voc-stem/{_name}"] = _check_list


# YOLO


_ALIASES = "\n".join(
    ["a0: &a0 [x,x,x,x,x,x,x,x,x,x]", *(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10))]
)
YAML = {
    "alias-bomb": _ALIASES + "\nnames: *a9\n",
    "alias-bomb-names": _ALIASES + "\nnames: [a, b]\n",
    "merge-bomb": "a: &a {x: 1}\n" + "b: {" + ", ".join(["<<: *a"] * 20_000) + "}\nnames: [a, b]\n",
    "deep": "names: " + "[" * 20_000,
    "deep-map": "names: " + "{a: " * 20_000,
    "digits": f"names: {{{DIGITS}: a}}\n",
    "gap": "names: {0: a, 2000000000: b}\n",
    "names-number": "names: 3\n",
    "names-nested": "names: [[a, b], {c: d}]\n",
    "names-nan-key": "names: {.nan: a, .inf: b}\n",
    "names-float-key": "names: {1.5: a}\n",
    "names-negative": "names: {-5: a}\n",
    "names-date": "names: [2020-01-01]\n",
    "python-tag": "names: !!python/object/apply:os.system ['touch hacked']\n",
    "binary-tag": "names: !!binary aGVsbG8=\n",
    "path-root": "path: /\ntrain: .\nval: .\nnames: [a, b]\n",
    "train-root": "train: /\nval: /\nnames: [a, b]\n",
    "train-proc": "train: /proc\nval: /proc\nnames: [a, b]\n",
    "train-zero": "train: /dev/zero\nval: /dev/zero\nnames: [a, b]\n",
    "train-nul": 'train: "a\\0b"\nval: images/val\nnames: [a, b]\n',
    "train-list": "train: [[[1]], {a: b}, null]\nval: images/val\nnames: [a, b]\n",
    "path-number": "path: 7\nnames: [a, b]\n",
    "path-long": "path: " + "x" * 100_000 + "\nnames: [a, b]\n",
    "two-documents": "names: [a]\n---\nnames: [b]\n",
    "list": "- names\n",
    "many-keys": "names: {" + ", ".join(f"{n}: c{n}" for n in range(100_000)) + "}\n",
    "long-line": "names: [" + "a" * 5_000_000 + "]\n",
    "flow-questions": "names: {" + "?" * 20_000,
    "sexagesimal": "names: {1:1:1:1: a}\n",
    "complex-key": "? [a, b]\n: c\nnames: [a, b]\n",
    "timestamp-bad": "date: 2001-99-99\nnames: [a, b]\n",
    "int-bad": "x: 0b\ny: 0x_\nz: 1__2\nnames: [a, b]\n",
    "float-bad": "x: 1:1e5\nnames: [a, b]\n",
}  # fmt: skip

for _name, _text in YAML.items():

    def _check_yaml(context: Context, text: str = _text) -> list[str]:
        root = context.data("yolo")
        (root / "data.yaml").write_text(text)
        return ["data", "check", str(root)]

    CASES[f"yolo/{_name}"] = _check_yaml

LABELS = {
    "digits": f"{DIGITS} 0.5 0.5 0.2 0.2",
    "digits-float": f"0 0.{DIGITS} 0.5 0.2 0.2",
    "nan": "0 nan 0.5 inf 0.2",
    "text": "cat 0.5 0.5 0.2 0.2",
    "1e400": "0 1e400 0.5 -1e400 0.2",
    "negative": "-1 0.5 0.5 0.2 0.2",
    "unicode": "٣ ٠.٥ 0.5 0.2 0.2",
    "one-word": "0",
    "long-polygon": "0 " + "0.5 0.6 " * 500_000,
    "many-lines": "0 0.5 0.5 0.2 0.2\n" * 200_000,
    "bad-lines": "x\n" * 200_000,
    "underscore": "1_0 0.5 0.5 0.2 0.2",
    "nul": "0 0.5\0 0.5 0.2 0.2",
}
for _name, _text in LABELS.items():

    def _check_label(context: Context, text: str = _text) -> list[str]:
        root = context.data("yolo")
        (root / "labels/train/i0.txt").write_text(text)
        return ["data", "check", str(root)]

    CASES[f"yolo-label/{_name}"] = _check_label


# CSV


CSV = {
    "digits-label": "file,label\n" + f"0.jpg,{DIGITS}\n1.jpg,1\n2.jpg,2\n3.jpg,{DIGITS}\n4.jpg,1\n5.jpg,2\n",
    "nul": "file,label\n0.jpg,a\n1.jpg,b\0\n2.jpg,a\n",
    "nul-file": "file,label\n0.jpg,a\n\0.jpg,b\n2.jpg,a\n",
    "nul-first": "file,label\n\0,a\n",
    "nul-header": "file,label\0\n0.jpg,a\n",
    "long-cell": "file,label\n0.jpg," + "a" * 200_000 + "\n1.jpg,b\n",
    "long-header": "file,label," + "x" * 200_000 + "\n0.jpg,a,b\n",
    "many-columns": "file,label," + ",".join(f"c{n}" for n in range(200_000)) + "\n0.jpg,a\n",
    "open-quote": 'file,label\n0.jpg,"a\n1.jpg,b\n' + "x,y\n" * 1000,
    "file-zero": "file,label\n/dev/zero,a\n1.jpg,b\n2.jpg,a\n3.jpg,b\n4.jpg,a\n5.jpg,b\n",
    "file-root": "file,label\n/,a\n1.jpg,b\n2.jpg,a\n3.jpg,b\n4.jpg,a\n5.jpg,b\n",
    "file-up": "file,label\n../../../../etc/passwd,a\n1.jpg,b\n2.jpg,a\n3.jpg,b\n4.jpg,a\n5.jpg,b\n",
    "file-long": "file,label\n" + "x" * 100_000 + ",a\n1.jpg,b\n",
    "file-folder": "file,label\n.,a\n1.jpg,b\n2.jpg,a\n3.jpg,b\n4.jpg,a\n5.jpg,b\n",
    "many-classes": "file,label\n" + "".join(f"0.jpg,c{n}\n" for n in range(50_000)),
    "many-labels": "file,label\n0.jpg," + ";".join(f"c{n}" for n in range(20_000)) + "\n1.jpg,c1;c2\n2.jpg,c1\n3.jpg,c1\n4.jpg,c1\n5.jpg,c2\n",
    "header-only": "file,label\n",
    "carriage": "file,label\r0.jpg,a\r1.jpg,b\r",
    "nan-column": "file,split,cat,dog\n0.jpg,train,1,nan\n1.jpg,val,0,1\n",
    "text-column": "file,split,cat,dog\n0.jpg,train,1,0\n1.jpg,train,0,yes\n2.jpg,val,0,1\n",
    "surrogates": "file,label\n0.jpg,\udcff\n1.jpg,b\n2.jpg,\udcff\n3.jpg,b\n4.jpg,\udcff\n5.jpg,b\n",
    "control": "file,label\n0.jpg,\x1b[31mred\x1b[0m\n1.jpg,b\n2.jpg,b\n3.jpg,b\n4.jpg,b\n5.jpg,b\n",
}  # fmt: skip
for _name, _text in CSV.items():

    def _check_csv(context: Context, text: str = _text) -> list[str]:
        root = context.data("csv")
        (root / "labels.csv").write_bytes(text.encode("utf-8", "surrogateescape"))
        return ["data", "check", str(root)]

    def _train_csv(context: Context, build: Case = _check_csv) -> list[str]:
        return train_arguments(Path(build(context)[2]))

    CASES[f"csv/{_name}"] = _check_csv
    CASES[f"csv-train/{_name}"] = _train_csv


# tar


def _tar_header(name: bytes, size: bytes, kind: bytes) -> bytes:
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
    return _tar_header(b"pax", b"%011o\0" % len(content), b"x") + padded + _tar_header(b"a.jpg", b"00000000000\0", b"0")


_END = bytes(1024)
TAR = {
    "truncated": tar_bytes({"a.jpg": _IMAGE, "a.cls": b"0"})[:900],
    "huge-size": _tar_header(b"a.jpg", b"77777777777\0", b"0") + _END,
    "base256-size": _tar_header(b"a.jpg", b"\x80" + b"\xff" * 11, b"0") + _END,
    "negative-size": _tar_header(b"a.jpg", b"\xff" * 12, b"0") + _END,
    "longname-huge": _tar_header(b"L", b"77777777777\0", b"L") + _END,
    "longname-chain": b"".join(_tar_header(b"L", b"00000000001\0", b"L") + bytes(512) for _ in range(20_000)) + _END,
    "pax-chain": b"".join(_tar_header(b"p", b"00000000000\0", b"x") for _ in range(20_000)) + _END,
    "pax-size": _pax(b"30 size=" + b"9" * 20 + b"\n") + _END,
    "pax-size-digits": _pax(b"%d size=%b\n" % (5012, DIGITS.encode()[:5000])) + _END,
    "pax-length-digits": _pax(DIGITS.encode() + b" size=1\n") + _END,
    "pax-sparse": _pax(b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n") + _END,
    "pax-sparse-map": _pax(b"33 GNU.sparse.map=0,99999999,1,1\n") + _END,
    "sparse": _tar_header(b"a.jpg", b"00000000000\0", b"S") + _END,
    "symlink": _tar_header(b"a.jpg", b"00000000000\0", b"2") + _END,
    "device": _tar_header(b"a.jpg", b"00000000000\0", b"3") + _END,
    "fifo": _tar_header(b"a.jpg", b"00000000000\0", b"6") + _END,
    "label-digits": tar_bytes({"a.jpg": _IMAGE, "a.cls": DIGITS.encode()}),
    "label-64-digits": tar_bytes({"a.jpg": _IMAGE, "a.cls": b"9" * 60}),
    "label-nan": tar_bytes({"a.jpg": _IMAGE, "a.cls": b"nan"}),
    "label-negative": tar_bytes({"a.jpg": _IMAGE, "a.cls": b"-1"}),
    "label-million": tar_bytes({"a.jpg": _IMAGE, "a.cls": b"1048576"}),
    "name-up": tar_bytes({"../../a.jpg": _IMAGE, "../../a.cls": b"0"}),
    "name-not-utf8": tar_bytes({"\udcff.jpg": _IMAGE, "\udcff.cls": b"0"}),
    "many-members": tar_bytes({f"{n}.txt": b"" for n in range(20_000)}),
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
    members = {"a.jpg": _IMAGE, "a.cls": b"1048576", "b.jpg": _IMAGE, "b.cls": b"1", "c.jpg": _IMAGE, "c.cls": b"1"}
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
    from reconv.data.readers.shards.shard_index import _shards_key

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
    header = _tar_header(b"ILSVRC2012_validation_ground_truth.txt", b"%011o\0" % size, b"0")
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
    content = gzip.compress(_tar_header(b"other", b"%011o\0" % (3 << 30), b"0"))
    (root / kit.name).write_bytes(content + kit.read_bytes())
    return ["data", "check", str(root)]


@case("imagenet-kit/truth-link")
def _(context: Context) -> list[str]:
    root = context.data("imagenet")
    content = _tar_header(b"ILSVRC2012_validation_ground_truth.txt", b"00000000000\0", b"2") + _END
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


# Run directories


def _in_run(file: str, *arguments: str) -> Callable[[Context], tuple[Path, list[str]]]:
    def place(context: Context) -> tuple[Path, list[str]]:
        run = context.run
        path = (context.checkpoint / file[2:]) if file.startswith("*/") else run / file
        shown = [str(run) if a == "RUN" else str(context.image()) if a == "IMAGE" else a for a in arguments]
        return path, shown

    return place


_REPORT = ("report", "RUN")
_EVAL = ("eval", "RUN", "--device", "cpu")
_EVAL_BEST = ("eval", "RUN", "--best", "--device", "cpu")
_PREDICT = ("predict", "RUN", "IMAGE", "--device", "cpu")
_RESUME = ("resume", "RUN", "--device", "cpu")
for _title, _arguments in (("report", _REPORT), ("eval", _EVAL), ("resume", _RESUME), ("predict", _PREDICT)):
    for _file in ("recipe.yaml", "events.jsonl", "summary.json", "run.json"):
        _register_files(f"{_title}-{_file}", _in_run(_file, *_arguments), SPECIAL, CONTENT, JSON)
for _title, _arguments in (("eval", _EVAL), ("resume", _RESUME)):
    for _file in ("*/manifest.json", "*/state.json", "*/model.safetensors", "*/optimizer.safetensors"):
        _register_files(f"{_title}-{_file[2:]}", _in_run(_file, *_arguments), SPECIAL, CONTENT, JSON)
for _file in ("evaluations.csv", "classification.json", "detection.json", "report.html", "alive"):
    _register_files(f"report-{_file}", _in_run(_file, *_REPORT), SPECIAL, CONTENT, JSON)
for _file in ("best.json",):
    _register_files(f"eval-best-{_file}", _in_run(_file, *_EVAL_BEST), SPECIAL, CONTENT, JSON)
_register_files("resume-lock", _in_run("lock", *_RESUME), SPECIAL, CONTENT)
_register_files("resume-alive", _in_run("alive", *_RESUME), SPECIAL, CONTENT)
_register_files("resume-best.json", _in_run("best.json", *_RESUME), SPECIAL, CONTENT, JSON)


def sign(checkpoint: Path) -> None:
    """Make the manifest of a checkpoint right for its files."""
    from reconv.checkpoint import manifest

    old = json.loads((checkpoint / "manifest.json").read_text())
    entries = {name: manifest.entry_of((checkpoint / name).read_bytes()) for name in old["files"]}
    new = manifest.Manifest(old["step"], entries, old["run_id"], old["recipe_digest"])
    (checkpoint / "manifest.json").write_bytes(manifest.render(new))


def _safetensors(header: bytes, length: int | None = None, data: bytes = b"") -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


SAFETENSORS = {
    "length-huge": _safetensors(b"{}", 2**63),
    "length-100m": _safetensors(b"{}", 100 << 20),
    "deep": _safetensors(b'{"a":' * DEEP),
    "deep-list": _safetensors(b'{"a":{"dtype":"F32","shape":' + b"[" * DEEP),
    "shape-huge": _safetensors(b'{"a":{"dtype":"F32","shape":[99999999999,99999999999],"data_offsets":[0,4]}}', data=bytes(4)),
    "shape-digits": _safetensors(b'{"a":{"dtype":"F32","shape":[' + DIGITS.encode() + b'],"data_offsets":[0,4]}}', data=bytes(4)),
    "offsets": _safetensors(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,99999999999]}}', data=bytes(4)),
    "offsets-negative": _safetensors(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}', data=bytes(4)),
    "overlap": _safetensors(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', data=bytes(4)),
    "dtype": _safetensors(b'{"a":{"dtype":"X7","shape":[1],"data_offsets":[0,4]}}', data=bytes(4)),
    "fp4": _safetensors(b'{"a":{"dtype":"F4","shape":[8],"data_offsets":[0,4]}}', data=bytes(4)),
    "name-surrogate": _safetensors(b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', data=bytes(4)),
    "empty-shapes": _safetensors(json.dumps({f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(100_000)}).encode()),
    "metadata-deep": _safetensors(json.dumps({"__metadata__": {"reconv": "[" * DEEP}}).encode()),
    "metadata-digits": _safetensors(json.dumps({"__metadata__": {"reconv": '{"format": ' + DIGITS + "}"}}).encode()),
    "metadata-number": _safetensors(b'{"__metadata__": {"reconv": 7}}'),
}  # fmt: skip
for _name, _content in SAFETENSORS.items():

    def _eval_weights(context: Context, content: bytes = _content) -> list[str]:
        (context.folder / "weights.safetensors").write_bytes(content)
        return ["eval", str(context.folder / "weights.safetensors"), "--recipe", "quickstart", "--device", "cpu"]

    def _eval_signed(context: Context, content: bytes = _content) -> list[str]:
        (context.checkpoint / "model.safetensors").write_bytes(content)
        sign(context.checkpoint)
        return ["eval", str(context.run), "--device", "cpu"]

    def _resume_signed(context: Context, content: bytes = _content) -> list[str]:
        (context.checkpoint / "optimizer.safetensors").write_bytes(content)
        sign(context.checkpoint)
        return ["resume", str(context.run), "--device", "cpu", "--set", "length=3step"]

    CASES[f"weights/{_name}"] = _eval_weights
    CASES[f"signed-model/{_name}"] = _eval_signed
    CASES[f"signed-optimizer/{_name}"] = _resume_signed


def _weights_file(context: Context) -> tuple[Path, list[str]]:
    path = context.folder / "weights.pth"
    return path, ["eval", str(path), "--recipe", "quickstart", "--device", "cpu"]


_register_files("weights-file", _weights_file, SPECIAL, CONTENT, JSON)
for _name, _content in PICKLES.items():

    def _eval_pickle(context: Context, content: bytes = _content) -> list[str]:
        (context.folder / "weights.pth").write_bytes(content)
        return ["eval", str(context.folder / "weights.pth"), "--recipe", "quickstart", "--device", "cpu"]

    CASES[f"weights-pickle/{_name}"] = _eval_pickle


def _zip(members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


ZIPS = {
    "bomb": lambda: _zip({"a/data.pkl": bytes(1 << 30), "a/version": b"3"}, zipfile.ZIP_DEFLATED),
    "pickle": lambda: _zip({"a/data.pkl": PICKLES["os-system"], "a/version": b"3"}),
    "laughs": lambda: _zip({"a/data.pkl": PICKLES["laughs"], "a/version": b"3"}),
    "no-pickle": lambda: _zip({"a/version": b"3"}),
    "empty": lambda: _zip({}),
}
for _name, _make in ZIPS.items():

    def _eval_zip(context: Context, make: Any = _make) -> list[str]:
        (context.folder / "weights.pth").write_bytes(make())
        return ["eval", str(context.folder / "weights.pth"), "--recipe", "quickstart", "--device", "cpu"]

    CASES[f"weights-zip/{_name}"] = _eval_zip


def _tf_index(context: Context) -> tuple[Path, list[str]]:
    path = context.folder / "model.ckpt.index"
    return path, ["eval", str(context.folder / "model.ckpt"), "--recipe", "quickstart", "--device", "cpu"]


def _tf_state(context: Context) -> tuple[Path, list[str]]:
    folder = context.folder / "tf"
    folder.mkdir()
    return folder / "checkpoint", ["eval", str(folder), "--recipe", "quickstart", "--device", "cpu"]


_register_files("tf-index", _tf_index, SPECIAL, CONTENT)
_register_files("tf-state", _tf_state, SPECIAL, CONTENT)


def tensorflow_table(block: bytes, handle: tuple[int, int] | None = None) -> bytes:
    def sealed(content: bytes) -> bytes:
        return content + b"\0" + masked_crc32c(content + b"\0").to_bytes(4, "little")

    data = sealed(block)
    pointer = encode_varint(0) + encode_varint(len(block))
    entry = encode_varint(0) + encode_varint(1) + encode_varint(len(pointer)) + b"z" + pointer
    top = entry + (0).to_bytes(4, "little") + (1).to_bytes(4, "little")
    at = len(data)
    data += sealed(top)
    where = handle or (at, len(top))
    footer = encode_varint(0) + encode_varint(0) + encode_varint(where[0]) + encode_varint(where[1])
    return data + footer + bytes(40 - len(footer)) + 0xDB4775248B80FB57.to_bytes(8, "little")


def _block(*entries: tuple[int, bytes, bytes]) -> bytes:
    body = b"".join(encode_varint(s) + encode_varint(len(k)) + encode_varint(len(v)) + k + v for s, k, v in entries)
    return body + (0).to_bytes(4, "little") + (1).to_bytes(4, "little")


def _entry(dtype: int, shape: list[int], size: int, offset: int = 0, file: int = 0) -> bytes:
    dims = b"".join(encode_bytes_field(2, b"\x08" + encode_varint(n)) for n in shape)
    numbers = b"".join(
        bytes([number << 3]) + encode_varint(value) for number, value in ((1, dtype), (3, file), (4, offset), (5, size))
    )
    return encode_bytes_field(2, dims) + numbers


_HEAD = (0, b"", b"\x08\x01")
TABLES = {
    "no-header": tensorflow_table(_block((0, b"a", b""))),
    "handle-outside": tensorflow_table(_block(_HEAD), (2**62, 2**62)),
    "shape-huge": tensorflow_table(_block(_HEAD, (0, b"a", _entry(1, [2**40, 2**40], 4)))),
    "shape-many": tensorflow_table(_block(_HEAD, (0, b"a", _entry(1, [1] * 10_000, 4)))),
    "size-huge": tensorflow_table(_block(_HEAD, (0, b"a", _entry(1, [2**45], 2**47)))),
    "negative": tensorflow_table(_block(_HEAD, (0, b"a", _entry(1, [2**64 - 1], 4)))),
    "dtype": tensorflow_table(_block(_HEAD, (0, b"a", _entry(99, [1], 4)))),
    "file-huge": tensorflow_table(_block(_HEAD, (0, b"a", _entry(1, [1], 4, 0, 2**60)))),
    "files-many": tensorflow_table(_block((0, b"", b"\x08" + encode_varint(2**60)))),
    "shared": tensorflow_table(_block(_HEAD, (99, b"a", b""))),
    "prefix-bomb": tensorflow_table(_block(_HEAD, (0, b"a" * 60_000, b""), *((60_000 + n, b"b", b"") for n in range(20_000)))),
    "restarts": tensorflow_table(b"\xff" * 8),
}  # fmt: skip
for _name, _content in TABLES.items():

    def _eval_table(context: Context, content: bytes = _content) -> list[str]:
        (context.folder / "model.ckpt.index").write_bytes(content)
        (context.folder / "model.ckpt.data-00000-of-00001").write_bytes(bytes(8))
        return ["eval", str(context.folder / "model.ckpt"), "--recipe", "quickstart", "--device", "cpu"]

    CASES[f"tf-table/{_name}"] = _eval_table


STATES: dict[str, Any] = {
    "step-huge": {"step": 10**30},
    "step-float": {"step": 1.5},
    "step-text": {"step": "x"},
    "total-huge": {"total_steps": 10**30},
    "history-text": {"history": "x"},
    "history-nan": {"history": [{"step": 1, "weights": "raw", "metrics": {"top1": float("nan")}}]},
    "history-many": {"history": [{"step": 1, "weights": "raw", "metrics": {"top1": 0.1}}] * 100_000},
    "recipe-list": {"recipe": []},
    "recipe-empty": {"recipe": {}},
    "recipe-deep": {"recipe": {"model": json.loads("[" * 400 + "]" * 400)}},
    "class-names-numbers": {"class_names": [1, 2]},
    "class-names-many": {"class_names": ["c"] * 1_000_000},
    "class-names-surrogate": {"class_names": ["\ud800"] * 10},
    "threads": {"threads": 10**9},
    "micro-groups": {"micro_groups": 10**30},
    "bad-images": {"bad_images": [{"split": "train", "index": 10**30, "step": 1, "path": "x", "why": "y"}]},
    "device": {"device": 7},
    "callbacks": {"callbacks": []},
    "code": {"code": {"x": 7}},
    "fingerprint": {"data_fingerprint": {"train": 7}},
}
for _name, _changes in STATES.items():

    def _edit_state(context: Context, changes: dict[str, Any] = _changes) -> None:
        file = context.checkpoint / "state.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
        sign(context.checkpoint)

    def _resume_state(context: Context, edit: Any = _edit_state) -> list[str]:
        edit(context)
        return ["resume", str(context.run), "--device", "cpu", "--set", "length=3step"]

    def _predict_state(context: Context, edit: Any = _edit_state) -> list[str]:
        edit(context)
        return ["predict", str(context.run), str(context.image()), "--device", "cpu"]

    CASES[f"resume-state/{_name}"] = _resume_state
    CASES[f"predict-state/{_name}"] = _predict_state

RUN_JSON: dict[str, tuple[str, Any]] = {
    "summary-steps-text": ("summary.json", {"exit_code": 0, "steps": "x", "total_steps": "y"}),
    "summary-steps-list": ("summary.json", {"exit_code": 0, "steps": [], "total_steps": {}}),
    "summary-steps-inf": ("summary.json", {"exit_code": 0, "steps": float("inf"), "total_steps": float("nan")}),
    "best-step-inf": ("best.json", {"step": float("inf"), "metric": "top1", "value": 1, "weights": "raw"}),
    "best-step-text": ("best.json", {"step": "x", "metric": "top1", "value": "y", "weights": "raw"}),
    "best-value-huge": ("best.json", {"step": 1, "metric": "top1", "value": 10**400, "weights": "raw"}),
    "run-id-number": ("run.json", {"format": 1, "run_id": 7, "recipe_digests": 8}),
    "run-digests": ("run.json", {"format": 1, "run_id": "x", "recipe_digests": {"a": 1}}),
    "classification-empty": ("classification.json", {"version": 1}),
    "classification-text": ("classification.json", {"version": 1, "confusion": "x", "classes": 7}),
    "detection-empty": ("detection.json", {"version": 3}),
    "detection-text": ("detection.json", {"version": 3, "best_threshold": "x"}),
}
for _name, (_file, _value) in RUN_JSON.items():
    for _title, _arguments in (("report", _REPORT), ("eval-best", _EVAL_BEST), ("resume", _RESUME)):

        def _edit_run(
            context: Context, file: str = _file, value: Any = _value, arguments: Any = _arguments
        ) -> list[str]:
            (context.run / file).write_text(json.dumps(value))
            return [str(context.run) if a == "RUN" else a for a in arguments]

        CASES[f"{_title}-run-json/{_name}"] = _edit_run

MANIFESTS: dict[str, Any] = {
    "files-list": {"files": []},
    "size-huge": {"files": {"state.json": {"sha256": "x", "size": 10**30}}},
    "size-negative": {"files": {"state.json": {"sha256": "x", "size": -1}}},
    "size-inf": {"files": {"state.json": {"sha256": "x", "size": float("inf")}}},
    "size-text": {"files": {"state.json": {"sha256": "x", "size": "y"}}},
    "name-up": {"files": {"../../x": {"sha256": "x", "size": 1}}},
    "name-nul": {"files": {"a\0b": {"sha256": "x", "size": 1}}},
    "name-long": {"files": {"a" * 5000: {"sha256": "x", "size": 1}}},
    "name-surrogate": {"files": {"\ud800": {"sha256": "x", "size": 1}}},
    "step-inf": {"step": float("inf")},
    "step-text": {"step": "x"},
    "many-files": {"files": {f"f{n}": {"sha256": "x", "size": 1} for n in range(100_000)}},
}
for _name, _changes in MANIFESTS.items():

    def _eval_manifest(context: Context, changes: dict[str, Any] = _changes) -> list[str]:
        from reconv.checkpoint import manifest

        file = context.checkpoint / "manifest.json"
        body = {**json.loads(file.read_text()), **changes}
        body.pop("digest")
        file.write_text(json.dumps({**body, "digest": manifest._digest(body)}))
        return ["eval", str(context.run), "--device", "cpu"]

    CASES[f"manifest/{_name}"] = _eval_manifest

RECIPES = {
    "alias-bomb": _ALIASES + "\n",
    "alias": "a: &a 1\nb: *a\n",
    "deep": "model: " + "[" * 20_000,
    "deep-map": "model: " + "{a: " * 20_000,
    "deep-block": "\n".join(" " * n + "a:" for n in range(3000)),
    "digits": f"seed: {DIGITS}\n",
    "hex-digits": "seed: 0x" + "f" * 500_000 + "\n",
    "float-digits": f"schedule:\n  lr: 0.{DIGITS}\n",
    "nan": "schedule:\n  lr: .nan\n",
    "inf": "schedule:\n  lr: .inf\n",
    "python-tag": "name: !!python/object/apply:os.system ['touch hacked']\n",
    "length": "length: 1e308ep\n",
    "length-digits": f"length: {DIGITS}ep\n",
    "size": "data:\n  preprocess:\n    size: 99999999999\n",
    "batch": "batch:\n  size: 99999999999999\n",
    "workers": "data:\n  num_workers: 999999999\n",
    "extends-self": "extends: recipe.yaml\n",
    "extends-zero": "extends: /dev/zero\n",
    "extends-list": "extends: [a]\n",
    "list": "- a\n",
    "long-key": "k" * 1_000_000 + ": 1\n",
    "many-keys": "\n".join(f"k{n}: 1" for n in range(20_000)),
    "flow-questions": "a: {" + "?" * 20_000,
    "name-long": "extends: quickstart\nname: " + "n" * 5000 + "\n",
    "name-slash": "extends: quickstart\nname: ../../x\n",
    "classes": "model:\n  options: {num_classes: 99999999999}\n",
}
for _name, _text in RECIPES.items():

    def _train_recipe(context: Context, text: str = _text) -> list[str]:
        path = context.folder / "recipe.yaml"
        path.write_text(text if "extends:" in text else "extends: quickstart\n" + text)
        return ["train", str(path), "--dry-run", "1", "--device", "cpu"]

    def _report_recipe(context: Context, text: str = _text) -> list[str]:
        (context.run / "recipe.yaml").write_text(text)
        return ["report", str(context.run)]

    CASES[f"recipe/{_name}"] = _train_recipe
    CASES[f"report-recipe/{_name}"] = _report_recipe


def _recipe_file(context: Context) -> tuple[Path, list[str]]:
    path = context.folder / "recipe.yaml"
    return path, ["train", str(path), "--dry-run", "1", "--device", "cpu"]


_register_files("recipe-file", _recipe_file, SPECIAL, CONTENT, JSON)


@case("run/long-step")
def _(context: Context) -> list[str]:
    (context.run / "checkpoints" / ("step-" + "9" * 240)).mkdir()
    return ["eval", str(context.run), "--device", "cpu"]


@case("run/step-loop")
def _(context: Context) -> list[str]:
    (context.run / "checkpoints/step-999999999").symlink_to("step-999999999")
    return ["eval", str(context.run), "--device", "cpu"]


@case("run/step-fifo")
def _(context: Context) -> list[str]:
    os.mkfifo(context.run / "checkpoints/step-999999999")
    return ["eval", str(context.run), "--device", "cpu"]


@case("run/checkpoints-loop")
def _(context: Context) -> list[str]:
    shutil.rmtree(context.run / "checkpoints")
    link_loop(context.run / "checkpoints")
    return ["eval", str(context.run), "--device", "cpu"]


@case("run/run-is-loop")
def _(context: Context) -> list[str]:
    link_loop(context.folder / "x")
    return ["eval", str(context.folder / "x"), "--device", "cpu"]


@case("run/run-is-root")
def _(context: Context) -> list[str]:
    return ["eval", "/", "--device", "cpu"]


@case("run/run-is-zero")
def _(context: Context) -> list[str]:
    return ["eval", "/dev/zero", "--device", "cpu"]


@case("run/report-root")
def _(context: Context) -> list[str]:
    return ["report", "/"]


@case("run/resume-zero")
def _(context: Context) -> list[str]:
    return ["resume", "/dev/zero"]


@case("run/number-names")
def _(context: Context) -> list[str]:
    (context.folder / "runs").mkdir()
    (context.folder / "runs" / ("9" * 250)).mkdir()
    return ["eval", str(context.folder / "runs"), "--device", "cpu"]


for _name, _make in {
    "init-fifo": fifo, "init-zeros": zeros, "init-sparse": sparse, "init-loop": link_loop, "init-not-utf8": not_utf8,
}.items():  # fmt: skip

    def _train_init(context: Context, make: Any = _make) -> list[str]:
        make(context.folder / "w.pth")
        return ["train", "quickstart", "--init", str(context.folder / "w.pth"), "--dry-run", "1", "--device", "cpu"]

    CASES[f"train/{_name}"] = _train_init


# Predict


@case("predict/root")
def _(context: Context) -> list[str]:
    return ["predict", str(context.run), "/", "--device", "cpu"]


@case("predict/proc")
def _(context: Context) -> list[str]:
    return ["predict", str(context.run), "/proc", "--device", "cpu"]


@case("predict/zero")
def _(context: Context) -> list[str]:
    return ["predict", str(context.run), "/dev/zero", "--device", "cpu"]


@case("predict/folder-of-special-files")
def _(context: Context) -> list[str]:
    folder = context.folder / "images"
    folder.mkdir()
    for name, make in SPECIAL.items():
        make(folder / f"{name}.png")
    (folder / "up").symlink_to("..")
    (folder / "all").symlink_to("/")
    (folder / "good.png").write_bytes(context.image().read_bytes())
    return ["predict", str(context.run), str(folder), "--device", "cpu", "--json"]


@case("predict/not-utf8")
def _(context: Context) -> list[str]:
    path = Path(os.fsdecode(os.fsencode(context.folder) + b"/\xff\xfe.png"))
    path.write_bytes(context.image().read_bytes())
    return ["predict", str(context.run), str(path), "--device", "cpu"]


@case("predict/not-utf8-json")
def _(context: Context) -> list[str]:
    return [*CASES["predict/not-utf8"](context), "--json"]


@case("predict/not-utf8-json-file")
def _(context: Context) -> list[str]:
    return [*CASES["predict/not-utf8"](context), "--json", str(context.folder / "out.json")]


@case("predict/long-path")
def _(context: Context) -> list[str]:
    return ["predict", str(context.run), "x" * 300, "--device", "cpu"]


@case("predict/very-long-path")
def _(context: Context) -> list[str]:
    return ["predict", str(context.run), "x/" * 5000, "--device", "cpu"]


@case("predict/loop")
def _(context: Context) -> list[str]:
    link_loop(context.folder / "x.png")
    return ["predict", str(context.run), str(context.folder / "x.png"), "--device", "cpu"]


# Command lines


COMMANDS: dict[str, list[str]] = {
    "long-recipe": ["train", "r" * 5000],
    "long-out": ["train", "quickstart", "--out", "o" * 300, "--set", "length=1step", "--device", "cpu"],
    "very-long-out": ["train", "quickstart", "--out", "o/" * 3000, "--set", "length=1step", "--device", "cpu"],
    "long-name": ["train", "quickstart", "--set", f"name={'n' * 300}", "--set", "length=1step", "--device", "cpu"],
    "long-data": ["train", "resnet18", "--data", "d" * 300, "--dry-run", "1"],
    "long-eval": ["eval", "r" * 300],
    "long-report": ["report", "r" * 300],
    "long-resume": ["resume", "r" * 300],
    "long-check": ["data", "check", "d" * 300],
    "long-init": ["train", "quickstart", "--init", "w" * 300, "--dry-run", "1", "--device", "cpu"],
    "set-digits": ["train", "quickstart", "--set", f"seed={DIGITS}", "--dry-run", "1"],
    "set-hex": ["train", "quickstart", "--set", "seed=0x" + "f" * 100_000, "--dry-run", "1"],
    "set-deep": ["train", "quickstart", "--set", "model.options=" + "[" * 100_000, "--dry-run", "1"],
    "set-nan": ["train", "quickstart", "--set", "schedule.lr=.nan", "--dry-run", "1"],
    "set-long-field": ["train", "quickstart", "--set", "x." * 20_000 + "y=1", "--dry-run", "1"],
    "batch-digits": ["train", "quickstart", "--batch-size", DIGITS, "--dry-run", "1"],
    "batch-huge": ["train", "quickstart", "--batch-size", "9" * 15, "--dry-run", "1", "--device", "cpu"],
    "workers-huge": ["train", "quickstart", "--workers", "999999999", "--dry-run", "1", "--device", "cpu"],
    "workers-digits": ["train", "quickstart", "--workers", DIGITS, "--dry-run", "1", "--device", "cpu"],
    "check-workers": ["data", "check", "digits", "--workers", "999999999"],
    "check-workers-digits": ["data", "check", "digits", "--workers", DIGITS],
    "devices-huge": ["train", "quickstart", "--devices", "999999999"],
    "dry-run-digits": ["train", "quickstart", "--dry-run", DIGITS, "--device", "cpu"],
    "stop-after-digits": ["train", "quickstart", "--stop-after", f"{DIGITS}step", "--device", "cpu"],
    "top-digits": ["predict", "RUN", "IMAGE", "--top", DIGITS, "--device", "cpu"],
    "top-huge": ["predict", "RUN", "IMAGE", "--top", "9" * 18, "--device", "cpu"],
    "not-utf8-recipe": ["train", os.fsdecode(b"\xff\xfe")],
    "not-utf8-out": [
        "train",
        "quickstart",
        "--out",
        os.fsdecode(b"\xff\xfe"),
        "--set",
        "length=2step",
        "--device",
        "cpu",
    ],
    "not-utf8-eval": ["eval", os.fsdecode(b"\xff\xfe")],
    "not-utf8-set": [
        "train",
        "quickstart",
        "--set",
        os.fsdecode(b"name=\xff\xfe"),
        "--set",
        "length=2step",
        "--device",
        "cpu",
    ],
    "not-utf8-set-description": [
        "train",
        "quickstart",
        "--set",
        os.fsdecode(b"description=\xff\xfe"),
        "--set",
        "length=2step",
        "--device",
        "cpu",
    ],
    "not-utf8-json": ["recipes", "--json=" + os.fsdecode(b"\xff\xfe")],
    "json-folder": ["recipes", "--json=/"],
    "json-long": ["recipes", "--json=" + "j" * 300],
    "check-out-long": ["data", "check", "digits", "--out", "o" * 300],
    "check-out-not-utf8": ["data", "check", "digits", "--out", os.fsdecode(b"\xff\xfe")],
    "show-out-long": ["data", "show", "digits", "--out", "o" * 300 + ".png"],
    "report-out-long": ["report", "RUN", "--out", "o" * 300],
    "average-out-long": ["average", "RUN", "--out", "o" * 300],
    "empty-data": ["train", "resnet18", "--data", "", "--dry-run", "1"],
    "empty-out": ["train", "quickstart", "--out", "", "--set", "length=1step", "--device", "cpu"],
    "empty-run": ["eval", ""],
    "empty-image": ["predict", "RUN", "", "--device", "cpu"],
}
for _name, _command in COMMANDS.items():

    def _command_line(context: Context, command: list[str] = _command) -> list[str]:
        return [str(context.run) if a == "RUN" else str(context.image()) if a == "IMAGE" else a for a in command]

    CASES[f"command/{_name}"] = _command_line


# Convert


for _kind, _file in (("folder", "packed"), ("folder", "images"), ("csv", "images"), ("coco", "tfrecord")):

    def _convert(context: Context, kind: str = _kind, to: str = _file) -> list[str]:
        root = context.data(kind)
        if kind == "folder":
            (root / "train" / ("c" * 255)).mkdir()
            (root / "train" / ("c" * 255) / "0.jpg").write_bytes(_IMAGE)
        if kind == "csv":
            rows = [f"{n}.jpg,{'k' * 300 if n % 2 else 'a/../../b'},{'train' if n < 6 else 'val'}\n" for n in range(8)]
            (root / "labels.csv").write_text("file,label,split\n" + "".join(rows))
        return ["data", "convert", str(root), str(context.folder / "out"), "--to", to]

    CASES[f"convert/{_kind}-{_file}"] = _convert
