"""One training sample and its draws become one row of the batch's buffer.

Owns the ways there, the fastest that fits first, and the resizing of training images. Refuses to know where samples
and draws come from. Invariant: a row is a function of its sample's bytes, its draws and the recipe; which way it took
is not seen in it, but for the compiled decoder, which a plan has chosen and a checkpoint records.
"""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.nn.functional as F

from reconv.data.dataset import U8
from reconv.data.decode import native
from reconv.data.decode.decode import FILTERS, MAX_PIXELS, any_picture, decode_picture, eval_picture, picture, pixels_of
from reconv.data.decode.jpeg_decoder import jpeg_decoder
from reconv.data.decode.jpeg_header import JpegHeader, head, part_of
from reconv.data.pipeline.stage_timing import spent
from reconv.data.transforms.random_params import F64, Box, crop_draws, is_recolouring, pad_crop, recolour, resized_box
from reconv.recipe.data_fields import AugmentConfig, Interpolation, PreprocessConfig


def train_row(
    data: bytes | U8, preprocess: PreprocessConfig, augment: AugmentConfig, draws: F64, out: U8, name: str = ""
) -> None:
    """Fill `out` [channels, size, size] from an encoded file or pixels [height, width, 1 or 3], as the draws say."""
    if augment.crop == "random_resized":
        _fill_resized(data, preprocess, augment, draws, out, name)
    else:
        centre = eval_picture(any_picture(data, preprocess.channels, name), preprocess)
        if augment.crop == "random":
            centre = pad_crop(centre[None], crop_draws(augment, draws)[None], augment.padding, augment.padding_mode)[0]
        out[:] = centre
    if is_recolouring(augment):
        square = picture(np.ascontiguousarray(out.transpose(1, 2, 0)), preprocess.channels)
        out[:] = pixels_of(recolour(square, augment, draws)).transpose(2, 0, 1)


def host_train(data: bytes | U8, preprocess: PreprocessConfig, augment: AugmentConfig, draws: F64) -> U8:
    """`train_row` into a row of its own."""
    row = np.empty((preprocess.channels, preprocess.size, preprocess.size), np.uint8)
    train_row(data, preprocess, augment, draws, row)
    return row


def _fill_resized(
    data: bytes | U8, preprocess: PreprocessConfig, augment: AugmentConfig, draws: F64, out: U8, name: str
) -> None:
    """A random part of the image, resized to the row."""
    if not isinstance(data, bytes):
        height, width = data.shape[:2]
        left, top, right, bottom = resized_box(width, height, draws, augment)
        part = data[top:bottom, left:right]
        if part.shape[2] != preprocess.channels:
            part = pixels_of(picture(np.ascontiguousarray(part), preprocess.channels))
        resize_into(part, preprocess.interpolation, augment.antialias, out)
        return
    if (
        augment.decoder == "native"
        and preprocess.channels == 3
        and _fill_natively(data, preprocess, augment, draws, out)
    ):
        return
    found = head(data) if preprocess.channels == 3 else None
    if found is not None and found.width * found.height <= MAX_PIXELS:
        box = resized_box(found.width, found.height, draws, augment)
        part = _jpeg_part(data, found, box, name)
    else:
        image = decode_picture(data, preprocess.channels, name)
        part = pixels_of(image.crop(resized_box(image.width, image.height, draws, augment)))
    resize_into(part, preprocess.interpolation, augment.antialias, out)


def _fill_natively(data: bytes, preprocess: PreprocessConfig, augment: AugmentConfig, draws: F64, out: U8) -> bool:
    """The same by the compiled decoder; False for what it does not take."""
    size = native.picture_size(data)
    if size is None or size[0] * size[1] > MAX_PIXELS:
        return False
    box = resized_box(*size, draws, augment)
    began_s = time.perf_counter()
    form, antialias = preprocess.interpolation, augment.antialias
    is_done = native.crop_resize(data, box, out, interpolation=form, antialias=antialias)
    spent("decode", began_s)
    return is_done


def _jpeg_part(data: bytes, found: JpegHeader, box: Box, name: str) -> U8:
    """The pixels in a box of a plain JPEG file; rows below it, and above it where that can be, are not decoded."""
    _, decode = jpeg_decoder()
    began_s = time.perf_counter()
    try:
        part = decode(*part_of(data, found, box))
        spent("decode", began_s)
        return part
    except (ValueError, OSError):  # what is wrong is for the careful decoder to say, of the file as it is
        return pixels_of(decode_picture(data, 3, name).crop(box))


def resize_into(part: U8, interpolation: Interpolation, antialias: bool, out: U8) -> None:
    """Resize pixels [height, width, channels] into a row; without `antialias` only the nearest pixels count.

    By torch in colour, three times as fast as Pillow and on average 0.04 grey levels away from it.
    """
    height, width = out.shape[1:]
    if part.shape[:2] == (height, width):
        out[:] = part.transpose(2, 0, 1)
    elif interpolation == "nearest" or (antialias and part.shape[2] == 1):
        image = picture(np.ascontiguousarray(part), part.shape[2])
        out[:] = pixels_of(image.resize((width, height), FILTERS[interpolation])).transpose(2, 0, 1)
    else:
        # Views are taken by numpy: each operation of torch's lets go of the GIL, and may wait for it. By
        # reshape: a new axis has no stride, and torch then takes the pixels for planes, which is slower.
        stacked = torch.from_numpy(np.array(part, order="C").reshape(1, *part.shape).transpose(0, 3, 1, 2))
        resized = F.interpolate(stacked, (height, width), mode=interpolation, antialias=antialias)
        np.copyto(out, resized.numpy()[0])
