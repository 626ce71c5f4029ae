"""Random crops and zoom-out for detection, in which boxes follow the image.

A view is the rectangle of the image that becomes the network's input, in fractions of its width and height (left, top,
right, bottom), like the boxes. It is a function of (key, boxes). A box is kept if and only if its center is inside the
view, and is then clipped to it.
"""

from __future__ import annotations

from itertools import count

import numpy as np
import numpy.typing as npt
from PIL import Image

from reconv.core.random import hash_array, key, uniforms
from reconv.data.dataset import F64, I64, U8, NamedArrays
from reconv.data.decode import native
from reconv.data.decode.pillow import MAX_PIXELS
from reconv.recipe.parts.data import AugmentConfig, SsdCropConfig, ZoomOutConfig

View = tuple[float, float, float, float]  # left, top, right, bottom; may reach beyond the image

WHOLE_IMAGE: View = (0.0, 0.0, 1.0, 1.0)
VIEW_KEY = "view_key"  # parameter, uint64 [n]: the random key of each view
_ZOOM_COUNTER = np.zeros(1, np.int64)  # under a row's key; attempts of the crop count from 1


def view_params(seed: int, positions: I64) -> NamedArrays:
    """The augmentation parameters of views; how many numbers a crop needs depends on the boxes, so it is a key."""
    return {VIEW_KEY: hash_array(key(seed, "view"), positions)}


def train_view(boxes_xyxy: F64, augment: AugmentConfig, row_key: int) -> View:
    """The rectangle of the image that becomes the network's input."""
    view = zoom_out(augment.zoom_out, uniforms(row_key, _ZOOM_COUNTER, 4)[0])
    if augment.crop != "ssd":
        return view
    boxes, _ = clip_boxes(view, boxes_xyxy)
    return compose_views(view, ssd_crop(boxes, augment.ssd_crop, row_key))


def zoom_out(config: ZoomOutConfig, uniform: F64) -> View:
    """A canvas up to `max_scale` times as wide and high, with the image anywhere on it; from four uniforms."""
    coin, scale, x, y = uniform.tolist()
    if coin >= config.probability:
        return WHOLE_IMAGE
    side = 1 + scale * (config.max_scale - 1)
    left, top = x * (side - 1), y * (side - 1)
    return -left, -top, side - left, side - top


def ssd_crop(boxes_xyxy: F64, config: SsdCropConfig, row_key: int) -> View:
    """SSD's crop as published: the whole image or the last valid candidate; if there is none, all is sampled again."""
    if not len(boxes_xyxy):
        return WHOLE_IMAGE  # no candidate is valid without a box, so it would be the result in the end
    for attempt in count(1):
        uniform = uniforms(row_key, np.array([attempt]), 2 + 4 * config.trials)[0]
        if uniform[0] < config.no_crop_probability:
            return WHOLE_IMAGE
        min_iou = config.min_ious[int(uniform[1] * len(config.min_ious))]
        candidates = _candidates(uniform[2:].reshape(4, config.trials), config)
        valid = np.flatnonzero(_is_valid(candidates, boxes_xyxy, min_iou, config))
        if len(valid):
            left, top, right, bottom = candidates[valid[-1]].tolist()
            return left, top, right, bottom
    raise AssertionError("unreachable: the whole image has a probability above 0")


def _candidates(uniform: F64, config: SsdCropConfig) -> F64:
    """Rectangles [n, 4] from uniforms [4, n]: sides in the range, then anywhere they fit."""
    low, high = config.scale
    widths, heights = low + uniform[0] * (high - low), low + uniform[1] * (high - low)
    lefts, tops = uniform[2] * (1 - widths), uniform[3] * (1 - heights)
    return np.stack([lefts, tops, lefts + widths, tops + heights], axis=1)


def _is_valid(candidates: F64, boxes_xyxy: F64, min_iou: float, config: SsdCropConfig) -> npt.NDArray[np.bool_]:
    widths, heights = candidates[:, 2] - candidates[:, 0], candidates[:, 3] - candidates[:, 1]
    ratio_in_range = (widths / heights < config.max_aspect_ratio) & (heights / widths < config.max_aspect_ratio)
    ious = box_iou(candidates, boxes_xyxy)
    overlaps_enough = (ious.min(1) if config.iou_with == "every" else ious.max(1)) > min_iou
    valid: npt.NDArray[np.bool_] = ratio_in_range & overlaps_enough & _contains_center(candidates, boxes_xyxy).any(1)
    return valid


def box_iou(first_xyxy: F64, second_xyxy: F64) -> F64:
    """Intersection over union [n, k] of boxes [n, 4] with boxes [k, 4]."""
    corners_low = np.maximum(first_xyxy[:, None, :2], second_xyxy[None, :, :2])
    corners_high = np.minimum(first_xyxy[:, None, 2:], second_xyxy[None, :, 2:])
    intersection = np.clip(corners_high - corners_low, 0, None).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (first_xyxy, second_xyxy)]
    union = areas[0][:, None] + areas[1][None] - intersection
    result: F64 = intersection / np.maximum(union, np.finfo(np.float64).tiny)
    return result


def _contains_center(views: F64, boxes_xyxy: F64) -> npt.NDArray[np.bool_]:
    """Mask [n, k] of the boxes [k, 4] whose center is strictly inside each view [n, 4]."""
    centers = (boxes_xyxy[None, :, :2] + boxes_xyxy[None, :, 2:]) / 2
    inside = (centers > views[:, None, :2]) & (centers < views[:, None, 2:])
    contains: npt.NDArray[np.bool_] = inside[..., 0] & inside[..., 1]
    return contains


def clip_boxes(view: View, boxes_xyxy: F64) -> tuple[F64, npt.NDArray[np.bool_]]:
    """The boxes with their center in the view, clipped to it, as fractions of it; and which of the boxes these are."""
    frame = np.array([view])
    is_kept = _contains_center(frame, boxes_xyxy)[0]
    origin, size = frame[:, :2], frame[:, 2:] - frame[:, :2]
    relative = (boxes_xyxy[is_kept].reshape(-1, 2, 2) - origin) / size
    return np.clip(relative, 0, 1).reshape(-1, 4), is_kept


def compose_views(outer: View, inner: View) -> View:
    """A view of a view, as a view of the image."""
    left, top, right, bottom = outer
    width, height = right - left, bottom - top
    return left + inner[0] * width, top + inner[1] * height, left + inner[2] * width, top + inner[3] * height


def resize_view(
    image: Image.Image, view: View, size: int, resampling: Image.Resampling, fill: tuple[int, ...] = (0,)
) -> Image.Image:
    """The view resized to size x size without keeping its aspect ratio; outside the image is the color `fill`."""
    source, (x0, y0, x1, y1) = visible_part(view, image.width, image.height, size)
    if (x1 - x0, y1 - y0) == (size, size):
        return image.resize((size, size), resampling, box=source)
    canvas = Image.new(image.mode, (size, size), fill[0] if len(fill) == 1 else fill)
    if x1 > x0 and y1 > y0:
        canvas.paste(image.resize((x1 - x0, y1 - y0), resampling, box=source), (x0, y0))
    return canvas


def resize_view_natively(
    data: bytes, view: View, image_size: tuple[int, int], out: U8, interpolation: str, fill: tuple[int, ...]
) -> bool:
    """`resize_view` of a file by the compiled decoder into `out` [3, size, size], within a gray level.

    False: the image is not of `image_size` (width, height), or the decoder does not support the file.
    """
    if native.image_size(data) != image_size or image_size[0] * image_size[1] > MAX_PIXELS:
        return False
    size = out.shape[-1]
    source, (x0, y0, x1, y1) = visible_part(view, *image_size, size)
    if (x1 - x0, y1 - y0) == (size, size):
        return native.crop_resize(data, source, out, interpolation=interpolation, crop_first=False)
    part = np.empty((3, y1 - y0, x1 - x0), np.uint8)
    if not part.size or not native.crop_resize(data, source, part, interpolation=interpolation, crop_first=False):
        return False
    out[:] = np.array(fill, np.uint8)[:, None, None]
    out[:, y0:y1, x0:x1] = part
    return True


def visible_part(view: View, width: int, height: int, size: int) -> tuple[View, tuple[int, int, int, int]]:
    """The rectangle of an image, in pixels, that is in a view, and the part of a square of `size` that it fills."""
    visible = (max(view[0], 0.0), max(view[1], 0.0), min(view[2], 1.0), min(view[3], 1.0))
    scale = np.array([width, height] * 2)
    left, top, right, bottom = np.clip(np.array(visible) * scale, 0, scale).tolist()
    part = WHOLE_IMAGE if visible == view else relative_to(view, visible)
    x0, y0, x1, y1 = np.rint(np.array(part) * size).astype(int).tolist()
    return (left, top, right, bottom), (x0, y0, x1, y1)


def relative_to(outer: View, inner: View) -> View:
    """A view of the image as a view of another view: the inverse of `compose_views`."""
    left, top, right, bottom = outer
    width, height = right - left, bottom - top
    return (inner[0] - left) / width, (inner[1] - top) / height, (inner[2] - left) / width, (inner[3] - top) / height
