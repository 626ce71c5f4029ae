"""The sums of classification: right answers among the first one and five, and the loss of mixed labels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.batch import Batch
from reconv.tasks.classification import ClassificationTask

NUM, CLASSES = 40, 12


def draw(num_classes: int = CLASSES, num: int = NUM) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num, num_classes, generator=generator), torch.randint(num_classes, (num,), generator=generator)


def batch_of(targets: Tensor, **more: Tensor) -> Batch:
    indices = torch.arange(len(targets))
    return Batch({"targets": targets, "indices": indices, **more}, indices, (len(targets),))


def right_among(logits: Tensor, targets: Tensor, k: int) -> int:
    """Counted one by one: an answer is right when fewer than k classes are more likely than the right one."""
    rows = zip(logits.tolist(), targets.tolist(), strict=True)
    return sum(sum(other > row[target] for other in row) < k for row, target in rows)


def test_top1_and_top5_are_counted_over_every_batch() -> None:
    logits, targets = draw()
    evaluator = ClassificationTask(CLASSES).metrics()
    for rows in (slice(0, 17), slice(17, 33), slice(33, NUM)):
        evaluator.update(logits[rows], batch_of(targets[rows]))
    found = evaluator.compute()
    ones, fives = right_among(logits, targets, 1), right_among(logits, targets, 5)
    assert 0 < ones < fives < NUM
    assert (found["top1"], found["top5"]) == (ones / NUM, fives / NUM)
    assert found["loss"] == pytest.approx(float(F.cross_entropy(logits.double(), targets)))


def test_among_three_classes_every_answer_is_one_of_the_first_five() -> None:
    logits, targets = draw(num_classes=3)
    evaluator = ClassificationTask(3).metrics()
    evaluator.update(logits, batch_of(targets))
    assert evaluator.compute()["top5"] == 1
    assert evaluator.compute()["top1"] == right_among(logits, targets, 1) / NUM


def test_right_answers_of_training_are_counted_against_the_own_labels() -> None:
    logits, targets = draw()
    task = ClassificationTask(CLASSES, label_smoothing=0.1)
    soft = F.one_hot((targets + 1) % CLASSES, CLASSES).float()
    for batch in (batch_of(targets), batch_of(targets, soft_targets=soft)):
        sums = task.loss(logits, batch)
        assert task.train_metrics({"top1": float(sums.metrics["top1"])}, NUM) == {
            "top1": right_among(logits, targets, 1) / NUM
        }


def test_the_loss_of_mixed_images_is_the_mixture_of_the_losses_of_both_labels() -> None:
    logits, own = draw()
    other, share = own.roll(1), torch.rand(NUM, generator=torch.Generator().manual_seed(5))
    soft = share[:, None] * F.one_hot(own, CLASSES) + (1 - share[:, None]) * F.one_hot(other, CLASSES)
    found = ClassificationTask(CLASSES).loss(logits, batch_of(own, soft_targets=soft)).loss
    losses = [F.cross_entropy(logits, labels, reduction="none") for labels in (own, other)]
    torch.testing.assert_close(found, (share * losses[0] + (1 - share) * losses[1]).sum())
