"""VOC's mean precision, by hand and against a plain loop over detections."""

from __future__ import annotations

import numpy as np
import pytest
from detection_examples import scored, stored_cases, true_boxes
from hypothesis import given, settings
from hypothesis import strategies as st

from reconv.metrics.overlaps import Scored, overlaps_of
from reconv.metrics.voc_eval import class_precisions, voc_numbers

LEFT, RIGHT = (0.0, 0.0, 40.0, 40.0), (50.0, 50.0, 90.0, 90.0)


def _numbers(*images: Scored, num_classes: int = 1) -> dict[str, float]:
    return voc_numbers(class_precisions(overlaps_of(images), num_classes))


def test_finding_one_of_two_objects_is_half_the_area_and_six_of_eleven_recalls() -> None:
    image = scored(true_boxes((LEFT, 0), (RIGHT, 0)), (LEFT, 0, 0.9))
    assert _numbers(image) == pytest.approx({"voc10": 0.5, "voc07": 6 / 11})


def test_three_objects_of_ten_reach_the_recall_of_three_tenths() -> None:
    """Which is 0.3 as a quotient and a little more as a place on an axis."""
    boxes = [(10.0 * n, 0.0, 10.0 * n + 9, 9.0) for n in range(10)]
    image = scored(true_boxes(*((box, 0) for box in boxes)), *((box, 0, 0.9) for box in boxes[:3]))
    assert _numbers(image) == pytest.approx({"voc10": 0.3, "voc07": 4 / 11})


def test_a_second_detection_of_an_object_is_wrong() -> None:
    truth = true_boxes((LEFT, 0), (RIGHT, 0))
    image = scored(truth, (LEFT, 0, 0.9), (LEFT, 0, 0.8), (RIGHT, 0, 0.7))
    assert _numbers(image)["voc10"] == pytest.approx(0.5 + 0.5 * 2 / 3)


def test_a_difficult_object_counts_for_nothing_found_or_not() -> None:
    truth = true_boxes((LEFT, 0), (RIGHT, 0), difficult=[1])
    assert _numbers(scored(truth, (RIGHT, 0, 0.9), (RIGHT, 0, 0.85), (LEFT, 0, 0.8))) == {"voc07": 1.0, "voc10": 1.0}
    assert _numbers(scored(truth, (LEFT, 0, 0.8))) == {"voc07": 1.0, "voc10": 1.0}


def test_what_lies_in_a_crowd_of_its_class_counts_for_nothing() -> None:
    truth = true_boxes((LEFT, 0), ((45, 45, 100, 100), 0), crowds=[1])
    assert _numbers(scored(truth, ((50, 50, 60, 60), 0, 0.9), (LEFT, 0, 0.8)))["voc10"] == 1
    truth = true_boxes((LEFT, 0), ((45, 45, 100, 100), 1), crowds=[1])
    assert _numbers(scored(truth, ((50, 50, 60, 60), 0, 0.9), (LEFT, 0, 0.8)), num_classes=2)["voc10"] == 0.5


def test_a_class_that_never_occurs_is_left_out_of_the_mean() -> None:
    image = scored(true_boxes((LEFT, 0)), (LEFT, 0, 0.9), (RIGHT, 1, 0.8))
    assert _numbers(image, num_classes=3) == {"voc07": 1.0, "voc10": 1.0}


def test_nothing_found_and_nothing_there_are_zero_and_finite() -> None:
    assert _numbers(scored(true_boxes((LEFT, 0)))) == {"voc07": 0.0, "voc10": 0.0}
    assert _numbers(scored(true_boxes(), (LEFT, 0, 0.9))) == {"voc07": 0.0, "voc10": 0.0}
    assert _numbers() == {"voc07": 0.0, "voc10": 0.0}
    assert _numbers(scored(true_boxes((RIGHT, 0)), (LEFT, 0, 0.9))) == {"voc07": 0.0, "voc10": 0.0}


def test_the_area_is_that_of_coco_where_both_count_alike() -> None:
    """Without crowds and ties the two differ in how the area is summed (101 recalls) and in who may claim a box."""
    cases = [case for case in stored_cases() if case.name in ("gaps in ids", "a class that never occurs")]
    assert len(cases) == 2
    for case in cases:
        assert _numbers(*case.images, num_classes=len(case.class_names))["voc10"] == pytest.approx(
            case.numbers[1], abs=0.03
        )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_table_equals_a_plain_loop(seed: int) -> None:
    images, num_classes = _random_images(seed), 3
    found = class_precisions(overlaps_of(images), num_classes)
    for label in range(num_classes):
        recall, precision = _plain_curve(images, label)
        np.testing.assert_allclose(found[label].recall, recall)
        np.testing.assert_allclose(found[label].precision, precision)


def _random_images(seed: int) -> list[Scored]:
    draw = np.random.default_rng(seed)
    images = []
    for index in range(int(draw.integers(0, 4))):
        corners = draw.integers(0, 6, (int(draw.integers(0, 6)), 2)) * 10.0
        boxes = [((x, y, x + 30, y + 30), int(draw.integers(3))) for x, y in corners]
        difficult = [n for n in range(len(boxes)) if draw.random() < 0.3]
        scores = np.sort(np.round(draw.random(int(draw.integers(0, 8))), 1))[::-1]
        found = []
        for score in scores:
            x, y = draw.integers(0, 12, 2) * 5.0
            found.append(((x, y, x + 30, y + 30), int(draw.integers(3)), float(score)))
        images.append(scored(true_boxes(*boxes, difficult=difficult), *found, index=index))
    return images


def _plain_curve(images: list[Scored], label: int) -> tuple[list[float], list[float]]:
    """Detections one after the other, best first, each asked for the true box that it overlaps most."""
    ranked = [
        (-score, place, row)
        for place, image in enumerate(images)
        for row, (score, own) in enumerate(zip(image.scores, image.labels, strict=True))
        if own == label
    ]
    num_objects = sum(int(((i.truth.labels == label) & ~i.truth.difficult).sum()) for i in images)
    claimed: set[tuple[int, int]] = set()
    num_right, num_counted = 0, 0
    recall, precision = [], []
    for _, place, row in sorted(ranked):
        truth = images[place].truth
        mine = [n for n in range(len(truth)) if truth.labels[n] == label]
        ious = [_iou(images[place].boxes_xyxy[row], truth.boxes_xyxy[n]) for n in mine]
        best = mine[int(np.argmax(ious))] if mine else None
        hit = best is not None and max(ious) >= 0.5
        if hit and truth.difficult[best]:
            continue
        num_counted += 1
        if hit and (place, best) not in claimed:
            claimed.add((place, best))
            num_right += 1
        recall.append(num_right / max(1, num_objects))
        precision.append(num_right / num_counted)
    return recall, precision


def _iou(first: np.ndarray, second: np.ndarray) -> float:
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    shared = max(width, 0.0) * max(height, 0.0)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)]
    return float(shared / (areas[0] + areas[1] - shared))
