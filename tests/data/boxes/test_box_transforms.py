"""SSD's random crop against a plain version of one candidate and one box at a time, and boxes in views."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from reconv.core.random import uniforms
from reconv.data.boxes.transforms import (
    VIEW_KEY,
    WHOLE_IMAGE,
    box_iou,
    clip_boxes,
    compose_views,
    relative_to,
    resize_view,
    ssd_crop,
    train_view,
    view_params,
    zoom_out,
)
from reconv.recipe.parts.data import AugmentConfig, SsdCropConfig, ZoomOutConfig

F64 = npt.NDArray[np.float64]
BILINEAR = Image.Resampling.BILINEAR
Box = tuple[float, float, float, float]


@st.composite
def boxes(draw: st.DrawFn, least: int = 0) -> F64:
    """Boxes inside the image, with an area."""
    made = []
    for _ in range(draw(st.integers(least, 5))):
        left, top = draw(st.floats(0, 0.9)), draw(st.floats(0, 0.9))
        width, height = draw(st.floats(0.01, 1)), draw(st.floats(0.01, 1))
        made.append((left, top, min(1, left + width), min(1, top + height)))
    return np.array(made, np.float64).reshape(-1, 4)


def slow_overlap(a: Box, b: Box) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0.0) * max(height, 0.0)
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def has_center(view: Box, box: Box) -> bool:
    x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    return view[0] < x < view[2] and view[1] < y < view[3]


def slow_crop(of: F64, section: SsdCropConfig, row_key: int) -> Box:
    """Reference implementation of the published crop, one box at a time."""
    for attempt in range(1, 10_000):
        uniform = uniforms(row_key, np.array([attempt]), 2 + 4 * section.trials)[0].tolist()
        if uniform[0] < section.no_crop_probability:
            return 0.0, 0.0, 1.0, 1.0
        bound = section.min_ious[int(uniform[1] * len(section.min_ious))]
        chosen = None
        low, high = section.scale
        for number in range(section.trials):
            width, height, x, y = (uniform[2 + part * section.trials + number] for part in range(4))
            width, height = low + width * (high - low), low + height * (high - low)
            left, top = x * (1 - width), y * (1 - height)
            view = (left, top, left + width, top + height)
            if width / height >= section.max_aspect_ratio or height / width >= section.max_aspect_ratio:
                continue
            overlaps = [slow_overlap(view, tuple(box)) for box in of.tolist()]
            enough = all(o > bound for o in overlaps) if section.iou_with == "every" else max(overlaps) > bound
            if enough and any(has_center(view, tuple(box)) for box in of.tolist()):
                chosen = view
        if chosen is not None:
            return chosen
    raise AssertionError("no view")


@settings(max_examples=60, deadline=None)
@given(boxes(least=1), st.integers(0, 2**63), st.sampled_from(["every", "any"]), st.sampled_from([1 / 7, 0.02]))
def test_the_ssd_crop_is_the_last_valid_candidate(of: F64, row_key: int, overlap_with: str, whole: float) -> None:
    section = SsdCropConfig(iou_with=overlap_with, no_crop_probability=whole)  # type: ignore[arg-type]
    assert ssd_crop(of, section, row_key) == pytest.approx(slow_crop(of, section, row_key), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(boxes(), st.integers(0, 2**63), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from(["none", "ssd"]))
def test_a_box_is_kept_iff_its_center_is_in_the_view_and_is_clipped_to_it(
    of: F64, row_key: int, zoom: float, crop: str
) -> None:
    augment = AugmentConfig(crop=crop, zoom_out=ZoomOutConfig(probability=zoom))  # type: ignore[arg-type]
    view = train_view(of, augment, row_key)
    seen, kept = clip_boxes(view, of)
    assert kept.tolist() == [has_center(view, tuple(box)) for box in of.tolist()]
    assert len(seen) == kept.sum()
    assert (seen >= 0).all() and (seen <= 1).all() and (seen[:, 2:] > seen[:, :2]).all()
    if len(of):
        assert kept.any()  # a view without any box is never taken
    back = np.array([compose_views(view, tuple(box)) for box in seen.tolist()]).reshape(-1, 4)
    clipped = np.stack([np.clip(of[kept, i], view[i % 2], view[i % 2 + 2]) for i in range(4)], axis=1)
    assert back == pytest.approx(clipped, abs=1e-9)


def test_box_iou_equals_that_of_single_boxes() -> None:
    first, second = np.array([[0, 0, 0.5, 0.5], [0, 0, 1, 1]]), np.array([[0.25, 0.25, 0.75, 0.75], [0.6, 0.6, 0.7, 1]])
    expected = [[slow_overlap(tuple(a), tuple(b)) for b in second.tolist()] for a in first.tolist()]
    assert box_iou(first, second) == pytest.approx(np.array(expected))
    assert box_iou(first, second)[0, 1] == 0


def test_a_seventh_of_the_images_is_not_cropped_and_those_without_boxes_never() -> None:
    keys = view_params(3, np.arange(2000))[VIEW_KEY].tolist()
    middle = np.array([[0.4, 0.4, 0.6, 0.6]])
    first = SsdCropConfig(min_ious=(0.0,), iou_with="any")
    whole = sum(ssd_crop(middle, first, row_key) == WHOLE_IMAGE for row_key in keys)
    assert 200 < whole < 400  # 2000 / 7 is 286; a candidate that overlaps is nearly always among fifty
    assert all(ssd_crop(np.empty((0, 4)), SsdCropConfig(), row_key) == WHOLE_IMAGE for row_key in keys[:20])


def test_a_view_is_a_function_of_seed_and_position_alone() -> None:
    some = np.array([[0.1, 0.2, 0.5, 0.9], [0.3, 0.3, 0.8, 0.6]])
    augment = AugmentConfig(crop="ssd", zoom_out=ZoomOutConfig(probability=0.5))
    views = [train_view(some, augment, k) for k in view_params(5, np.arange(40))[VIEW_KEY].tolist()]
    again = [train_view(some, augment, k) for k in view_params(5, np.arange(40)[::-1])[VIEW_KEY].tolist()][::-1]
    assert views == again and len(set(views)) > 20
    assert views != [train_view(some, augment, k) for k in view_params(6, np.arange(40))[VIEW_KEY].tolist()]


def test_zoom_out_shows_the_whole_image_on_a_canvas_of_up_to_four_times_its_side() -> None:
    views = [zoom_out(ZoomOutConfig(probability=1), uniforms(7, np.array([n]), 4)[0]) for n in range(300)]
    sides = [right - left for left, _, right, _ in views]
    assert all(v[0] <= 0 and v[1] <= 0 and v[2] >= 1 and v[3] >= 1 for v in views)
    assert 1 <= min(sides) < 1.1 and 3.9 < max(sides) < 4
    assert all(v[2] - v[0] == pytest.approx(v[3] - v[1]) for v in views)
    assert zoom_out(ZoomOutConfig(probability=0), np.zeros(4)) == WHOLE_IMAGE


def test_resized_views_show_the_image_and_the_fill_around_it() -> None:
    image = np.zeros((40, 80, 3), np.uint8)
    image[10:20, 40:60] = 255  # the box (0.5, 0.25, 0.75, 0.5)
    image = Image.fromarray(image)
    half = np.asarray(resize_view(image, (0.5, 0.25, 0.75, 0.5), 16, BILINEAR))
    assert half[1:-1, 1:-1].min() > 200 and half[3:-3, 3:-3].min() == 255 and half.shape == (16, 16, 3)
    view = (-1.0, -1.0, 3.0, 3.0)
    wide = np.asarray(resize_view(image, view, 64, BILINEAR, (7, 8, 9)))
    assert (wide[0, 0] == [7, 8, 9]).all() and (wide[63, 63] == [7, 8, 9]).all()
    assert (wide[18, 18] == 0).all()
    (box,), _ = clip_boxes(view, np.array([[0.5, 0.25, 0.75, 0.5]]))
    left, top, right, bottom = (box * 64).round().astype(int).tolist()
    inside = wide[top + 1 : bottom - 1, left + 1 : right - 1]
    assert inside.size and inside.min() > 200
    assert wide[:, : left - 1].max() <= 9 and wide[:, right + 1 :].max() <= 9
    assert relative_to(view, compose_views(view, (0.1, 0.2, 0.3, 0.4))) == pytest.approx((0.1, 0.2, 0.3, 0.4))


def test_a_gray_image_is_filled_with_one_value() -> None:
    image = Image.fromarray(np.full((10, 10), 200, np.uint8))
    wide = np.asarray(resize_view(image, (0.0, 0.0, 2.0, 2.0), 20, BILINEAR, (5,)))
    assert wide[0, 0] == 200 and wide[19, 19] == 5
