"""Your own loss in a classification task."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconv.core.batch import Batch
from reconv.core.custom_code import CustomCodeError, provide
from reconv.core.errors import UsageError
from reconv.tasks.classification import ClassificationTask
from reconv.tasks.custom_loss import CustomLoss, Example, build_custom_loss, example_batch


def cross_entropy(logits: Tensor, targets: Tensor, factor: float = 1.0) -> Tensor:
    return factor * F.cross_entropy(logits, targets, reduction="none")


def built(loss: Any, *, example: Example | None = None, **options: Any) -> CustomLoss:
    provide({"python:loss_m": loss})
    return build_custom_loss("python:loss_m", options, torch.device("cpu"), example)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_it_gets_the_targets_that_cross_entropy_has(smoothing: float, is_mixed: bool) -> None:
    logits, targets = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0, 1])
    soft = {"soft_targets": torch.rand(6, 4).softmax(dim=1)} if is_mixed else {}
    batch = Batch({"images": logits, "targets": targets, **soft}, torch.arange(6), (6,))
    own = ClassificationTask(4, smoothing, custom_loss=built(cross_entropy, factor=3.0)).loss(logits, batch)
    plain = ClassificationTask(4, smoothing).loss(logits, batch)
    torch.testing.assert_close(own.loss, 3 * plain.loss)
    assert torch.equal(own.metrics["top1"], plain.metrics["top1"])


class Composed(nn.Module):
    """A loss of two parts that torch reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.CrossEntropyLoss(), nn.MultiMarginLoss()

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.first(logits, targets) + 0.5 * self.second(logits, targets)


def reduced_itself(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets) + 0.01 * logits.square().mean()


REDUCED = {
    "module": (nn.CrossEntropyLoss(), 1.0),
    "class": (nn.CrossEntropyLoss, 1.0),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), 1 / 6),
    "function": (F.cross_entropy, 1.0),
    "partial": (partial(F.cross_entropy, label_smoothing=0.2), 1.0),
    "composed": (Composed(), 1.0),
    "mean in the code": (reduced_itself, 1.0),
    "sum in the code": (lambda logits, targets: F.nll_loss(logits, targets, reduction="sum"), 1 / 6),
}


@pytest.mark.parametrize("name", REDUCED)
def test_a_reduced_loss_is_a_sum_over_samples_however_they_are_split(name: str) -> None:
    given, factor = REDUCED[name]
    loss = built(given, example=example_batch(3, "index"))
    logits, targets = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 2, 1, 0])
    whole = loss(logits, targets)
    reduced = (given() if isinstance(given, type) else given)(logits, targets)
    torch.testing.assert_close(whole / 6, factor * reduced)
    torch.testing.assert_close(loss(logits[:2], targets[:2]) + loss(logits[2:], targets[2:]), whole)
    assert loss.note
    if isinstance(given, nn.Module):
        assert all(getattr(part, "reduction", "mean") != "none" for part in given.modules())  # it is not changed


def test_the_elements_of_a_sample_are_reduced_as_those_of_the_batch_were() -> None:
    logits, targets = torch.randn(5, 3), torch.rand(5, 3).round()
    for reduction, factor in (("mean", 5), ("sum", 1)):
        loss = built(nn.BCEWithLogitsLoss(reduction=reduction), example=example_batch(3, "labels"))
        expected = F.binary_cross_entropy_with_logits(logits, targets, reduction=reduction)
        torch.testing.assert_close(loss(logits, targets), factor * expected)


def test_the_note_says_that_weights_of_classes_no_longer_divide() -> None:
    weighted = built(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0])), example=example_batch(3, "index"))
    plain = built(nn.CrossEntropyLoss(), example=example_batch(3, "index"))
    assert "not by the weights" in weighted.note and "not by the weights" not in plain.note


def test_a_loss_of_pairs_of_samples_is_refused() -> None:
    def spread(logits: Tensor, targets: Tensor) -> Tensor:
        return torch.cdist(logits, logits).mean()

    with pytest.raises(UsageError, match="neither the mean nor the sum"):
        built(spread, example=example_batch(3, "index"))


def test_misspelt_options_are_found_before_the_loss_is_called() -> None:
    with pytest.raises(UsageError, match="facto"):
        built(cross_entropy, facto=2.0)


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (lambda logits, targets: logits, UsageError, r"a tensor \[2, 3\]"),
        (lambda logits: logits, CustomCodeError, "raised TypeError"),
        ("no loss", UsageError, "is not a loss"),
    ],
)
def test_what_is_not_one_loss_per_sample_is_refused(loss: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        built(loss)(torch.zeros(2, 3), torch.tensor([0, 1]))
