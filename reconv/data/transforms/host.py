"""Views of images where they are decoded.

A view is the part of an image that a row of a batch shows. It has the boxes that the compiled decoder crops, and fills
a row from any other image; `RowReader` chooses between the two. The result is a function of the image's bytes, its
parameters and the recipe. The faster ways (cutting a JPEG file before decoding it, simplejpeg) give Pillow's pixels;
only the compiled decoder does not, so the plan chooses it and a checkpoint records it.
"""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from reconv.data.dataset import F64, U8, NamedArrays
from reconv.data.decode import native
from reconv.data.decode.jpeg_header import JpegHeader, PixelBox, cut_to_box, read_header
from reconv.data.decode.native import I32
from reconv.data.decode.pillow import MAX_PIXELS, RESAMPLING, decode_image, to_array, to_image
from reconv.data.decode.simplejpeg import jpeg_decoder
from reconv.data.stage_timing import record_stage
from reconv.data.transforms.geometry import CROP_AREA, CROP_POSITION, CROP_RATIO, random_resized_crop_box
from reconv.recipe.parts.data import AugmentConfig, Interpolation, PreprocessConfig


def eval_transform(image: Image.Image, preprocess: PreprocessConfig) -> U8:
    """The resized center crop of evaluation and prediction: [channels, size, size]."""
    size, box = preprocess.size, eval_crop_box(image.width, image.height, preprocess)
    if box[2] - box[0] == box[3] - box[1] == size:
        cropped = image.crop(tuple(round(side) for side in box))  # type: ignore[arg-type]
    else:
        # Only the center is computed: resizing a 1 x 5000 image whole would take a gigabyte.
        cropped = image.resize((size, size), RESAMPLING[preprocess.interpolation], box=box)
    return np.ascontiguousarray(to_array(cropped).transpose(2, 0, 1))


def eval_crop_box(width: int, height: int, preprocess: PreprocessConfig) -> tuple[float, float, float, float]:
    """The box (left, top, right, bottom) of an image that evaluation resizes to the network's size."""
    size, shorter_side = preprocess.size, resized_shorter_side(preprocess)
    if shorter_side is None:
        return 0, 0, width, height
    shorter = min(width, height)
    new_width, new_height = (max(shorter_side, shorter_side * side // shorter) for side in (width, height))
    left, top = round((new_width - size) / 2), round((new_height - size) / 2)
    scale_x, scale_y = width / new_width, height / new_height
    return left * scale_x, top * scale_y, (left + size) * scale_x, (top + size) * scale_y


def resized_shorter_side(preprocess: PreprocessConfig) -> int | None:
    """The shorter side of the image before its center crop; None: resized to the square without a crop."""
    if preprocess.resize == "auto-ratio":
        return preprocess.size * 256 // 224
    if preprocess.resize == "auto-plus32":
        return preprocess.size + 32
    return preprocess.resize


def train_preprocess(preprocess: PreprocessConfig, augment: AugmentConfig, size: int) -> PreprocessConfig:
    """The preprocessing of training images of another size; the center crop shows the same share of the image."""
    resize = preprocess.resize
    if isinstance(resize, int):
        resize = max(size, round(resize * size / preprocess.size))
    interpolation = augment.interpolation or preprocess.interpolation
    return preprocess.model_copy(update={"size": size, "resize": resize, "interpolation": interpolation})


ImageData = bytes | U8 | Image.Image  # an encoded file, pixels [height, width, 1 or 3], an upright image
Size = tuple[int, int]  # width and height
CropBox = tuple[float, float, float, float]  # left, top, right, bottom

_MAX_BOXES = 10_000  # kept


class ImageView:
    """The part of an image that fills a row, for one interpolation."""

    antialias = True
    crop_first = False  # True: the filter reads nothing outside of the box

    def __init__(self, interpolation: Interpolation) -> None:
        self.interpolation = interpolation

    def boxes(self, sizes: I32, params: NamedArrays) -> F64:
        """The boxes [n, 4] that fill whole rows, of images [n, 2]; empty for one that is not cropped in a group."""
        return np.zeros((len(sizes), 4))

    def fill_natively(self, data: bytes, params: NamedArrays, out: U8) -> Size | None:
        """Fill a row [3, size, size] by the compiled decoder; the size of the image, None if it is not supported."""
        size = native.image_size(data)
        if size is None or size[0] * size[1] > MAX_PIXELS:
            return None
        box = self.boxes(np.array([size], np.int32), {name: row[None] for name, row in params.items()})[0]
        began_s = time.perf_counter()
        is_filled = native.crop_resize(
            data,
            tuple(box.tolist()),
            out,
            interpolation=self.interpolation,
            antialias=self.antialias,
            crop_first=self.crop_first,
        )
        record_stage("decode", began_s)
        return size if is_filled else None

    def fill(self, data: ImageData, params: NamedArrays, out: U8, name: str) -> Size:
        """Fill a row [channels, size, size]; the size of the image."""
        raise NotImplementedError


class CenterView(ImageView):
    """The resized center crop of evaluation and prediction."""

    def __init__(self, preprocess: PreprocessConfig) -> None:
        super().__init__(preprocess.interpolation)
        self._preprocess = preprocess
        self._boxes: dict[Size, CropBox] = {}

    def boxes(self, sizes: I32, params: NamedArrays) -> F64:
        nothing = (0.0, 0.0, 0.0, 0.0)
        return np.array([self._box(w, h) if 0 < w * h <= MAX_PIXELS else nothing for w, h in sizes.tolist()])

    def _box(self, width: int, height: int) -> CropBox:
        box = self._boxes.get((width, height))
        if box is None:
            left, top, right, bottom = eval_crop_box(width, height, self._preprocess)
            box = max(left, 0.0), max(top, 0.0), min(right, width), min(bottom, height)  # rounding may leave the image
            if len(self._boxes) < _MAX_BOXES:
                self._boxes[width, height] = box
        return box

    def fill(self, data: ImageData, params: NamedArrays, out: U8, name: str) -> Size:
        image = data if isinstance(data, Image.Image) else to_image(data, self._preprocess.channels, name)
        out[:] = eval_transform(image, self._preprocess)
        return image.size


class RandomResizedView(ImageView):
    """The random resized crop of training."""

    crop_first = True

    def __init__(self, preprocess: PreprocessConfig, augment: AugmentConfig) -> None:
        super().__init__(preprocess.interpolation)
        self._channels = preprocess.channels
        self._augment = augment
        self.antialias = augment.antialias
        self._rule = native.CropRule(*augment.scale, *augment.ratio, augment.attempts, augment.fallback == "whole")

    def boxes(self, sizes: I32, params: NamedArrays) -> F64:
        areas, ratios, positions = (params[name] for name in (CROP_AREA, CROP_RATIO, CROP_POSITION))
        return native.crop_boxes(sizes, MAX_PIXELS, areas, ratios, positions, self._rule)

    def fill(self, data: ImageData, params: NamedArrays, out: U8, name: str) -> Size:
        if isinstance(data, np.ndarray):
            height, width = data.shape[:2]
            left, top, right, bottom = self._box((width, height), params)
            crop = data[top:bottom, left:right]
            if crop.shape[2] != self._channels:
                crop = to_array(to_image(np.ascontiguousarray(crop), self._channels))
            resize_into(crop, self.interpolation, self.antialias, out)
            return width, height
        header = read_header(data) if isinstance(data, bytes) and self._channels == 3 else None
        if isinstance(data, bytes) and header is not None and header.width * header.height <= MAX_PIXELS:
            size = header.width, header.height
            crop = _decode_box(data, header, self._box(size, params), name)
        else:
            image = decode_image(data, self._channels, name) if isinstance(data, bytes) else data
            size = image.size
            crop = to_array(image.crop(self._box(size, params)))
        resize_into(crop, self.interpolation, self.antialias, out)
        return size

    def _box(self, size: Size, params: NamedArrays) -> PixelBox:
        return random_resized_crop_box(*size, params, self._augment)


def train_view(preprocess: PreprocessConfig, augment: AugmentConfig) -> ImageView:
    """The view of training images before their transforms."""
    return RandomResizedView(preprocess, augment) if augment.crop == "random_resized" else CenterView(preprocess)


def _decode_box(data: bytes, header: JpegHeader, box: PixelBox, name: str) -> U8:
    """The pixels in a box of a plain JPEG file, without decoding the rows below and, if possible, above it."""
    _, decode = jpeg_decoder()
    began_s = time.perf_counter()
    try:
        pixels = decode(*cut_to_box(data, header, box))
        record_stage("decode", began_s)
        return pixels
    except (ValueError, OSError):  # Pillow decodes the whole file, or says what is wrong with it
        return to_array(decode_image(data, 3, name).crop(box))


def resize_into(pixels: U8, interpolation: Interpolation, antialias: bool, out: U8) -> None:
    """Resize pixels [height, width, channels] into `out` [channels, h, w]; without `antialias` pixels are sampled.

    torch resizes color three times as fast as Pillow, on average 0.04 gray levels away from it.
    """
    height, width = out.shape[1:]
    if pixels.shape[:2] == (height, width):
        out[:] = pixels.transpose(2, 0, 1)
    elif interpolation == "nearest" or (antialias and pixels.shape[2] == 1):
        image = to_image(np.ascontiguousarray(pixels), pixels.shape[2])
        out[:] = to_array(image.resize((width, height), RESAMPLING[interpolation])).transpose(2, 0, 1)
    else:
        # Views are made by numpy: each torch operation releases the GIL, and may wait to get it back. With reshape
        # instead of a new axis: that has no stride, and torch then takes the pixels for planes, which is slower.
        batch = torch.from_numpy(np.array(pixels, order="C").reshape(1, *pixels.shape).transpose(0, 3, 1, 2))
        resized = F.interpolate(batch, (height, width), mode=interpolation, antialias=antialias)
        np.copyto(out, resized.numpy()[0])
