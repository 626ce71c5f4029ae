"""Small datasets and helpers that the data tests share."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

import reconv
from reconv.data.readers.cifar import LAYOUTS, CifarLayout


def encode(array: np.ndarray, format: str = "PNG", **options: object) -> bytes:
    """An array as an image file."""
    file = io.BytesIO()
    Image.fromarray(array).save(file, format, **options)
    return file.getvalue()


def noise(height: int, width: int, channels: int, seed: int) -> np.ndarray:
    """Random pixels."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def write_image_tree(root: Path) -> Path:
    """An image tree: 3 classes, 11 training and 5 validation images of different sizes, PNG and JPEG."""
    number = 0
    for split, counts in (("train", (4, 4, 3)), ("val", (2, 2, 1))):
        for name, count in zip(("ant", "bee", "cat"), counts, strict=True):
            folder = root / split / name
            folder.mkdir(parents=True)
            for _ in range(count):
                pixels = noise(40 + number, 70 - 2 * number, 3, number)
                ending, form = (("JPEG", "JPEG"), ("png", "PNG"))[number % 2]
                (folder / f"{number:03}.{ending}").write_bytes(encode(pixels, form))
                number += 1
    return root


def trained_weights(data: Path, out: Path, settings: Mapping[str, object]) -> bytes:
    """The weights that a small network has after three epochs on an image tree."""
    small = {
        "data.source": "folder",
        "data.preprocess.size": 16,
        "data.preprocess.resize": 16,
        "model.name": "resnet8_cifar",
        "batch.size": 4,
        "batch.group": "all",
        "length": "3ep",
        "engine.num_threads": 1,
    }
    overrides = [(name, value, "test") for name, value in {**small, **settings}.items()]
    reconv.train("resnet18", data=data, out=out, overrides=overrides, device="cpu")
    [last] = sorted((out / "checkpoints").glob("step-*/model.safetensors"))[-1:]
    return last.read_bytes()


def cifar_layout(kind: str, form: str) -> CifarLayout:
    """The layout of one form of one data set."""
    (layout,) = [layout for layout in LAYOUTS if (layout.kind, layout.form) == (kind, form)]
    return layout
