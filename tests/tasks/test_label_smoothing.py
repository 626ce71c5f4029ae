"""Label smoothing in both forms, against targets written out class by class."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch

from reconv.batch import Batch
from reconv.errors import RecipeError
from reconv.tasks.classification import ClassificationTask

NUM_CLASSES = 5
SHARE = 0.2
TARGETS = [0, 3, 4]
LOGITS = torch.tensor(
    [[2.0, -1.0, 0.5, 0.0, 1.0], [0.1, 0.2, 0.3, 0.4, -3.0], [1.0, 1.0, 1.0, 1.0, 4.0]], dtype=torch.float64
)
MIXED = [[0.7, 0.0, 0.3, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0, 0.0], [0.25, 0.25, 0.0, 0.0, 0.5]]  # rows sum to 1
FORMS: list[Literal["all-classes", "other-classes"]] = ["all-classes", "other-classes"]


def smoothed_by_hand(form: str, target: int) -> list[float]:
    if form == "other-classes":
        return [1 - SHARE if c == target else SHARE / (NUM_CLASSES - 1) for c in range(NUM_CLASSES)]
    return [(1 - SHARE if c == target else 0.0) + SHARE / NUM_CLASSES for c in range(NUM_CLASSES)]


def cross_entropy_by_hand(rows: list[list[float]]) -> float:
    total = 0.0
    for logits, row in zip(LOGITS.tolist(), rows, strict=True):
        normaliser = math.log(sum(math.exp(logit) for logit in logits))
        total -= sum(share * (logit - normaliser) for share, logit in zip(row, logits, strict=True))
    return total


def batch(soft: list[list[float]] | None = None) -> Batch:
    tensors = {"images": torch.zeros(3, 1), "targets": torch.tensor(TARGETS), "indices": torch.arange(3)}
    if soft is not None:
        tensors["soft_targets"] = torch.tensor(soft, dtype=torch.float32)
    return Batch(tensors, torch.arange(3), (3,))


@pytest.mark.parametrize("form", FORMS)
def test_smoothed_loss_of_plain_labels_equals_the_targets_written_out(
    form: Literal["all-classes", "other-classes"],
) -> None:
    task = ClassificationTask(NUM_CLASSES, SHARE, form)
    expected = cross_entropy_by_hand([smoothed_by_hand(form, t) for t in TARGETS])
    assert task.loss(LOGITS, batch()).loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_smoothed_loss_of_mixed_labels_is_the_mixture_of_smoothed_ones(
    form: Literal["all-classes", "other-classes"],
) -> None:
    task = ClassificationTask(NUM_CLASSES, SHARE, form)
    one_hot = [smoothed_by_hand(form, c) for c in range(NUM_CLASSES)]
    rows = [[sum(w * one_hot[c][k] for c, w in enumerate(mix)) for k in range(NUM_CLASSES)] for mix in MIXED]
    assert all(sum(row) == pytest.approx(1) for row in rows)
    assert task.loss(LOGITS, batch(MIXED)).loss.item() == pytest.approx(cross_entropy_by_hand(rows), rel=1e-6)


def test_the_two_forms_differ() -> None:
    losses = {form: ClassificationTask(NUM_CLASSES, SHARE, form).loss(LOGITS, batch()).loss.item() for form in FORMS}
    assert abs(losses["all-classes"] - losses["other-classes"]) > 0.01


@pytest.mark.parametrize("form", FORMS)
def test_validation_loss_is_not_smoothed(form: Literal["all-classes", "other-classes"]) -> None:
    evaluator = ClassificationTask(NUM_CLASSES, SHARE, form).metrics()
    evaluator.update(LOGITS, batch())
    plain = cross_entropy_by_hand([[float(c == t) for c in range(NUM_CLASSES)] for t in TARGETS])
    assert evaluator.compute()["loss"] == pytest.approx(plain / 3, rel=1e-12)


def test_a_share_that_makes_the_right_class_the_least_likely_is_refused() -> None:
    assert ClassificationTask(2, 0.5, "other-classes").loss(torch.zeros(3, 5), batch()).loss.isfinite()
    with pytest.raises(RecipeError, match=r"label_smoothing 0\.6"):
        ClassificationTask(2, 0.6, "other-classes")
    ClassificationTask(2, 0.6, "all-classes")
