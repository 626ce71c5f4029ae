"""CIFAR-10 and CIFAR-100, in their binary and python formats.

Both formats give the same pixels, targets and fingerprint. Pickles are loaded with an allow-list, so they cannot run
code.
"""

from __future__ import annotations

import codecs
import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from reconv.core.errors import DataError
from reconv.data.dataset import I64, U8, Split
from reconv.data.readers.arrays import ArrayDataset
from reconv.storage.local import open_ranges, read

CifarKind = Literal["cifar10", "cifar100"]
CifarFormat = Literal["binary", "python"]

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
_THREADS = 4


@dataclass(frozen=True, slots=True)
class CifarLayout:
    """The file names of one format of one dataset."""

    kind: CifarKind
    form: CifarFormat
    folder: str  # its name in the official archive
    train: tuple[str, ...]
    val: tuple[str, ...]
    names: str  # file with the class names
    num_classes: int
    labels_key: bytes = b""  # python format
    label_bytes: int = 1  # binary format: bytes before the pixels; the last one is the label

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, *self.val, self.names)


_FIVE = tuple(f"data_batch_{number}" for number in range(1, 6))
_FIVE_BIN = tuple(f"{name}.bin" for name in _FIVE)

LAYOUTS = (
    CifarLayout("cifar10", "binary", "cifar-10-batches-bin", _FIVE_BIN, ("test_batch.bin",), "batches.meta.txt", 10),
    CifarLayout("cifar10", "python", "cifar-10-batches-py", _FIVE, ("test_batch",), "batches.meta", 10, b"labels"),
    CifarLayout(
        "cifar100", "binary", "cifar-100-binary", ("train.bin",), ("test.bin",), "fine_label_names.txt", 100,
        label_bytes=2,
    ),
    CifarLayout("cifar100", "python", "cifar-100-python", ("train",), ("test",), "meta", 100, b"fine_labels"),
)  # fmt: skip


def open_cifar(layout: CifarLayout, folder: Path, split: Split, why: str = "") -> ArrayDataset:
    """One split of the dataset in `folder`."""
    missing = [name for name in layout.files if not (folder / name).is_file()]
    if missing:
        raise _damaged(layout, folder, f"{layout.kind} has no {', '.join(missing)}", "the copy is incomplete")
    load = _read_binary if layout.form == "binary" else _read_python
    names = layout.train if split == "train" else layout.val
    with ThreadPoolExecutor(_THREADS, "cifar") as threads:  # most of the time goes into memory that is used first
        files = list(threads.map(lambda name: load(layout, folder / name), names))
        counts = [len(labels) for _, labels in files]
        if len(set(counts)) > 1 or min(counts) == 0:
            raise _damaged(
                layout, folder, f"{layout.kind} files have {counts} samples, which should be equal", "one is truncated"
            )
        images = np.empty((len(names), *files[0][0].shape), np.uint8)
        list(threads.map(lambda number: np.copyto(images[number], files[number][0]), range(len(names))))
    targets = np.concatenate([labels for _, labels in files])
    origin = f"{layout.kind} in {layout.form} format at {folder}" + (f" ({why})" if why else "")
    images = images.reshape(-1, 3, _SIDE, _SIDE)
    return ArrayDataset(layout.kind, images, targets, _class_names(layout, folder), origin)


def _read_binary(layout: CifarLayout, path: Path) -> tuple[U8, I64]:
    """Records of label bytes and 3072 pixels in red, green and blue planes."""
    file = open_ranges(path)
    file.check_not_truncated()
    data = np.frombuffer(file.read(0, file.size_bytes), np.uint8)  # a local file is mapped: its pixels are copied once
    record = layout.label_bytes + _PIXELS
    if len(data) % record:
        what = f"{path.name} has {len(data)} bytes, which is not a multiple of {record}"
        raise _damaged(layout, path, what, "the file is truncated")
    rows = data.reshape(-1, record)
    pixels = rows[:, layout.label_bytes :].reshape(-1, 3, _SIDE, _SIDE)
    return pixels, rows[:, layout.label_bytes - 1].astype(np.int64)


def _read_python(layout: CifarLayout, path: Path) -> tuple[U8, I64]:
    """A pickled dict with an array of pixels and a list of labels."""
    content = _load_plain(layout, path)
    pixels = content.get(b"data")
    labels = content.get(layout.labels_key)
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (_PIXELS,):
        raise _damaged(layout, path, f"{path.name} has no array of uint8 pixels [n, {_PIXELS}]", "not a CIFAR file")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels) or len(labels) != len(pixels):
        raise _damaged(layout, path, f"{path.name} has no list of {len(pixels)} labels", "not a CIFAR file")
    # What is out of range is refused with its number by ArrayDataset; an int64 must hold it.
    return pixels.reshape(-1, 3, _SIDE, _SIDE), np.array([max(-1, min(label, 255)) for label in labels], np.int64)


def _class_names(layout: CifarLayout, folder: Path) -> tuple[str, ...]:
    path = folder / layout.names
    if layout.form == "binary":
        names = read(path).decode("utf-8", "replace").split()
    else:
        key = b"label_names" if layout.kind == "cifar10" else b"fine_label_names"
        listed = _load_plain(layout, path).get(key)
        listed = listed if isinstance(listed, list) else []
        names = [name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name) for name in listed]
    if len(names) != layout.num_classes:
        what = f"{path.name} names {len(names)} classes instead of {layout.num_classes}"
        raise _damaged(layout, path, what, "the file is truncated")
    return tuple(names)


def _load_plain(layout: CifarLayout, path: Path) -> dict[Any, Any]:
    """A pickled dict of plain values and numpy arrays; anything else is refused before it is created."""
    data = read(path)
    try:
        content = _PlainUnpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a damaged pickle may raise anything
        why = f"truncated, or not a CIFAR file: {error}"
        raise _damaged(layout, path, f"cannot unpickle {path.name}", why) from error
    if not isinstance(content, dict):
        raise _damaged(layout, path, f"{path.name} does not hold a dict", "not a CIFAR file")
    # A file pickled by Python 3 has str keys.
    return {key.encode() if isinstance(key, str) else key: value for key, value in content.items()}


def _latin1(text: str, encoding: str) -> bytes:
    """Encode text as pickle protocol 2 stores bytes; no other codec is allowed."""
    if codecs.lookup(encoding).name != "iso8859-1":
        raise pickle.UnpicklingError(f"codec {encoding} is not allowed")
    return text.encode("latin-1")


# The function that numpy pickles arrays with; its module differs between versions.
_reconstruct: Any = np.empty(0).__reduce__()[0]

_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin1,
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Only functions that build numpy arrays or bytes."""
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"refused to load {module}.{name}: data files must not run code")
        return _ALLOWED[module, name]


def _damaged(layout: CifarLayout, where: Path, what: str, why: str) -> DataError:
    return DataError(what, where=str(where), why=why, hint=f"download it again: reconv data get {layout.kind}")
