"""VOC average precision, by hand and against a plain loop over detections."""

from __future__ import annotations

import numpy as np
import pytest
from detection_examples import image_with, stored_cases, true_boxes
from hypothesis import given, settings
from hypothesis import strategies as st

from reconv.metrics.detection_matches import ImageDetections, match_detections
from reconv.metrics.voc_eval import f1_curve, precision_recall_by_class, voc_metrics

LEFT, RIGHT = (0.0, 0.0, 40.0, 40.0), (50.0, 50.0, 90.0, 90.0)


def _metrics(*images: ImageDetections, num_classes: int = 1) -> dict[str, float]:
    return voc_metrics(precision_recall_by_class(match_detections(images), num_classes))


def test_finding_one_of_two_objects_is_half_the_area_and_six_of_eleven_recalls() -> None:
    image = image_with(true_boxes((LEFT, 0), (RIGHT, 0)), (LEFT, 0, 0.9))
    assert _metrics(image) == pytest.approx({"voc10": 0.5, "voc07": 6 / 11})


def test_three_objects_of_ten_reach_recall_0_3() -> None:
    """3 / 10 and the 0.3 of the axis differ in binary."""
    boxes = [(10.0 * n, 0.0, 10.0 * n + 9, 9.0) for n in range(10)]
    image = image_with(true_boxes(*((box, 0) for box in boxes)), *((box, 0, 0.9) for box in boxes[:3]))
    assert _metrics(image) == pytest.approx({"voc10": 0.3, "voc07": 4 / 11})


def test_a_second_detection_of_an_object_is_a_false_positive() -> None:
    truth = true_boxes((LEFT, 0), (RIGHT, 0))
    image = image_with(truth, (LEFT, 0, 0.9), (LEFT, 0, 0.8), (RIGHT, 0, 0.7))
    assert _metrics(image)["voc10"] == pytest.approx(0.5 + 0.5 * 2 / 3)


def test_a_difficult_object_is_ignored_whether_found_or_not() -> None:
    truth = true_boxes((LEFT, 0), (RIGHT, 0), difficult=[1])
    assert _metrics(image_with(truth, (RIGHT, 0, 0.9), (RIGHT, 0, 0.85), (LEFT, 0, 0.8))) == {
        "voc07": 1.0,
        "voc10": 1.0,
    }
    assert _metrics(image_with(truth, (LEFT, 0, 0.8))) == {"voc07": 1.0, "voc10": 1.0}


def test_a_detection_in_a_crowd_of_its_class_is_ignored() -> None:
    truth = true_boxes((LEFT, 0), ((45, 45, 100, 100), 0), crowds=[1])
    assert _metrics(image_with(truth, ((50, 50, 60, 60), 0, 0.9), (LEFT, 0, 0.8)))["voc10"] == 1
    truth = true_boxes((LEFT, 0), ((45, 45, 100, 100), 1), crowds=[1])
    assert _metrics(image_with(truth, ((50, 50, 60, 60), 0, 0.9), (LEFT, 0, 0.8)), num_classes=2)["voc10"] == 0.5


def test_a_class_without_objects_is_excluded_from_the_mean() -> None:
    image = image_with(true_boxes((LEFT, 0)), (LEFT, 0, 0.9), (RIGHT, 1, 0.8))
    assert _metrics(image, num_classes=3) == {"voc07": 1.0, "voc10": 1.0}


def test_no_detections_and_no_objects_give_zero() -> None:
    assert _metrics(image_with(true_boxes((LEFT, 0)))) == {"voc07": 0.0, "voc10": 0.0}
    assert _metrics(image_with(true_boxes(), (LEFT, 0, 0.9))) == {"voc07": 0.0, "voc10": 0.0}
    assert _metrics() == {"voc07": 0.0, "voc10": 0.0}
    assert _metrics(image_with(true_boxes((RIGHT, 0)), (LEFT, 0, 0.9))) == {"voc07": 0.0, "voc10": 0.0}


def test_the_area_is_close_to_cocos_ap50() -> None:
    """Without crowds and ties they differ in how the area is summed (101 recalls) and in which detection gets a box."""
    cases = [case for case in stored_cases() if case.name in ("gaps in ids", "a class that never occurs")]
    assert len(cases) == 2
    for case in cases:
        assert _metrics(*case.images, num_classes=len(case.class_names))["voc10"] == pytest.approx(
            case.metrics[1], abs=0.03
        )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_curves_equal_a_plain_loop(seed: int) -> None:
    images, num_classes = _random_images(seed), 3
    found = precision_recall_by_class(match_detections(images), num_classes)
    for label in range(num_classes):
        recall, precision = _plain_curve(images, label)
        np.testing.assert_allclose(found[label].recall, recall)
        np.testing.assert_allclose(found[label].precision, precision)


def _random_images(seed: int) -> list[ImageDetections]:
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
        images.append(image_with(true_boxes(*boxes, difficult=difficult), *found, index=index))
    return images


def _plain_curve(images: list[ImageDetections], label: int) -> tuple[list[float], list[float]]:
    """Detections one by one, best first, each matched with the ground-truth box it overlaps most."""
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


def test_the_f1_curve_is_that_of_the_detections_with_at_least_a_score() -> None:
    truth = true_boxes((LEFT, 0), (RIGHT, 0))
    image = image_with(truth, (LEFT, 0, 0.9), ((0, 60, 20, 90), 0, 0.5), (RIGHT, 0, 0.3))
    curves = precision_recall_by_class(match_detections([image]), 2)
    found = f1_curve(curves, np.array([0.0, 0.3, 0.4, 0.6, 0.95]))
    assert found.precision.tolist() == pytest.approx([2 / 3, 2 / 3, 1 / 2, 1, 0])
    assert found.recall.tolist() == pytest.approx([1, 1, 1 / 2, 1 / 2, 0])
    assert found.f1.tolist() == pytest.approx([4 / 5, 4 / 5, 1 / 2, 2 / 3, 0])  # class 1 has no objects
    assert found.best == 0


def test_the_f1_curve_without_objects_is_zero() -> None:
    image = image_with(true_boxes(), (LEFT, 0, 0.9))
    assert not f1_curve(precision_recall_by_class(match_detections([image]), 1)).f1.any()
