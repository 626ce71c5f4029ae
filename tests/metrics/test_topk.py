"""Top-1 and top-5 over batches and ranks, against counting one by one."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.core.batch import Batch
from reconv.metrics.topk import ClassificationMetrics, PredictionTable

NUM = 40


def random_logits(num_classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(NUM, num_classes, generator=generator), torch.randint(num_classes, (NUM,), generator=generator)


def rows_of(targets: Tensor, rows: slice) -> Batch:
    indices = torch.arange(len(targets))[rows]
    return Batch({"targets": targets[rows], "indices": indices}, indices, (len(indices),))


def predictions_of(logits: Tensor, targets: Tensor) -> PredictionTable:
    metrics = ClassificationMetrics(logits.shape[1])
    metrics.update(logits, rows_of(targets, slice(None)))
    return metrics.predictions()


def count_correct(logits: Tensor, targets: Tensor, k: int) -> int:
    """Correct: fewer than k classes have a higher logit than the target."""
    rows = zip(logits.tolist(), targets.tolist(), strict=True)
    return sum(sum(other > row[target] for other in row) < k for row, target in rows)


def test_batches_and_ranks_have_the_metrics_of_the_whole_set() -> None:
    logits, targets = random_logits(12)
    one, *ranks = (ClassificationMetrics(12) for _ in range(3))
    for number, rows in enumerate((slice(0, 17), slice(17, 33), slice(33, NUM))):
        for metrics in (one, ranks[number % 2]):
            metrics.update(logits[rows], rows_of(targets, rows))
    top1, top5 = count_correct(logits, targets, 1), count_correct(logits, targets, 5)
    assert 0 < top1 < top5 < NUM
    computed = one.compute()
    assert (computed["top1"], computed["top5"]) == (top1 / NUM, top5 / NUM)
    assert computed["loss"] == pytest.approx(float(F.cross_entropy(logits.double(), targets)))
    ranks[0].merge([rank.state() for rank in ranks])
    assert ranks[0].compute() == computed
    merged, single = ranks[0].predictions(), one.predictions()
    assert merged.index.tolist() == list(range(NUM))
    for field in fields(single):
        assert np.array_equal(getattr(merged, field.name), getattr(single, field.name))


def test_the_worst_predictions_are_wrong_and_have_the_highest_loss() -> None:
    logits, targets = random_logits(12)
    predictions = predictions_of(logits, targets)
    losses = F.cross_entropy(logits, targets, reduction="none")
    wrong = [i for i in losses.argsort(descending=True).tolist() if logits[i].argmax() != targets[i]]
    worst = predictions.worst(16)
    assert predictions.index[worst].tolist() == wrong[:16]
    assert predictions.predicted[worst].tolist() == logits.argmax(dim=1)[wrong[:16]].tolist()


def test_a_correct_prediction_with_high_loss_is_not_among_the_worst() -> None:
    logits, _ = random_logits(12)
    logits *= 0.01  # every loss is about ln 12
    targets = logits.argmax(dim=1)
    targets[::10] = (targets[::10] + 1) % 12
    predictions = predictions_of(logits, targets)
    assert set(predictions.index[predictions.worst(16)].tolist()) == {0, 10, 20, 30}


def test_the_most_uncertain_predictions_have_the_closest_two_classes() -> None:
    logits, targets = random_logits(12)
    predictions = predictions_of(logits, targets)
    top = logits.softmax(dim=1).topk(2, dim=1)
    margins = (top.values[:, 0] - top.values[:, 1]).tolist()
    uncertain = predictions.most_uncertain(5)
    assert predictions.index[uncertain].tolist() == sorted(range(NUM), key=margins.__getitem__)[:5]
    assert predictions.runner_up[uncertain].tolist() == top.indices[uncertain.tolist(), 1].tolist()


def test_the_loss_does_not_depend_on_the_order_of_ranks() -> None:
    """1 + 1e-16 + 1e-16 + ... is 1, and 1e-16 + 1e-16 + ... + 1 is not."""
    no_rows, small = np.zeros((0, 7)), [[float(position), 1e-16] for position in range(1, 11)]
    first = {"counts": np.array([1, 0, 0]), "losses": np.array([[0.0, 1.0]]), "rows": no_rows}
    second = {"counts": np.array([10, 0, 0]), "losses": np.array(small), "rows": no_rows}
    one, other = ClassificationMetrics(3), ClassificationMetrics(3)
    one.merge([first, second])
    other.merge([second, first])
    assert one.compute() == other.compute()


@pytest.mark.parametrize(("num_classes", "has_top5"), [(1, False), (5, False), (6, True)])
def test_there_is_no_top5_of_five_classes_or_fewer(num_classes: int, has_top5: bool) -> None:
    logits, targets = random_logits(num_classes)
    metrics = ClassificationMetrics(num_classes)
    metrics.update(logits, rows_of(targets, slice(None)))
    computed = metrics.compute()
    assert ("top5" in computed) == has_top5
    assert computed["top1"] == count_correct(logits, targets, 1) / NUM
