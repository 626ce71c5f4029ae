"""Auxiliary heads: their losses are added in training, and gone at evaluation."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from reconv.batch import Batch
from reconv.errors import UsageError
from reconv.models import build_model
from reconv.tasks.classification import ClassificationTask


def batch_of(num: int) -> Batch:
    draw = torch.Generator().manual_seed(num)
    targets = torch.randint(10, (num,), generator=draw)
    images = torch.randn(num, 3, 32, 32, generator=draw)
    return Batch({"images": images, "targets": targets, "indices": torch.arange(num)}, torch.arange(num), (num,))


def test_googlenets_loss_is_that_of_its_answer_and_three_tenths_of_each_heads() -> None:
    model = build_model("googlenet", num_classes=10, dropout=0.0, aux_dropout=0.0)
    model.train()
    batch, task = batch_of(4), ClassificationTask(10, label_smoothing=0.1)
    outputs = model(batch["images"])
    alone = [torch.nn.functional.cross_entropy(x, batch["targets"], reduction="sum", label_smoothing=0.1)
             for x in (outputs.logits, *outputs.auxiliary)]  # fmt: skip
    assert len(alone) == 3
    sums = task.loss(outputs, batch)
    torch.testing.assert_close(sums.loss, alone[0] + 0.3 * (alone[1] + alone[2]))
    assert int(sums.metrics["top1"]) == int((outputs.logits.argmax(1) == batch["targets"]).sum())


def test_at_evaluation_the_heads_are_gone() -> None:
    model = build_model("googlenet", num_classes=10)
    model.eval()
    evaluator, batch = ClassificationTask(10).metrics(), batch_of(4)
    with torch.no_grad():
        evaluator.update(model(batch["images"]), batch)
    assert evaluator.num_samples == 4


class GoogLeNetOutputs(NamedTuple):
    """As torchvision names and orders its own."""

    logits: Tensor
    aux_logits2: Tensor | None
    aux_logits1: Tensor | None


class InceptionOutputs(NamedTuple):
    """As torchvision names its own."""

    logits: Tensor
    aux_logits: Tensor | None


class Boxes(NamedTuple):
    logits: Tensor
    boxes: Tensor


@pytest.mark.parametrize(("kind", "num_heads"), [(GoogLeNetOutputs, 2), (InceptionOutputs, 1)])
def test_the_heads_of_other_packages_networks_count_three_tenths_each_where_they_are(
    kind: type[GoogLeNetOutputs] | type[InceptionOutputs], num_heads: int
) -> None:
    batch, task = batch_of(4), ClassificationTask(10)
    answers = torch.randn(3, 4, 10, generator=torch.Generator().manual_seed(1))
    alone = [torch.nn.functional.cross_entropy(x, batch["targets"], reduction="sum") for x in answers]
    sums = task.loss(kind(*answers[: num_heads + 1]), batch)
    torch.testing.assert_close(sums.loss, alone[0] + 0.3 * sum(alone[1 : num_heads + 1]))
    torch.testing.assert_close(task.loss(kind(answers[0], *[None] * num_heads), batch).loss, alone[0])


@pytest.mark.parametrize("form", [tuple, list, lambda pair: Boxes(*pair), lambda pair: {"out": pair[0]}])
def test_outputs_of_another_type_are_refused(form: type) -> None:
    batch = batch_of(4)
    with pytest.raises(UsageError, match="logits"):
        ClassificationTask(10).loss(form([torch.zeros(4, 10), torch.zeros(4, 10)]), batch)
