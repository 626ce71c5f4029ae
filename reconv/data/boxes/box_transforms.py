"""What training does to images with boxes: the crop of SSD, zooming out, and boxes that follow.

Owns the rectangle of the image that is seen, and what it does to boxes and pixels. Refuses to know files, batches and
what happens on the device (flips, colours). Invariant: a view is a function of (key, boxes); a box is kept if and only
if its centre lies inside the view, and then lies inside it itself, with an area.

All is in fractions of the image's width and height, boxes as (left, top, right, bottom).
"""

from __future__ import annotations

from itertools import count

import numpy as np
import numpy.typing as npt
from PIL import Image

from reconv.data.dataset import I64, U8
from reconv.data.decode import native
from reconv.data.decode.decode import MAX_PIXELS
from reconv.data.transforms.random_params import F64
from reconv.random import U64, hash_array, key, uniforms
from reconv.recipe.data_fields import AugmentConfig, SsdCropConfig, ZoomOutConfig

View = tuple[float, float, float, float]  # left, top, right, bottom; may reach beyond the image

WHOLE: View = (0.0, 0.0, 1.0, 1.0)
_NUM_ZOOM_DRAWS = 4
_ZOOM = np.zeros(1, np.int64)  # counters of a row's key; crops count from 1


def draw_views(seed: int, positions: I64) -> U64:
    """One key for each position: all that is random about its view."""
    return hash_array(key(seed, "view"), positions)


def train_view(boxes_xyxy: F64, augment: AugmentConfig, row_key: int) -> View:
    """The rectangle of the image that becomes the network's input."""
    view = zoomed_out(augment.zoom_out, uniforms(row_key, _ZOOM, _NUM_ZOOM_DRAWS)[0])
    if augment.crop != "ssd":
        return view
    boxes, _ = seen_through(view, boxes_xyxy)
    return within(view, ssd_crop(boxes, augment.ssd_crop, row_key))


def zoomed_out(section: ZoomOutConfig, draws: F64) -> View:
    """A canvas up to `most` times as wide and high, the image anywhere on it."""
    if draws[0] >= section.probability:
        return WHOLE
    side = 1 + float(draws[1]) * (section.max_scale - 1)
    left, top = float(draws[2]) * (side - 1), float(draws[3]) * (side - 1)
    return -left, -top, side - left, side - top


def ssd_crop(boxes_xyxy: F64, section: SsdCropConfig, row_key: int) -> View:
    """The published crop: the whole, or the last good candidate; where there is none, everything is drawn again."""
    if not len(boxes_xyxy):
        return WHOLE  # no candidate is good without a box, so the whole comes up in the end
    num_candidates = section.trials
    for attempt in count(1):
        draws = uniforms(row_key, np.array([attempt]), 2 + 4 * num_candidates)[0]
        if draws[0] < section.no_crop_probability:
            return WHOLE
        bound = section.min_ious[int(draws[1] * len(section.min_ious))]
        candidates = _candidates(draws[2:].reshape(4, num_candidates), section)
        good = np.flatnonzero(_is_good(candidates, boxes_xyxy, bound, section))
        if len(good):
            left, top, right, bottom = candidates[good[-1]].tolist()
            return left, top, right, bottom
    raise AssertionError("unreachable: the whole is taken with a chance above 0")


def _candidates(draws: F64, section: SsdCropConfig) -> F64:
    """Rectangles [n, 4]: sides uniform in the range, then anywhere they fit."""
    low, high = section.scale
    widths, heights = low + draws[0] * (high - low), low + draws[1] * (high - low)
    lefts, tops = draws[2] * (1 - widths), draws[3] * (1 - heights)
    return np.stack([lefts, tops, lefts + widths, tops + heights], axis=1)


def _is_good(candidates: F64, boxes_xyxy: F64, bound: float, section: SsdCropConfig) -> npt.NDArray[np.bool_]:
    widths, heights = candidates[:, 2] - candidates[:, 0], candidates[:, 3] - candidates[:, 1]
    is_even = (widths / heights < section.max_aspect_ratio) & (heights / widths < section.max_aspect_ratio)
    overlaps = overlap(candidates, boxes_xyxy)
    is_over = (overlaps.min(1) if section.iou_with == "every" else overlaps.max(1)) > bound
    good: npt.NDArray[np.bool_] = is_even & is_over & _holds_centre(candidates, boxes_xyxy).any(1)
    return good


def overlap(first_xyxy: F64, second_xyxy: F64) -> F64:
    """Intersection over union of each of the first with each of the second."""
    corners_low = np.maximum(first_xyxy[:, None, :2], second_xyxy[None, :, :2])
    corners_high = np.minimum(first_xyxy[:, None, 2:], second_xyxy[None, :, 2:])
    shared = np.clip(corners_high - corners_low, 0, None).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (first_xyxy, second_xyxy)]
    union = areas[0][:, None] + areas[1][None] - shared
    result: F64 = shared / np.maximum(union, np.finfo(np.float64).tiny)
    return result


def _holds_centre(views: F64, boxes_xyxy: F64) -> npt.NDArray[np.bool_]:
    """Whether each view [n, 4] has the centre of each box [k, 4] strictly inside."""
    centres = (boxes_xyxy[None, :, :2] + boxes_xyxy[None, :, 2:]) / 2
    inside = (centres > views[:, None, :2]) & (centres < views[:, None, 2:])
    held: npt.NDArray[np.bool_] = inside[..., 0] & inside[..., 1]
    return held


def seen_through(view: View, boxes_xyxy: F64) -> tuple[F64, npt.NDArray[np.bool_]]:
    """The boxes whose centre is inside, clipped, as fractions of the view; and which those are."""
    frame = np.array([view])
    kept = _holds_centre(frame, boxes_xyxy)[0]
    origin, size = frame[:, :2], frame[:, 2:] - frame[:, :2]
    moved = (boxes_xyxy[kept].reshape(-1, 2, 2) - origin) / size
    return np.clip(moved, 0, 1).reshape(-1, 4), kept


def within(outer: View, inner: View) -> View:
    """A view of a view, as a view of the image."""
    left, top, right, bottom = outer
    width, height = right - left, bottom - top
    return left + inner[0] * width, top + inner[1] * height, left + inner[2] * width, top + inner[3] * height


def square_of(
    image: Image.Image, view: View, size: int, how: Image.Resampling, fill: tuple[int, ...] = (0,)
) -> Image.Image:
    """The view resized to size x size, its aspect ratio lost; what is beyond the image has the colour `fill`."""
    shown, (x0, y0, x1, y1) = placed(view, image.width, image.height, size)
    if (x1 - x0, y1 - y0) == (size, size):
        return image.resize((size, size), how, box=shown)
    canvas = Image.new(image.mode, (size, size), fill[0] if len(fill) == 1 else fill)
    if x1 > x0 and y1 > y0:
        canvas.paste(image.resize((x1 - x0, y1 - y0), how, box=shown), (x0, y0))
    return canvas


def native_square(
    data: bytes, view: View, picture_size: tuple[int, int], out: U8, interpolation: str, fill: tuple[int, ...]
) -> bool:
    """`square_of` an image of (width, height) by the compiled decoder into `out` [3, size, size], within a grey level.

    False: the file is not of that size, or not for this decoder, and the plain way must judge it.
    """
    if native.picture_size(data) != picture_size or picture_size[0] * picture_size[1] > MAX_PIXELS:
        return False
    size = out.shape[-1]
    shown, (x0, y0, x1, y1) = placed(view, *picture_size, size)
    if (x1 - x0, y1 - y0) == (size, size):
        return native.crop_resize(data, shown, out, interpolation=interpolation, is_cut=False)
    part = np.empty((3, y1 - y0, x1 - x0), np.uint8)
    if not part.size or not native.crop_resize(data, shown, part, interpolation=interpolation, is_cut=False):
        return False
    out[:] = np.array(fill, np.uint8)[:, None, None]
    out[:, y0:y1, x0:x1] = part
    return True


def placed(view: View, width: int, height: int, size: int) -> tuple[View, tuple[int, int, int, int]]:
    """The pixels of an image that a view shows, and the part of a square of `size` that they fill."""
    seen = (max(view[0], 0.0), max(view[1], 0.0), min(view[2], 1.0), min(view[3], 1.0))
    scale = np.array([width, height] * 2)
    left, top, right, bottom = np.clip(np.array(seen) * scale, 0, scale).tolist()
    part = WHOLE if seen == view else seen_in(view, seen)
    x0, y0, x1, y1 = np.rint(np.array(part) * size).astype(int).tolist()
    return (left, top, right, bottom), (x0, y0, x1, y1)


def seen_in(outer: View, inner: View) -> View:
    """A rectangle of the image as a rectangle of the view: the reverse of `within`."""
    left, top, right, bottom = outer
    width, height = right - left, bottom - top
    return (inner[0] - left) / width, (inner[1] - top) / height, (inner[2] - left) / width, (inner[3] - top) / height
