"""Untrained networks with random statistics as weights files, and image files of all kinds, for tests of export."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jpeg_examples import photograph
from PIL import Image
from torch import nn

from reconv.build.model import model_options
from reconv.checkpoint.safetensors_bytes import encode
from reconv.checkpoint.weights_metadata import WeightsMetadata, to_header
from reconv.models import build_model
from reconv.recipe.schema import Recipe

CLASSES = tuple("abcdefghij")


def random_statistics(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with random norm statistics and scales: an untrained one gives nearly the same logits to all images."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for name, low, high in (("running_mean", -0.2, 0.2), ("running_var", 0.5, 1.5), ("weight", 0.7, 1.3)):
            tensor = getattr(module, name, None)
            if isinstance(tensor, torch.Tensor) and tensor.ndim == 1:
                tensor.data.uniform_(low, high, generator=generator)
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, module.weight.shape[1] ** -0.5, generator=generator)
    return model


def example_recipe(network: str, *, size: int = 32, channels: int = 3, **fields: Any) -> Recipe:
    """A recipe of a network for small images."""
    preprocess = {"size": size, "resize": size + 4, "channels": channels}
    mean, std = ((0.5,), (0.25,)) if channels == 1 else ((0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
    data = {"preprocess": {**preprocess, "mean": mean, "std": std, **fields.pop("preprocess", {})}}
    model = {"name": network, "options": fields.pop("options", {})}
    return Recipe.model_validate({"name": "example", "model": model, "data": data, **fields})


def write_weights(path: Path, recipe: Recipe, class_names: tuple[str, ...] = CLASSES) -> Path:
    """A weights file of the recipe's network with random statistics."""
    model = random_statistics(build_model(recipe.model.name, seed=1, **model_options(recipe, len(class_names))))
    path.write_bytes(encode(model.state_dict(), to_header(WeightsMetadata(recipe, class_names))))
    return path


def write_photographs(folder: Path, count: int = 6) -> Path:
    """JPEG files of different sizes."""
    folder.mkdir()
    for number in range(count):
        image = Image.fromarray(photograph(60 + 23 * number, 90 - 7 * number, seed=number))
        image.save(folder / f"{number}.jpg", quality=90)
    return folder


def odd_images() -> Mapping[str, bytes]:
    """Encoded images that programs often read differently: color modes, bit depths, orientations, sizes."""
    color = Image.fromarray(photograph(75, 61))
    gray, alpha = color.convert("L"), color.convert("RGBA")
    alpha.putalpha(gray)
    wide = np.asarray(gray).astype(np.uint16)
    found = {
        "gray": save(gray),
        "alpha": save(alpha),
        "gray-alpha": save(alpha.convert("LA")),
        "palette": save(color.quantize(17)),
        "palette-transparent": save(color.quantize(17), transparency=3),
        "one-bit": save(gray.convert("1")),
        "cmyk": save(color.convert("CMYK"), "JPEG"),
        "ycck-gray": save(gray, "JPEG"),
        "16-bit": save(Image.fromarray(wide * 257)),
        "16-bit-tiff": save(Image.fromarray(wide * 200), "TIFF"),
        "32-bit-tiff": save(Image.fromarray(wide.astype(np.int32) * 100), "TIFF"),
        "float-tiff": save(Image.fromarray(wide.astype(np.float32) / 255), "TIFF"),
        "float-255-tiff": save(Image.fromarray(wide.astype(np.float32)), "TIFF"),
        "gif": save(color.quantize(9), "GIF"),
        "webp": save(color, "WEBP"),
        "bmp": save(color, "BMP"),
        "ppm": save(color, "PPM"),
        "progressive": save(color, "JPEG", progressive=True),
        "one-pixel": save(color.crop((0, 0, 1, 1))),
        "thin": save(color.crop((0, 0, 75, 1))),
        "tall": save(color.crop((0, 0, 2, 61))),
        "network-size": save(color.crop((0, 0, 32, 32))),
        "resize-size": save(color.crop((0, 0, 36, 36))),
    }
    for orientation in range(2, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        found[f"exif-{orientation}"] = save(color, "JPEG", exif=exif)
    return found


def save(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
