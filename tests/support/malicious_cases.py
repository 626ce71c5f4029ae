"""What cases of malicious inputs are made of: small valid datasets, special files, and the table of cases.

A case writes its files into an empty folder and returns the arguments of `reconv`. `context.run` is a finished run of
the recipe quickstart that the case may change; `context.data(kind)` a small valid dataset of a format.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import socket
import struct
import tarfile
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

DIGITS = "7" * 5000
DEEP = 200_000
SPARSE_BYTES = 200 << 30
IMAGE = encode(noise(16, 16, 3, 0), "JPEG")


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


def register_files(prefix: str, place: Callable[[Context], tuple[Path, list[str]]], *groups: Mapping[str, Any]) -> None:
    for group in groups:
        for name, make in group.items():

            def build(context: Context, make: Any = make) -> list[str]:
                path, arguments = place(context)
                make(path)
                return arguments

            CASES[f"{prefix}/{name}"] = build


def in_data_check(kind: str, file: str) -> Callable[[Context], tuple[Path, list[str]]]:
    def place(context: Context) -> tuple[Path, list[str]]:
        root = context.data(kind)
        return root / file, ["data", "check", str(root)]

    return place


def in_dry_run(kind: str, file: str, recipe: str = "resnet18") -> Callable[[Context], tuple[Path, list[str]]]:
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
