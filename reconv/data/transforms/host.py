"""Transforms where images are decoded: a file or pixels and its augmentation parameters to a uint8 image of the
network's size.

The result is a function of the sample's bytes, its parameters and the recipe. The faster ways (cutting a JPEG file
before decoding it, simplejpeg) give Pillow's pixels; only the compiled decoder does not, so the plan chooses it and a
checkpoint records it.
"""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from reconv.data.dataset import U8, NamedArrays
from reconv.data.decode import native
from reconv.data.decode.jpeg_header import JpegHeader, PixelBox, cut_to_box, read_header
from reconv.data.decode.pillow import MAX_PIXELS, RESAMPLING, decode_image, to_array, to_image
from reconv.data.decode.simplejpeg import jpeg_decoder
from reconv.data.stage_timing import record_stage
from reconv.data.transforms.auto_augment import auto_augment
from reconv.data.transforms.color import color_jitter
from reconv.data.transforms.geometry import CROP_CORNER, pad_crop, random_resized_crop_box
from reconv.data.transforms.params import changes_colors_on_host
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


def train_transform(
    data: bytes | U8,
    preprocess: PreprocessConfig,
    augment: AugmentConfig,
    params: NamedArrays,
    out: U8,
    name: str = "",
) -> None:
    """Fill `out` [channels, size, size] from an encoded file or pixels [height, width, 1 or 3].

    `params` is one row of `params.host_params`.
    """
    if augment.crop == "random_resized":
        _random_resized_crop(data, preprocess, augment, params, out, name)
    else:
        image = eval_transform(to_image(data, preprocess.channels, name), preprocess)
        if augment.crop == "random":
            image = pad_crop(image[None], params[CROP_CORNER][None], augment.padding, augment.padding_mode)[0]
        out[:] = image
    if changes_colors_on_host(augment):
        cropped = to_image(np.ascontiguousarray(out.transpose(1, 2, 0)), preprocess.channels)
        out[:] = to_array(_change_colors(cropped, preprocess, augment, params)).transpose(2, 0, 1)


def _change_colors(
    image: Image.Image, preprocess: PreprocessConfig, augment: AugmentConfig, params: NamedArrays
) -> Image.Image:
    """Color jitter, then the policy; after 3-Augment, as in DeiT III."""
    if augment.auto_augment == "3-augment":
        return color_jitter(auto_augment(image, augment, params), params)
    return auto_augment(color_jitter(image, params), augment, params, preprocess.interpolation)


def _random_resized_crop(
    data: bytes | U8, preprocess: PreprocessConfig, augment: AugmentConfig, params: NamedArrays, out: U8, name: str
) -> None:
    if not isinstance(data, bytes):
        height, width = data.shape[:2]
        left, top, right, bottom = random_resized_crop_box(width, height, params, augment)
        crop = data[top:bottom, left:right]
        if crop.shape[2] != preprocess.channels:
            crop = to_array(to_image(np.ascontiguousarray(crop), preprocess.channels))
        resize_into(crop, preprocess.interpolation, augment.antialias, out)
        return
    is_color = preprocess.channels == 3
    if augment.decoder == "native" and is_color and _crop_natively(data, preprocess, augment, params, out):
        return
    header = read_header(data) if is_color else None
    if header is not None and header.width * header.height <= MAX_PIXELS:
        box = random_resized_crop_box(header.width, header.height, params, augment)
        crop = _decode_box(data, header, box, name)
    else:
        image = decode_image(data, preprocess.channels, name)
        crop = to_array(image.crop(random_resized_crop_box(image.width, image.height, params, augment)))
    resize_into(crop, preprocess.interpolation, augment.antialias, out)


def _crop_natively(
    data: bytes, preprocess: PreprocessConfig, augment: AugmentConfig, params: NamedArrays, out: U8
) -> bool:
    """The same by the compiled decoder; False if it does not support the file."""
    size = native.image_size(data)
    if size is None or size[0] * size[1] > MAX_PIXELS:
        return False
    box = random_resized_crop_box(*size, params, augment)
    began_s = time.perf_counter()
    is_done = native.crop_resize(data, box, out, interpolation=preprocess.interpolation, antialias=augment.antialias)
    record_stage("decode", began_s)
    return is_done


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
