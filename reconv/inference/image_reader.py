"""Reading an image as the network sees it: decoded, resized and cropped as in evaluation.

Pillow gives the pixels of evaluation during training. The compiled decoder reads ordinary JPEG files several times as
fast, 0.3 gray levels away from Pillow on average; every other image is read by Pillow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from reconv.core.errors import DataError, UsageError
from reconv.data.dataset import U8
from reconv.data.decode import native
from reconv.data.decode.pillow import MAX_PIXELS, decode_image
from reconv.data.transforms.host import eval_crop_box, eval_transform
from reconv.inference.image_input import ImageFile, ImageInput, to_pil
from reconv.recipe.parts.data import PreprocessConfig
from reconv.storage.local import read, read_file_or_pipe

DecoderName = Literal["auto", "pillow", "native"]
DECODERS: tuple[DecoderName, ...] = ("auto", "pillow", "native")


CropBox = tuple[float, float, float, float]  # left, top, right, bottom

_MAX_BOXES = 10_000  # kept


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


@dataclass(slots=True)
class EncodedImage:
    """The bytes of an image file, or of an image that was passed as such."""

    data: bytes
    image: ImageInput
    path: Path | None


@dataclass(slots=True)
class JpegCrop:
    """An ordinary JPEG file in color and the box of it that the network sees."""

    data: bytes
    box: CropBox
    info: ImageInfo


class ImageReader:
    """Reads images with the preprocessing of evaluation; may be used by several threads."""

    def __init__(self, preprocess: PreprocessConfig, decoder: DecoderName = "auto") -> None:
        self._preprocess = preprocess
        self.decoder = choose_image_decoder(preprocess, decoder)
        self.shape = (preprocess.channels, preprocess.size, preprocess.size)
        self._boxes: dict[tuple[int, int], CropBox] = {}  # by width and height

    def __call__(self, image: ImageInput) -> ImageSample:
        """The image as the network sees it; raises `DataError` where it cannot be read."""
        pixels = np.empty(self.shape, np.uint8)
        info = self.read_into(image, pixels)
        return ImageSample(torch.from_numpy(pixels), info.width, info.height, info.image, info.path)

    def read_into(self, image: ImageInput, out: U8) -> ImageInfo:
        """The same into an array [channels, size, size]."""
        encoded = read_encoded(image)
        if encoded is None:
            return self._transform(to_pil(image, self._preprocess.channels), out, image, None)
        return self.decode_into(encoded, out)

    def read_group(
        self,
        images: Sequence[ImageInput],
        out: U8,
        known: Mapping[int, EncodedImage] | None = None,
        num_threads: int = 1,
    ) -> list[ImageInfo | DataError]:
        """`read_into` of several images [n, channels, size, size]; those that cannot be read are black, with the error.

        The compiled decoder gets all of its files in one call: threads that read image by image wait for the GIL.
        `known` has the bytes of images that were read before, `num_threads` is for the compiled decoder.
        """
        found: list[ImageInfo | DataError | None] = [None] * len(images)
        encoded = dict(known or {})
        if not encoded and self.decoder == "native":
            for row, image in enumerate(images):
                try:
                    if (file := read_encoded(image)) is not None:
                        encoded[row] = file
                except DataError as error:
                    found[row] = error
            if len(encoded) == len(images):  # rows of one array
                self._decode_group(encoded, out, found, num_threads)
        return [
            info if isinstance(info, ImageInfo) else self._read_row(images[row], encoded.get(row), out[row], info)
            for row, info in enumerate(found)
        ]

    def _decode_group(
        self,
        encoded: Mapping[int, EncodedImage],
        out: U8,
        found: list[ImageInfo | DataError | None],
        num_threads: int,
    ) -> None:
        """Decode all files that the compiled decoder supports, and note which these are."""
        files = native.FilesInMemory([file.data for file in encoded.values()])
        sizes, none = files.sizes().tolist(), (0.0, 0.0, 0.0, 0.0)
        boxes = [self.crop_box(w, h) if 0 < w * h <= MAX_PIXELS else none for w, h in sizes]
        is_filled = files.crop_resize(
            np.array(boxes), out, interpolation=self._preprocess.interpolation, num_threads=num_threads
        )
        for row in np.flatnonzero(is_filled).tolist():
            found[row] = ImageInfo(encoded[row].image, encoded[row].path, *sizes[row])

    def _read_row(
        self, image: ImageInput, encoded: EncodedImage | None, out: U8, error: DataError | None
    ) -> ImageInfo | DataError:
        try:
            if error is not None:
                raise error
            return self.read_into(image, out) if encoded is None else self.decode_into(encoded, out)
        except DataError as bad:
            out[:] = 0
            return bad

    def crop_box(self, width: int, height: int) -> CropBox:
        """The box of an image that the network sees."""
        box = self._boxes.get((width, height))
        if box is None:
            left, top, right, bottom = eval_crop_box(width, height, self._preprocess)
            box = max(left, 0.0), max(top, 0.0), min(right, width), min(bottom, height)  # rounding may leave the image
            if len(self._boxes) < _MAX_BOXES:
                self._boxes[width, height] = box
        return box

    def decode_into(self, encoded: EncodedImage, out: U8) -> ImageInfo:
        """Decode a file into an array [channels, size, size]; raises `DataError` if that fails."""
        if self.decoder == "native":
            located = self.locate(encoded)
            if located is not None and self._decode_natively(located, out):
                return located.info
        name = "" if encoded.path is None else str(encoded.path)
        pil = decode_image(encoded.data, self._preprocess.channels, name)
        return self._transform(pil, out, encoded.image, encoded.path)

    def locate(self, encoded: EncodedImage) -> JpegCrop | None:
        """What the network sees of an ordinary JPEG file in color; None for any other file."""
        size = native.image_size(encoded.data)
        if size is None or size[0] * size[1] > MAX_PIXELS:
            return None
        width, height = size
        info = ImageInfo(encoded.image, encoded.path, width, height)
        return JpegCrop(encoded.data, self.crop_box(width, height), info)

    def _transform(self, pil: Image.Image, out: U8, image: ImageInput, path: Path | None) -> ImageInfo:
        out[:] = eval_transform(pil, self._preprocess)
        return ImageInfo(image, path, pil.width, pil.height)

    def _decode_natively(self, located: JpegCrop, out: U8) -> bool:
        """The same by the compiled decoder; False if it does not support the file."""
        interpolation = self._preprocess.interpolation
        return native.crop_resize(located.data, located.box, out, interpolation=interpolation, crop_first=False)


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
            then="compile it: pip install . with a C compiler on the machine, or use --decoder pillow",
        )
    is_wanted = decoder == "native" or native.native_support().is_fast
    return "native" if can_be_native and is_wanted else "pillow"


def read_encoded(image: ImageInput) -> EncodedImage | None:
    """The bytes of an image file; None for pixels."""
    if isinstance(image, bytes):
        return EncodedImage(image, image, None)
    if isinstance(image, str | Path):
        image = ImageFile(Path(image))
    if isinstance(image, ImageFile):
        data = read_file_or_pipe(image.path) if image.is_named else read(image.path)
        return EncodedImage(data, image, image.path)
    if isinstance(image, bytearray | memoryview):
        return EncodedImage(bytes(image), image, None)
    return None
