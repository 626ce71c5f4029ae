"""Top-1 and top-5 over batches and ranks, against counting one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.batch import Batch
from reconv.metrics.topk import ClassificationMetrics, ClassificationState

NUM = 40


def random_logits(num_classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(NUM, num_classes, generator=generator), torch.randint(num_classes, (NUM,), generator=generator)


def rows_of(targets: Tensor, rows: slice) -> Batch:
    indices = torch.arange(len(targets))[rows]
    return Batch({"targets": targets[rows], "indices": indices}, indices, (len(indices),))


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
    assert ranks[0].mistakes() == one.mistakes()


def test_mistakes_are_the_wrong_predictions_with_the_highest_loss() -> None:
    logits, targets = random_logits(12)
    metrics = ClassificationMetrics(12)
    metrics.update(logits, rows_of(targets, slice(None)))
    losses = F.cross_entropy(logits, targets, reduction="none")
    wrong = [i for i in losses.argsort(descending=True).tolist() if logits[i].argmax() != targets[i]]
    mistakes = metrics.mistakes()
    assert [mistake.index for mistake in mistakes] == wrong[: len(mistakes)]
    assert len(mistakes) == 16
    assert all(mistake.predicted == int(logits[mistake.index].argmax()) for mistake in mistakes)


def test_a_correct_prediction_with_high_loss_is_not_a_mistake() -> None:
    logits, _ = random_logits(12)
    logits *= 0.01  # every loss is about ln 12
    targets = logits.argmax(dim=1)
    targets[::10] = (targets[::10] + 1) % 12
    metrics = ClassificationMetrics(12)
    metrics.update(logits, rows_of(targets, slice(None)))
    assert {mistake.index for mistake in metrics.mistakes()} == {0, 10, 20, 30}


def test_the_loss_does_not_depend_on_the_order_of_ranks() -> None:
    """1 + 1e-16 + 1e-16 + ... is 1, and 1e-16 + 1e-16 + ... + 1 is not."""
    first = ClassificationState(1, 0, 0, [[0.0, 1.0]], [])
    second = ClassificationState(10, 0, 0, [[float(position), 1e-16] for position in range(1, 11)], [])
    one, other = ClassificationMetrics(3), ClassificationMetrics(3)
    one.merge([first, second])
    other.merge([second, first])
    assert one.compute() == other.compute()


def test_top5_of_three_classes_is_1() -> None:
    logits, targets = random_logits(3)
    metrics = ClassificationMetrics(3)
    metrics.update(logits, rows_of(targets, slice(None)))
    assert metrics.compute()["top5"] == 1
    assert metrics.compute()["top1"] == count_correct(logits, targets, 1) / NUM
