"""Accumulating detections over batches and ranks, and the analysis of errors, sizes and classes."""

from __future__ import annotations

import math

import pytest
from detection_examples import as_detections, batch_of, image_with, stored_cases, true_boxes

from reconv.metrics import coco_eval
from reconv.metrics import detection as detection_metrics
from reconv.metrics.detection import DetectionMetrics, evaluate_detections
from reconv.metrics.detection_errors import ERROR_KINDS, SizeRecall, count_error_kinds, recall_by_size
from reconv.metrics.detection_matches import ImageDetections, match_detections

LEFT, RIGHT, MIDDLE = (0.0, 0.0, 40.0, 40.0), (50.0, 50.0, 90.0, 90.0), (20.0, 0.0, 60.0, 40.0)


def _evaluator(images: list[ImageDetections], num_classes: int = 2) -> DetectionMetrics:
    names = [f"class {label}" for label in range(num_classes)]
    return DetectionMetrics(as_detections, lambda index: images[index].truth, names)


def test_merged_ranks_have_the_metrics_of_one() -> None:
    case = next(case for case in stored_cases() if case.name == "crowds")
    single, *ranks = (_evaluator(case.images, len(case.class_names)) for _ in range(3))
    single.update(case.images, batch_of(case.images))
    for number, rank in enumerate(ranks):
        rank.update(case.images[number::2], batch_of(case.images[number::2]))
    ranks[1].merge([rank.state() for rank in ranks])
    assert ranks[1].num_samples == single.num_samples
    assert ranks[1].compute() == single.compute()


def test_an_image_evaluated_twice_is_an_error() -> None:
    images = [image_with(true_boxes((LEFT, 0)), (LEFT, 0, 0.9))]
    evaluator = _evaluator(images)
    evaluator.update(images, batch_of(images))
    evaluator.update(images, batch_of(images))
    with pytest.raises(ValueError, match="twice"):
        evaluator.compute()
    again, other = _evaluator(images), _evaluator(images)
    again.update(images, batch_of(images))
    other.update(images, batch_of(images))
    with pytest.raises(ValueError, match="twice"):
        again.merge([again.state(), other.state()])


def test_detections_move_to_the_host_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    case = stored_cases()[0]
    single, often = (_evaluator(case.images, len(case.class_names)) for _ in range(2))
    single.update(case.images, batch_of(case.images))
    monkeypatch.setattr(detection_metrics, "MAX_IMAGES_ON_DEVICE", 2)
    for image in case.images:
        often.update([image], batch_of([image]))
    assert often.compute() == single.compute()


def test_without_hotcoco_only_voc_metrics_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [image_with(true_boxes((LEFT, 0)), (LEFT, 0, 0.9))]
    assert evaluate_detections(images, ["a"]).metrics["ap"] == pytest.approx(1)
    monkeypatch.setattr(coco_eval, "PACKAGE", "a_package_that_is_not_there")
    found = evaluate_detections(images, ["a"])
    assert found.metrics == {"voc07": 1.0, "voc10": 1.0}
    assert "ap" not in found.analysis()["classes"][0]


def test_no_detections_only_background_and_no_images_give_zero() -> None:
    truth = true_boxes((LEFT, 0))
    for images in (
        [image_with(truth)],
        [image_with(truth, (RIGHT, 1, 0.9))],
        [image_with(true_boxes(), (RIGHT, 1, 0.9))],
        [],
    ):
        found = evaluate_detections(images, ["a", "b"])
        assert all(math.isfinite(value) and value == 0 for value in found.metrics.values())
        analysis = found.analysis()
        assert [row["voc10"] is None for row in analysis["classes"]] == [sum(map(len_of, images)) == 0, True]
        assert sum(analysis["errors"].values()) == sum(map(len_of, images))


def len_of(image: ImageDetections) -> int:
    return len(image.truth)


def test_each_detection_is_of_one_error_kind() -> None:
    truth = true_boxes((LEFT, 0), (RIGHT, 0), (LEFT, 1), (RIGHT, 1), ((0, 60, 20, 80), 1), ((0, 85, 9, 99), 2))
    found = image_with(
        truth,
        (LEFT, 0, 0.99),  # correct
        (LEFT, 0, 0.98),  # duplicate
        (RIGHT, 0, 0.10),  # not examined: the class has two objects
        (MIDDLE, 1, 0.97),  # localization: a third of the left box
        ((60, 0, 99, 39), 1, 0.96),  # background
        (RIGHT, 1, 0.95),  # correct
        ((0, 60, 20, 80), 2, 0.94),  # confusion: it is of class 1
    )
    kinds = count_error_kinds(match_detections([found]), 3)
    assert list(kinds) == list(ERROR_KINDS)
    assert kinds == {
        "correct": 2,
        "duplicate": 1,
        "confusion": 1,
        "localization": 1,
        "background": 1,
        "missed": 2,  # the right box of class 0 and the only one of class 2
    }


def test_recall_by_size_excludes_difficult_objects() -> None:
    truth = true_boxes(
        ((0, 0, 10, 10), 0), ((20, 20, 60, 60), 0), ((0, 0, 99, 99), 0), ((1, 1, 9, 9), 0), difficult=[3]
    )
    found = image_with(truth, ((20, 20, 60, 60), 0, 0.9), ((0, 0, 90, 99), 0, 0.8))
    assert recall_by_size(match_detections([found])) == [
        SizeRecall("small", 1, 0),
        SizeRecall("medium", 1, 1),
        SizeRecall("large", 1, 1),
    ]


def test_the_curves_are_of_all_classes_or_of_the_best_and_worst() -> None:
    case = next(case for case in stored_cases() if case.name == "crowds")
    analysis = evaluate_detections(case.images, case.class_names).analysis()
    assert analysis["curves"][0]["name"] == "mean over classes"
    assert {curve["name"] for curve in analysis["curves"][1:]} == set(case.class_names)
    assert all(len(curve["precision"]) == 101 for curve in analysis["curves"])
    truth = true_boxes(*((LEFT, label) for label in range(20)))
    many = evaluate_detections(
        [image_with(truth, *((LEFT, label, 0.9) for label in range(10)))], [str(n) for n in range(20)]
    )
    assert [curve["name"] for curve in many.analysis()["curves"][1:]] == ["0", "1", "2", "17", "18", "19"]
