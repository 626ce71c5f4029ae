"""The 12 COCO numbers are those of pycocotools, on stored problems with everything that scorers stumble over."""

from __future__ import annotations

import numpy as np
import pytest
from detection_examples import Case, as_detections, batch_of, scored, stored_cases, true_boxes

from reconv.errors import ExitCode, UsageError
from reconv.metrics import coco_eval
from reconv.metrics.coco_eval import COCO_NUMBERS, coco_scores, require_coco
from reconv.metrics.detection_metrics import DetectionMetrics

CASES = stored_cases()


def _expected(case: Case) -> dict[str, float]:
    """pycocotools' numbers, without those of nothing."""
    return {name: value for name, value in zip(COCO_NUMBERS, case.numbers, strict=True) if value >= 0}


def test_the_stored_problems_have_crowds_empty_images_and_absent_sizes() -> None:
    assert len(CASES) == 9
    assert sum(image.truth.is_crowd.sum() for case in CASES for image in case.images) > 20
    assert sum(len(image.truth) == 0 for case in CASES for image in case.images) > 10
    assert sum(len(image.scores) == 0 for case in CASES for image in case.images) > 10
    assert max(len(image.scores) for case in CASES for image in case.images) > 100
    assert any(min(case.numbers) < 0 for case in CASES)
    assert any(0 < case.numbers[0] < 1 for case in CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_numbers_equal_those_of_pycocotools(case: Case) -> None:
    numbers = coco_scores(case.images, len(case.class_names)).numbers
    assert numbers == pytest.approx(_expected(case), abs=1e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_evaluation_in_batches_gives_the_same_numbers(case: Case) -> None:
    evaluator = DetectionMetrics(as_detections, lambda index: case.images[index].truth, case.class_names)
    for start in range(0, len(case.images), 3):
        batch = case.images[start : start + 3]
        evaluator.update(batch, batch_of(batch))
    result = evaluator.compute()
    assert evaluator.num_samples == len(case.images)
    assert {name: result[name] for name in COCO_NUMBERS if name in result} == pytest.approx(_expected(case), abs=1e-6)


def test_the_precision_of_the_classes_has_the_mean_that_is_told() -> None:
    case = next(case for case in CASES if case.name == "a class that never occurs")
    scores = coco_scores(case.images, len(case.class_names))
    assert scores.class_ap[3:] == (None, None, None) == scores.class_ap50[3:]
    assert np.mean([ap for ap in scores.class_ap if ap is not None]) == pytest.approx(scores.numbers["ap"])
    assert np.mean([ap for ap in scores.class_ap50 if ap is not None]) == pytest.approx(scores.numbers["ap50"])


def test_a_difficult_object_is_neither_demanded_nor_wrong() -> None:
    truth = true_boxes(((0, 0, 40, 40), 0), ((50, 50, 90, 90), 0), difficult=[1])
    found = scored(truth, ((50, 50, 90, 90), 0, 0.9), ((0, 0, 40, 40), 0, 0.8))
    assert coco_scores([found], 1).numbers["ap"] == pytest.approx(1)
    assert coco_scores([scored(truth)], 1).numbers["ap"] == 0


def test_without_the_library_its_numbers_are_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coco_eval, "PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(UsageError, match=r"detection\.metric: ap50") as refusal:
        require_coco("detection.metric: ap50")
    assert refusal.value.code == ExitCode.USAGE
    assert "pip install 'reconv[detection]'" in refusal.value.then
