"""Images as a model takes them: paths, encoded bytes, files, PIL images, arrays and tensors, alone or in lists."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps
from torch import Tensor

from reconv.core.errors import DataError, UsageError
from reconv.data.decode.pillow import convert_mode, decode_image, to_image
from reconv.data.file_list import walk_images
from reconv.storage.local import read, read_file_or_pipe
from reconv.storage.remote_tree import local_data_path, shown_path


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image file; `is_named`: the user gave this path, so a pipe is read until its writer closes it."""

    path: Path
    is_named: bool = True


Array = npt.NDArray[Any]
ImageInput = str | Path | ImageFile | bytes | bytearray | memoryview | BinaryIO | Image.Image | Array | Tensor

_SINGLE = (str, Path, ImageFile, bytes, bytearray, memoryview, Image.Image, np.ndarray, Tensor)
_TAKES = "an array [height, width] or [height, width, channels], or a tensor [channels, height, width]"


def split_images(images: ImageInput | Iterable[ImageInput]) -> tuple[list[ImageInput], bool]:
    """The images one by one, and whether it was a single one; a tensor or array of four dimensions is a batch."""
    if isinstance(images, Tensor | np.ndarray) and images.ndim == 4:
        return list(images), False
    is_file = hasattr(images, "read")
    if is_file or isinstance(images, _SINGLE) or not isinstance(images, Iterable):
        return [cast(ImageInput, images)], True  # what is no image is refused when it is read
    return list(images), False


def to_pil(image: ImageInput, channels: int) -> Image.Image:
    """The upright image with 1 (mode L) or 3 (mode RGB) channels."""
    if isinstance(image, str | Path):
        image = ImageFile(Path(image))
    if isinstance(image, ImageFile):
        data = read_file_or_pipe(image.path) if image.is_named else read(image.path)
        return decode_image(data, channels, str(image.path))
    if isinstance(image, bytes | bytearray | memoryview):
        return decode_image(bytes(image), channels)
    if isinstance(image, Image.Image):
        return convert_mode(ImageOps.exif_transpose(image), channels)
    if isinstance(image, Tensor):
        array = image.detach().cpu()
        array = array if array.ndim != 3 else array.permute(1, 2, 0)
        return to_image(
            _to_uint8(array.float().numpy() if array.is_floating_point() else array.numpy(), image), channels
        )
    if isinstance(image, np.ndarray):
        return to_image(_to_uint8(image, image), channels)
    if hasattr(image, "read"):
        return decode_image(image.read(), channels)
    raise _unsupported(image)


def _to_uint8(pixels: Array, original: Array | Tensor) -> npt.NDArray[np.uint8]:
    """Pixels [height, width, 1 or 3] from any real dtype; floats are from 0 to 1, integers from 0 to 255."""
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4) or 0 in pixels.shape:
        raise UsageError(
            f"an image of shape {tuple(original.shape)} is not supported", hint=f"pass {_TAKES}, with 1 or 3 channels"
        )
    pixels = pixels[:, :, :3]  # without alpha, as files are read
    if pixels.dtype == np.bool_:
        return pixels.astype(np.uint8) * 255
    if pixels.dtype.kind not in "uif":
        raise UsageError(f"an image of dtype {original.dtype} is not supported", hint="use uint8 or float32")
    if pixels.dtype == np.uint8:
        return pixels
    is_float, limit = pixels.dtype.kind == "f", 1 if pixels.dtype.kind == "f" else 255
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= 0 and high <= limit):  # also refuses NaN
        raise DataError(
            f"an image of dtype {original.dtype} has values from {low:g} to {high:g}, not from 0 to {limit}",
            why="floats are taken as fractions of white, integers as 8-bit values; do not normalize images yourself",
            hint="scale it, or pass a uint8 array",
        )
    return (pixels * 255).round().astype(np.uint8) if is_float else pixels.astype(np.uint8)


def _unsupported(image: object) -> UsageError:
    return UsageError(
        f"a {type(image).__name__} is not an image",
        hint=f"pass a path, encoded bytes, a PIL image, {_TAKES}, or a list of them",
    )


def image_files(path: Path, log: Callable[[str], None] = lambda text: None) -> list[ImageFile]:
    """The image at a path, or those in a folder and its subfolders, on this machine or in an object store."""
    path = local_data_path(path)
    if os.path.isdir(path):
        # A file with an image's name that cannot be read is reported when it is opened, so it is not filtered here.
        files = walk_images(path)
        if not files:
            raise DataError("there is no image in this folder", where=str(path))
        noun = f"image{'s' * (len(files) > 1)}"
        log(f"{len(files):,} {noun} in {shown_path(path)} and its subfolders; links are not followed")
        return [ImageFile(Path(file), is_named=False) for file in files]
    if not os.path.exists(path):  # Path.exists raises for a name that is too long
        raise DataError("no such image", where=str(path))
    return [ImageFile(path)]
