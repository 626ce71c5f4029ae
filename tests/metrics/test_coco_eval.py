"""The 12 COCO metrics equal those of pycocotools on stored cases with crowds, empty images and absent sizes."""

from __future__ import annotations

import numpy as np
import pytest
from detection_examples import Case, as_detections, batch_of, image_with, stored_cases, true_boxes

from reconv.core.errors import ExitCode, UsageError
from reconv.metrics import coco_eval
from reconv.metrics.coco_eval import COCO_METRICS, evaluate_coco, require_coco_eval
from reconv.metrics.detection import DetectionMetrics

CASES = stored_cases()


def _expected(case: Case) -> dict[str, float]:
    """pycocotools' metrics, without the undefined ones."""
    return {name: value for name, value in zip(COCO_METRICS, case.metrics, strict=True) if value >= 0}


def test_the_stored_cases_have_crowds_empty_images_and_absent_sizes() -> None:
    assert len(CASES) == 9
    assert sum(image.truth.is_crowd.sum() for case in CASES for image in case.images) > 20
    assert sum(len(image.truth) == 0 for case in CASES for image in case.images) > 10
    assert sum(len(image.scores) == 0 for case in CASES for image in case.images) > 10
    assert max(len(image.scores) for case in CASES for image in case.images) > 100
    assert any(min(case.metrics) < 0 for case in CASES)
    assert any(0 < case.metrics[0] < 1 for case in CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_metrics_equal_those_of_pycocotools_in_batches_too(case: Case) -> None:
    metrics = evaluate_coco(case.images, len(case.class_names)).metrics
    assert metrics == pytest.approx(_expected(case), abs=1e-6)
    evaluator = DetectionMetrics(as_detections, lambda index: case.images[index].truth, case.class_names)
    for start in range(0, len(case.images), 3):
        batch = case.images[start : start + 3]
        evaluator.update(batch, batch_of(batch))
    result = evaluator.compute()
    assert evaluator.num_samples == len(case.images)
    assert {name: result[name] for name in COCO_METRICS if name in result} == pytest.approx(_expected(case), abs=1e-6)


def test_the_mean_over_classes_is_the_reported_ap() -> None:
    case = next(case for case in CASES if case.name == "a class that never occurs")
    scores = evaluate_coco(case.images, len(case.class_names))
    assert scores.class_ap[3:] == (None, None, None) == scores.class_ap50[3:]
    assert np.mean([ap for ap in scores.class_ap if ap is not None]) == pytest.approx(scores.metrics["ap"])
    assert np.mean([ap for ap in scores.class_ap50 if ap is not None]) == pytest.approx(scores.metrics["ap50"])


def test_a_difficult_object_is_ignored() -> None:
    truth = true_boxes(((0, 0, 40, 40), 0), ((50, 50, 90, 90), 0), difficult=[1])
    found = image_with(truth, ((50, 50, 90, 90), 0, 0.9), ((0, 0, 40, 40), 0, 0.8))
    assert evaluate_coco([found], 1).metrics["ap"] == pytest.approx(1)
    assert evaluate_coco([image_with(truth)], 1).metrics["ap"] == 0


def test_a_coco_metric_without_hotcoco_is_rejected_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coco_eval, "PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(UsageError, match=r"detection\.metric: ap50") as exc_info:
        require_coco_eval("detection.metric: ap50")
    assert exc_info.value.code == ExitCode.USAGE
    assert "pip install 'reconv[detection]'" in exc_info.value.hint
