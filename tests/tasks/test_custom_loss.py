"""Your own loss in a classification task."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconv.batch import Batch
from reconv.custom_code import CustomCodeError, provide
from reconv.errors import UsageError
from reconv.tasks.classification import ClassificationTask
from reconv.tasks.custom_loss import CustomLoss, build_custom_loss


def cross_entropy(logits: Tensor, targets: Tensor, factor: float = 1.0) -> Tensor:
    return factor * F.cross_entropy(logits, targets, reduction="none")


def built(loss: Any, **options: Any) -> CustomLoss:
    provide({"python:loss_m": loss})
    return build_custom_loss("python:loss_m", options, torch.device("cpu"))


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


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (F.cross_entropy, UsageError, r"a tensor \[\] for 2 samples"),
        (lambda logits, targets: logits, UsageError, r"a tensor \[2, 3\]"),
        (lambda logits: logits, CustomCodeError, "raised TypeError"),
        (Weighted, UsageError, "has parameters"),
        ("no loss", UsageError, "is not a loss"),
    ],
)
def test_what_is_not_one_loss_per_sample_is_refused(loss: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        built(loss)(torch.zeros(2, 3), torch.tensor([0, 1]))
