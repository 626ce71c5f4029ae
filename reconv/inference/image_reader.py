"""Reading an image as the network sees it: decoded, resized and cropped as in evaluation.

Pillow gives the pixels of evaluation during training. The compiled decoder reads ordinary JPEG files several times as
fast, 0.3 gray levels away from Pillow on average; every other image is read by Pillow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from reconv.core.errors import DataError, UsageError
from reconv.data.dataset import U8
from reconv.data.decode import native
from reconv.data.pipeline.row_reader import RowReader, Source
from reconv.data.transforms.host import CenterView
from reconv.inference.image_input import ImageFile, ImageInput, to_pil
from reconv.recipe.parts.data import PreprocessConfig
from reconv.storage.local import read, read_file_or_pipe

DecoderName = Literal["auto", "pillow", "native"]
DECODERS: tuple[DecoderName, ...] = ("auto", "pillow", "native")


@dataclass(slots=True)
class ImageInfo:
    """An image that was read: as it was passed, its path and its size."""

    image: ImageInput | None
    path: Path | None  # None: it was not a file
    width: int  # of the upright image, in pixels
    height: int


@dataclass(frozen=True, slots=True)
class ImageSample:
    """A decoded image, resized and cropped for the network, and its original size."""

    pixels: Tensor  # [channels, size, size] uint8, on the host
    width: int  # of the upright image, in pixels
    height: int
    image: ImageInput | None = None  # as it was passed
    path: Path | None = None  # None: it was not a file


@dataclass(frozen=True, slots=True)
class _Images:
    """Images of rows, as they were passed."""

    images: Sequence[ImageInput]
    channels: int

    def paths(self) -> None:
        return None  # a named file may be a pipe, which is read once

    def read(self, row: int) -> Source:
        image = self.images[row]
        if isinstance(image, ImageFile):
            data = read_file_or_pipe(image.path) if image.is_named else read(image.path)
            return Source(data, str(image.path))
        if isinstance(image, bytes | bytearray | memoryview):
            return Source(bytes(image), "")
        return Source(to_pil(image, self.channels), "")


class ImageReader:
    """Reads images with the preprocessing of evaluation; may be used by several threads."""

    def __init__(self, preprocess: PreprocessConfig, decoder: DecoderName = "auto") -> None:
        self.decoder = choose_image_decoder(preprocess, decoder)
        self.shape = (preprocess.channels, preprocess.size, preprocess.size)
        self._rows = RowReader(CenterView(preprocess), is_native=self.decoder == "native")

    def __call__(self, image: ImageInput) -> ImageSample:
        """The image as the network sees it; raises `DataError` if it cannot be read."""
        pixels = np.empty(self.shape, np.uint8)
        [info] = self.read_group([image], pixels[None])
        if isinstance(info, DataError):
            raise info
        return ImageSample(torch.from_numpy(pixels), info.width, info.height, info.image, info.path)

    def read_group(self, images: Sequence[ImageInput], out: U8, num_threads: int = 1) -> list[ImageInfo | DataError]:
        """Read images into rows [n, channels, size, size]; those that cannot be read are black, with the error.

        `num_threads`: threads of the compiled decoder that all calls share.
        """
        images = [ImageFile(Path(image)) if isinstance(image, str | Path) else image for image in images]
        infos: list[ImageInfo | DataError] = []
        for row, outcome in enumerate(self._rows.fill(_Images(images, self.shape[0]), {}, out, num_threads)):
            if isinstance(outcome, DataError):
                out[row] = 0
                infos.append(outcome)
            else:
                image = images[row]
                infos.append(ImageInfo(image, image.path if isinstance(image, ImageFile) else None, *outcome))
        return infos


def choose_image_decoder(preprocess: PreprocessConfig, decoder: DecoderName) -> Literal["pillow", "native"]:
    """The decoder of images on the host; `auto` is the compiled one where it is faster and has the interpolation."""
    can_be_native = preprocess.channels == 3 and preprocess.interpolation in native.FILTERS
    if decoder == "pillow":
        return "pillow"
    if decoder == "native" and native.problem():
        raise UsageError(
            "the compiled JPEG decoder is not available",
            where="--decoder",
            why=native.problem(),
            hint="compile it: pip install . with a C compiler on the machine, or use --decoder pillow",
        )
    is_wanted = decoder == "native" or native.native_support().is_fast
    return "native" if can_be_native and is_wanted else "pillow"
