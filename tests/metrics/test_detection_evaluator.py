"""What an evaluation of a detector keeps, and what it says of errors, sizes and classes."""

from __future__ import annotations

import math

import pytest
from detection_examples import as_detections, batch_of, scored, stored_cases, true_boxes

from reconv.metrics import coco_eval
from reconv.metrics import detection_metrics as detection_scores
from reconv.metrics.detection_errors import KINDS, SizeBucket, error_kinds, size_buckets
from reconv.metrics.detection_metrics import DetectionMetrics, score
from reconv.metrics.overlaps import Scored, overlaps_of

LEFT, RIGHT, MIDDLE = (0.0, 0.0, 40.0, 40.0), (50.0, 50.0, 90.0, 90.0), (20.0, 0.0, 60.0, 40.0)


def _evaluator(images: list[Scored], num_classes: int = 2) -> DetectionMetrics:
    names = [f"class {label}" for label in range(num_classes)]
    return DetectionMetrics(as_detections, lambda index: images[index].truth, names)


def test_ranks_that_share_their_images_have_the_numbers_of_one() -> None:
    case = next(case for case in stored_cases() if case.name == "crowds")
    whole, *ranks = (_evaluator(case.images, len(case.class_names)) for _ in range(3))
    whole.update(case.images, batch_of(case.images))
    for number, rank in enumerate(ranks):
        rank.update(case.images[number::2], batch_of(case.images[number::2]))
    ranks[1].merge([rank.state() for rank in ranks])
    assert ranks[1].num_samples == whole.num_samples
    assert ranks[1].compute() == whole.compute()


def test_an_image_that_comes_twice_is_refused() -> None:
    images = [scored(true_boxes((LEFT, 0)), (LEFT, 0, 0.9))]
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


def test_detections_leave_the_device_when_many_have_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    case = stored_cases()[0]
    whole, often = (_evaluator(case.images, len(case.class_names)) for _ in range(2))
    whole.update(case.images, batch_of(case.images))
    monkeypatch.setattr(detection_scores, "NUM_ON_DEVICE", 2)
    for image in case.images:
        often.update([image], batch_of([image]))
    assert often.compute() == whole.compute()


def test_without_the_library_vocs_numbers_are_there_and_cocos_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [scored(true_boxes((LEFT, 0)), (LEFT, 0, 0.9))]
    assert score(images, ["a"]).numbers["ap"] == pytest.approx(1)
    monkeypatch.setattr(coco_eval, "PACKAGE", "a_package_that_is_not_there")
    found = score(images, ["a"])
    assert found.numbers == {"voc07": 1.0, "voc10": 1.0}
    assert "ap" not in found.findings()["classes"][0]


def test_no_detections_background_alone_and_no_images_are_finite() -> None:
    truth = true_boxes((LEFT, 0))
    for images in ([scored(truth)], [scored(truth, (RIGHT, 1, 0.9))], [scored(true_boxes(), (RIGHT, 1, 0.9))], []):
        found = score(images, ["a", "b"])
        assert all(math.isfinite(value) and value == 0 for value in found.numbers.values())
        findings = found.findings()
        assert [row["voc10"] is None for row in findings["classes"]] == [sum(map(len_of, images)) == 0, True]
        assert sum(findings["errors"].values()) == sum(map(len_of, images))


def len_of(image: Scored) -> int:
    return len(image.truth)


def test_each_kind_of_error_is_told_from_the_others() -> None:
    truth = true_boxes((LEFT, 0), (RIGHT, 0), (LEFT, 1), (RIGHT, 1), ((0, 60, 20, 80), 1), ((0, 85, 9, 99), 2))
    found = scored(
        truth,
        (LEFT, 0, 0.99),  # right
        (LEFT, 0, 0.98),  # duplicate
        (RIGHT, 0, 0.10),  # not looked at: the class has two objects
        (MIDDLE, 1, 0.97),  # localisation: a third of the left box
        ((60, 0, 99, 39), 1, 0.96),  # background
        (RIGHT, 1, 0.95),  # right
        ((0, 60, 20, 80), 2, 0.94),  # confusion: it is of class 1
    )
    kinds = error_kinds(overlaps_of([found]), 3)
    assert list(kinds) == list(KINDS)
    assert kinds == {
        "right": 2,
        "duplicate": 1,
        "confusion": 1,
        "localisation": 1,
        "background": 1,
        "missed": 2,  # the right box of class 0 and the only one of class 2
    }


def test_objects_are_counted_by_size_and_difficult_ones_are_not() -> None:
    truth = true_boxes(
        ((0, 0, 10, 10), 0), ((20, 20, 60, 60), 0), ((0, 0, 99, 99), 0), ((1, 1, 9, 9), 0), difficult=[3]
    )
    found = scored(truth, ((20, 20, 60, 60), 0, 0.9), ((0, 0, 90, 99), 0, 0.8))
    assert size_buckets(overlaps_of([found])) == [
        SizeBucket("small", 1, 0),
        SizeBucket("medium", 1, 1),
        SizeBucket("large", 1, 1),
    ]


def test_the_findings_show_all_of_few_classes_and_the_extremes_of_many() -> None:
    case = next(case for case in stored_cases() if case.name == "crowds")
    findings = score(case.images, case.class_names).findings()
    assert findings["curves"][0]["name"] == "mean over the classes"
    assert {curve["name"] for curve in findings["curves"][1:]} == set(case.class_names)
    assert all(len(curve["precision"]) == 101 for curve in findings["curves"])
    truth = true_boxes(*((LEFT, label) for label in range(20)))
    many = score([scored(truth, *((LEFT, label, 0.9) for label in range(10)))], [str(n) for n in range(20)])
    assert [curve["name"] for curve in many.findings()["curves"][1:]] == ["0", "1", "2", "17", "18", "19"]
