"""Random crops, flips and erased boxes: what they cover, and that they depend on the position alone."""

from __future__ import annotations

import numpy as np
from data_examples import noise
from hypothesis import given
from hypothesis import strategies as st
from loading_examples import each_row

from reconv.data.dataset import select_rows
from reconv.data.transforms.geometry import (
    CROP_AREA,
    CROP_CORNER,
    CROP_POSITION,
    CROP_RATIO,
    alternating_flips,
    crop_params,
    erase_boxes,
    pad_crop,
    random_flips,
    random_resized_crop_box,
)
from reconv.recipe.parts.data import (
    AugmentConfig,
    RandomErasingConfig,
)


@given(width=st.integers(1, 700), height=st.integers(1, 700), position=st.integers(0, 2**40))
def test_a_random_resized_crop_lies_inside_the_image(width: int, height: int, position: int) -> None:
    augment = AugmentConfig(crop="random_resized")
    [params] = each_row(crop_params(augment, 0, np.array([position], np.int64)))
    left, top, right, bottom = random_resized_crop_box(width, height, params, augment)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


def test_random_resized_crops_have_the_areas_and_ratios_of_the_recipe() -> None:
    augment = AugmentConfig(crop="random_resized", scale=(0.2, 0.8), ratio=(0.5, 2.0))
    params = crop_params(augment, 0, np.arange(4000, dtype=np.int64))
    boxes = np.array([random_resized_crop_box(1000, 1000, row, augment) for row in each_row(params)])
    widths, heights = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    areas, ratios = widths * heights / 1e6, widths / heights
    assert areas.min() > 0.198
    assert areas.max() < 0.802
    # Large boxes of extreme ratio do not fit and are sampled again, so the mean is a little below the middle.
    assert 0.44 < areas.mean() < 0.5
    assert abs(np.log(ratios).mean()) < 0.03
    assert ratios.min() > 0.49
    assert ratios.max() < 2.04
    fixed = random_resized_crop_box(
        640, 480, select_rows(params, 0), AugmentConfig(scale=(1.0, 1.0), ratio=(640 / 480, 640 / 480))
    )
    assert fixed == (0, 0, 640, 480)


def test_more_attempts_find_a_box_where_ten_fail() -> None:
    positions = np.arange(300, dtype=np.int64)
    missed = {}
    for attempts in (10, 100):
        augment = AugmentConfig(scale=(0.05, 1.0), attempts=attempts, fallback="whole")
        boxes = [
            random_resized_crop_box(90, 1000, row, augment) for row in each_row(crop_params(augment, 0, positions))
        ]
        missed[attempts] = sum(box == (0, 0, 90, 1000) for box in boxes)
    assert missed[10] > 100
    assert missed[100] < missed[10] / 10
    # Without a fitting box: the largest centered one, or the whole image.
    never = dict.fromkeys((CROP_AREA, CROP_RATIO), np.full(10, 0.999)) | {CROP_POSITION: np.full(2, 0.999)}
    assert random_resized_crop_box(90, 1000, never, AugmentConfig()) == (0, 440, 90, 560)
    assert random_resized_crop_box(90, 1000, never, AugmentConfig(fallback="whole")) == (0, 0, 90, 1000)


def test_pad_crop_shifts_the_image_and_fills_with_black() -> None:
    images = np.stack([noise(6, 6, 3, seed).transpose(2, 0, 1) for seed in range(3)])
    corners = np.array([[0, 0], [2, 2], [4, 0]])
    top_left, center, bottom = pad_crop(images, corners, 2)
    assert np.array_equal(top_left[:, 2:, 2:], images[0, :, :4, :4])
    assert not top_left[:, :2].any()
    assert np.array_equal(center, images[1])
    assert np.array_equal(bottom[:, :4, 2:], images[2, :, 2:, :4])
    assert not bottom[:, 4:].any()


def test_pad_crops_reach_every_shift_equally_often() -> None:
    augment = AugmentConfig(crop="random", padding=1)
    corners = crop_params(augment, 0, np.arange(9000, dtype=np.int64))[CROP_CORNER]
    image = np.arange(1, 10, dtype=np.uint8).reshape(1, 1, 3, 3)
    crops = pad_crop(np.repeat(image, 9000, axis=0), corners, 1)
    centers, counts = np.unique(crops[:, 0, 1, 1], return_counts=True)
    assert centers.tolist() == list(range(1, 10))
    assert counts.min() > 850


def test_flips_have_their_probability_and_depend_on_the_position_alone() -> None:
    positions = np.arange(10_000, dtype=np.int64)
    flips = random_flips(AugmentConfig(hflip=0.3), 1, positions)
    assert abs(flips.mean() - 0.3) < 0.02
    assert np.array_equal(random_flips(AugmentConfig(hflip=0.3), 1, positions[17:40]), flips[17:40])
    assert not random_flips(AugmentConfig(hflip=0), 1, positions).any()
    assert random_flips(AugmentConfig(hflip=1), 1, positions).all()


def test_reflect_padding_does_not_repeat_the_edge() -> None:
    image = np.arange(16, dtype=np.uint8).reshape(1, 1, 4, 4)
    upper_left = pad_crop(image, np.array([[0, 0]]), 2, "reflect")
    assert upper_left[0, 0].tolist() == [[10, 9, 8, 9], [6, 5, 4, 5], [2, 1, 0, 1], [6, 5, 4, 5]]


def test_alternating_flips_depend_on_image_and_epoch_alone() -> None:
    indices, augment = np.arange(1000, dtype=np.int64), AugmentConfig(hflip=0.3, hflip_mode="alternating")
    even = alternating_flips(augment, 5, indices, np.zeros(1000, np.int64))
    assert abs(even.mean() - 0.3) < 0.05
    assert np.array_equal(alternating_flips(augment, 5, indices[::-1], np.full(1000, 2)), even[::-1])
    assert np.array_equal(alternating_flips(augment, 5, indices, np.full(1000, 7)), ~even)
    assert not np.array_equal(alternating_flips(augment, 6, indices, np.zeros(1000, np.int64)), even)


def test_erased_boxes_have_the_probability_areas_and_ratios_of_the_recipe() -> None:
    erase = RandomErasingConfig(probability=0.4, scale=(0.05, 0.2), ratio=(0.5, 2.0))
    boxes = erase_boxes(erase, 0, np.arange(4000, dtype=np.int64), 1000)
    widths, heights = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    erased = widths * heights > 0
    assert abs(erased.mean() - 0.4) < 0.03
    areas, ratios = (widths * heights)[erased] / 1e6, widths[erased] / heights[erased]
    assert 0.0495 < areas.min() < 0.06 < 0.19 < areas.max() < 0.2005
    assert 0.49 < ratios.min() < 0.55 < 1.8 < ratios.max() < 2.02
    assert boxes.min() >= 0
    assert boxes.max() <= 1000
    assert np.array_equal(erase_boxes(erase, 0, np.array([17], np.int64), 1000)[0], boxes[17])
    assert not erase_boxes(
        RandomErasingConfig(probability=1, scale=(1.0, 1.0), ratio=(1.0, 1.0)), 0, np.arange(5), 10
    ).any()
