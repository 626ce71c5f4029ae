"""Your own map-style datasets: `len(dataset)`, `dataset[i] -> (image, target)` and `classes`, as torchvision's have.

An image is a PIL image, a uint8 array [height, width(, channels)], a uint8 tensor [channels, height, width] or the
bytes of an image file. Unless the dataset has a true attribute `thread_safe`, only one thread calls it at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from reconv.core.custom_code import accepts, check_arguments, code_errors, load_object
from reconv.core.errors import DataError, UsageError
from reconv.data.dataset import I64, U8, LabelError, Sample, Split
from reconv.data.decode.pillow import convert_mode, to_array

_GRAY_MODES = ("1", "L", "LA", "I", "I;16", "F")


@dataclass(frozen=True, slots=True)
class SplitDatasets:
    """Two datasets from Python, as what an import path for `data.source` names."""

    train: Any
    val: Any

    def __call__(self, split: Split) -> Any:
        if split not in ("train", "val"):
            raise DataError(f"there is no {split} split", why="datasets from Python are for training and validation")
        return self.train if split == "train" else self.val


def open_custom(source: str, path: Path | None, split: Split, options: Mapping[str, Any]) -> CustomDataset:
    """One split of the dataset that `source` makes when it is called with `split`, the options and, if it takes it,
    `path`."""
    make = load_object(source)
    if not callable(make):
        raise UsageError(f"{source} is not a function or a class", why=f"it is {make!r}", where="data.source")
    arguments = {"split": split, **({"path": path} if accepts(make, "path") else {}), **options}
    if path is not None and "path" not in arguments and str(path) != os.environ.get("DATA_DIR"):
        raise UsageError(f"{source} takes no `path` and would ignore {path}", hint="leave --data and data.path out")
    check_arguments(make, arguments, source)
    with code_errors(source):
        dataset = make(**arguments)
    return CustomDataset(dataset, source, split)


class CustomDataset:
    """One split of the user's own data."""

    kind = "custom"

    def __init__(self, dataset: Any, source: str, split: Split) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise UsageError(
                f"{source} returned a {type(dataset).__name__}, which is not a map-style dataset",
                hint="give it __len__ and __getitem__",
            )
        self._dataset = dataset
        self._name = f"{source}({split})"
        with code_errors(f"len() of {self._name}"):
            self._length = len(dataset)
        self.class_names = _class_names(dataset, self._name)
        self.origin = f"{source}: custom dataset ({split}: {self._length:,} samples)"
        self._lock = _lock(dataset)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        name = f"{self._name}[{index}]"
        with self._lock, code_errors(name):
            try:
                item = self._dataset[index]
            except (OSError, EOFError) as error:  # Pillow's errors are OSErrors
                raise DataError(
                    "the sample cannot be read", where=name, why=f"{type(error).__name__}: {error}"
                ) from error
        if not isinstance(item, tuple | list) or len(item) < 2:
            raise UsageError(f"{name} is a {type(item).__name__}, not a pair of an image and a class index")
        return Sample(_pixels(item[0], name), _class_index(item[1], name), name)

    @property
    def targets(self) -> I64 | None:
        """The class of every sample, where the dataset has them."""
        found = getattr(self._dataset, "targets", None)
        return None if found is None else np.asarray(found, np.int64)

    def fingerprint(self) -> str:
        """A digest of the length, the class names and the dataset's own fingerprint(), where it has one."""
        own = ""
        if hasattr(self._dataset, "fingerprint"):
            with code_errors(f"fingerprint() of {self._name}"):
                own = str(self._dataset.fingerprint())
        return hashlib.sha256(json.dumps([self._length, self.class_names, own]).encode()).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=_lock(state["_dataset"]))


def _lock(dataset: Any) -> AbstractContextManager[Any]:
    return nullcontext() if getattr(dataset, "thread_safe", False) else threading.Lock()


def _class_names(dataset: Any, name: str) -> tuple[str, ...]:
    """The attribute `classes` or `class_names` of a dataset, or of the one it is a torch `Subset` of."""
    inner = dataset
    while inner is not None:
        found = getattr(inner, "classes", None) or getattr(inner, "class_names", None)
        if found:
            return tuple(str(item) for item in found)
        inner = getattr(inner, "dataset", None)
    raise UsageError(
        f"{name} does not say what its classes are",
        why=f"{type(dataset).__name__} has neither `classes` nor `class_names`",
        hint="give it a list of class names, as in self.classes = ['cat', 'dog']",
    )


def _pixels(image: Any, name: str) -> bytes | U8:
    """An image as the decoding pipeline takes it: an encoded file, or pixels [height, width, 1 or 3]."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, Image.Image):
        upright = ImageOps.exif_transpose(image)
        return to_array(convert_mode(upright, 1 if upright.mode in _GRAY_MODES else 3))
    found = image
    if isinstance(image, torch.Tensor):
        found = image.permute(1, 2, 0).numpy() if image.ndim == 3 else image.numpy()
    if isinstance(found, np.ndarray):
        found = found[:, :, None] if found.ndim == 2 else found
        if found.dtype == np.uint8 and found.ndim == 3 and found.shape[2] in (1, 3) and found.size:
            return np.ascontiguousarray(found)
        given = f"{'a tensor' if isinstance(image, torch.Tensor) else 'an array'} {list(image.shape)} of {image.dtype}"
    else:
        given = f"a {type(image).__name__}"
    raise UsageError(
        f"the image of {name} is {given}",
        why="images are PIL images, uint8 arrays [height, width, 1 or 3], uint8 tensors [1 or 3, h, w] or bytes",
        hint="return the image as it is: data.preprocess resizes and normalizes it",
    )


def _class_index(target: Any, name: str) -> int:
    try:
        index = int(target)
    except (TypeError, ValueError):
        index = -1
    if index < 0 or index != target:
        raise LabelError(f"the target of {name} is {target!r}, not a class index", where=name)
    return index
