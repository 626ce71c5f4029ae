"""The analysis of a classifier against counting one by one, and against numbers worked out by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from reconv.core.batch import Batch
from reconv.metrics.analysis import analyze_metrics
from reconv.metrics.confusion import Calibration, ConfusionMatrix, analyze_predictions, class_scores, macro_means
from reconv.metrics.multilabel import MultilabelMetrics
from reconv.metrics.topk import ClassificationMetrics, PredictionTable

#         target 0      target 1   target 2     class 3 has no images and is never predicted
TARGETS = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
PREDICTED = [0, 0, 0, 1, 1, 1, 2, 0, 1, 1]


def matrix(num_classes: int = 4) -> ConfusionMatrix:
    return ConfusionMatrix.from_predictions(np.array(TARGETS), np.array(PREDICTED), num_classes)


def test_the_cells_are_the_counts_of_target_and_prediction() -> None:
    found = matrix()
    cells = dict(
        zip(zip(found.target.tolist(), found.predicted.tolist(), strict=True), found.count.tolist(), strict=True)
    )
    assert cells == {(0, 0): 3, (0, 1): 1, (1, 1): 2, (1, 2): 1, (2, 0): 1, (2, 1): 2}
    assert found.num_images.tolist() == [4, 3, 3, 0]
    assert found.num_predicted.tolist() == [4, 5, 1, 0]
    assert found.num_correct.tolist() == [3, 2, 0, 0]


def test_precision_recall_and_f1_by_class() -> None:
    zero, one, two, none = class_scores(matrix())
    assert (zero.precision, zero.recall, zero.f1) == (3 / 4, 3 / 4, 3 / 4)
    assert (one.precision, one.recall, one.f1) == (2 / 5, 2 / 3, pytest.approx(0.5))
    assert (two.precision, two.recall, two.f1) == (0.0, 0.0, 0.0)
    assert (none.num_images, none.precision, none.recall, none.f1) == (0, None, None, None)
    means = macro_means([zero, one, two, none])
    assert means == {
        "precision": pytest.approx((3 / 4 + 2 / 5) / 3),
        "recall": pytest.approx((3 / 4 + 2 / 3) / 3),
        "f1": pytest.approx((3 / 4 + 1 / 2) / 3),
    }


def test_the_most_confused_pairs_come_first_and_ties_in_class_order() -> None:
    assert matrix().most_confused() == [(2, 1, 2), (0, 1, 1), (1, 2, 1), (2, 0, 1)]
    assert matrix().most_confused(1) == [(2, 1, 2)]


def test_calibration_error_by_hand() -> None:
    confidence = np.array([0.95, 0.85, 0.2, 0.1, 1.0])
    is_correct = np.array([True, False, True, False, True])
    found = Calibration.from_predictions(confidence, is_correct, num_bins=5)
    assert found.count.tolist() == [2, 0, 0, 0, 3]  # 0.2 is the upper edge of the first bin
    assert found.accuracy.tolist() == [1 / 2, 0, 0, 0, 2 / 3]
    # |0.5 - 0.15| * 2/5 + |2/3 - 2.8/3| * 3/5
    assert found.error == pytest.approx(0.35 * 0.4 + (2.8 - 2) / 3 * 0.6)


def test_a_perfectly_calibrated_model_has_no_calibration_error() -> None:
    found = Calibration.from_predictions(np.full(100, 0.75), np.arange(100) < 75)
    assert found.error == pytest.approx(0)


def test_the_analysis_of_ranks_is_that_of_one_process() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, targets = torch.randn(300, 40, generator=generator), torch.randint(40, (300,), generator=generator)
    names = [f"class {n}" for n in range(40)]
    one, *ranks = (ClassificationMetrics(40) for _ in range(4))
    for number, start in enumerate(range(0, 300, 32)):
        indices = torch.arange(start, min(300, start + 32))
        batch = Batch({"targets": targets[indices], "indices": indices}, indices, (len(indices),))
        for metrics in (one, ranks[number % 3]):
            metrics.update(logits[indices], batch)
    ranks[1].merge([rank.state() for rank in ranks])
    analysis = analyze_predictions(one.predictions(), names)
    assert analyze_predictions(ranks[1].predictions(), names) == analysis
    assert sum(analysis["confusion"]["count"]) == 300
    assert analysis["metrics"]["accuracy"] == one.compute()["top1"]


def test_the_analysis_of_a_thousand_classes_is_small() -> None:
    """A dense matrix would have a million cells."""
    rng = np.random.default_rng(0)
    target = np.repeat(np.arange(1000), 50)
    predicted = np.where(rng.random(50_000) < 0.76, target, rng.integers(0, 1000, 50_000))
    rows = np.zeros((50_000, 7))
    rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 4] = np.arange(50_000), target, predicted, rng.random(50_000)
    analysis = analyze_predictions(PredictionTable.from_rows(rows), [f"n{number:08d}" for number in range(1000)])
    assert len(json.dumps(analysis, separators=(",", ":"))) < 500_000


def test_an_evaluation_without_images_has_an_analysis() -> None:
    analysis = analyze_predictions(ClassificationMetrics(3).predictions(), ["a", "b", "c"])
    assert analysis["num_images"] == 0
    assert analysis["most_confused"] == []
    assert analysis["metrics"]["calibration_error"] == 0


def multilabel_example() -> MultilabelMetrics:
    """Three images and classes: the first is always right, the second half, the third never occurs."""
    metrics = MultilabelMetrics(3)
    logits = torch.tensor([[2.0, 1.0, -1.0], [-2.0, 1.0, -1.0], [2.0, -1.0, 1.0]])
    targets = torch.tensor([[1.0, 1, 0], [0, 0, 0], [1, 1, 0]])
    indices = torch.arange(3)
    metrics.update(logits, Batch({"targets": targets, "indices": indices}, indices, (3,)))
    return metrics


def test_several_labels_per_image_have_scores_by_class_but_no_matrix() -> None:
    analysis = analyze_metrics(multilabel_example(), ["a", "b", "c"])
    assert analysis is not None
    assert "confusion" not in analysis
    first, second, third = analysis["classes"]
    assert (first["num_images"], first["precision"], first["recall"], first["ap"]) == (2, 1.0, 1.0, 1.0)
    assert (second["num_predicted"], second["precision"], second["recall"], second["f1"]) == (2, 0.5, 0.5, 0.5)
    assert (third["num_images"], third["num_predicted"], third["precision"], third["ap"]) == (0, 1, 0.0, None)
    assert analysis["metrics"]["macro_f1"] == pytest.approx(multilabel_example().compute()["macro_f1"])
