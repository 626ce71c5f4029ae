"""Classification losses against explicit targets: smoothing, mixed labels, auxiliary heads."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.core.batch import Batch
from reconv.core.errors import RecipeError, UsageError
from reconv.models import build_model
from reconv.tasks.binary_cross_entropy import BinaryCrossEntropy
from reconv.tasks.class_weights import balanced_class_weights, balanced_pos_weights
from reconv.tasks.classification import ClassificationTask

SmoothOver = Literal["all-classes", "other-classes"]
BOTH: list[SmoothOver] = ["all-classes", "other-classes"]

NUM_CLASSES = 5
SMOOTHING = 0.2
TARGETS = [0, 3, 4]
LOGITS = torch.tensor(
    [[2.0, -1.0, 0.5, 0.0, 1.0], [0.1, 0.2, 0.3, 0.4, -3.0], [1.0, 1.0, 1.0, 1.0, 4.0]], dtype=torch.float64
)
MIXED = [[0.7, 0.0, 0.3, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0, 0.0], [0.25, 0.25, 0.0, 0.0, 0.5]]  # rows sum to 1


def make_batch(targets: Tensor, **more: Tensor) -> Batch:
    indices = torch.arange(len(targets))
    return Batch({"targets": targets, "indices": indices, **more}, indices, (len(targets),))


def example_batch(soft_targets: list[list[float]] | None = None) -> Batch:
    more = {} if soft_targets is None else {"soft_targets": torch.tensor(soft_targets, dtype=torch.float32)}
    return make_batch(torch.tensor(TARGETS), **more)


def smoothed(smooth_over: str, target: int) -> list[float]:
    if smooth_over == "other-classes":
        return [1 - SMOOTHING if c == target else SMOOTHING / (NUM_CLASSES - 1) for c in range(NUM_CLASSES)]
    return [(1 - SMOOTHING if c == target else 0.0) + SMOOTHING / NUM_CLASSES for c in range(NUM_CLASSES)]


def cross_entropy(targets: list[list[float]]) -> float:
    total = 0.0
    for logits, row in zip(LOGITS.tolist(), targets, strict=True):
        log_sum = math.log(sum(math.exp(logit) for logit in logits))
        total -= sum(target * (logit - log_sum) for target, logit in zip(row, logits, strict=True))
    return total


@pytest.mark.parametrize("smooth_over", BOTH)
def test_label_smoothing_of_plain_and_mixed_labels(smooth_over: SmoothOver) -> None:
    task = ClassificationTask(NUM_CLASSES, SMOOTHING, smooth_over)
    expected = cross_entropy([smoothed(smooth_over, target) for target in TARGETS])
    assert task.loss(LOGITS, example_batch()).loss.item() == pytest.approx(expected, rel=1e-12)
    one_hot = [smoothed(smooth_over, c) for c in range(NUM_CLASSES)]
    rows = [[sum(w * one_hot[c][k] for c, w in enumerate(mix)) for k in range(NUM_CLASSES)] for mix in MIXED]
    assert all(sum(row) == pytest.approx(1) for row in rows)
    assert task.loss(LOGITS, example_batch(MIXED)).loss.item() == pytest.approx(cross_entropy(rows), rel=1e-6)


@pytest.mark.parametrize("smooth_over", BOTH)
def test_the_validation_loss_is_not_smoothed(smooth_over: SmoothOver) -> None:
    metrics = ClassificationTask(NUM_CLASSES, SMOOTHING, smooth_over).metrics()
    metrics.update(LOGITS, example_batch())
    plain = cross_entropy([[float(c == target) for c in range(NUM_CLASSES)] for target in TARGETS])
    assert metrics.compute()["loss"] == pytest.approx(plain / 3, rel=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, SMOOTHING])
@pytest.mark.parametrize("soft_targets", [None, MIXED])
def test_class_weights_give_the_mean_of_torch(smoothing: float, soft_targets: list[list[float]] | None) -> None:
    weights = torch.tensor([0.5, 2.0, 1.5, 0.1, 3.0])
    task = ClassificationTask(NUM_CLASSES, smoothing, class_weights=weights, mixes_targets=soft_targets is not None)
    batch = example_batch(soft_targets)
    targets = batch["targets"] if soft_targets is None else batch["soft_targets"].double()
    expected = F.cross_entropy(LOGITS, targets, weights.double(), label_smoothing=smoothing)
    sums = task.loss(LOGITS, batch)
    torch.testing.assert_close(sums.loss / task.weight(batch), expected)
    correct = (LOGITS.argmax(1) == batch["targets"]).double().mean().item()
    logged = {name: float(value) for name, value in sums.metrics.items()}
    assert task.train_metrics(logged, float(task.weight(batch))) == {"top1": correct}


def timm_bce(targets: list[list[float]], threshold: float | None, sum_classes: bool, pos: list[float]) -> float:
    """The sum over samples, by the formula."""
    total = 0.0
    for logits, row in zip(LOGITS.tolist(), targets, strict=True):
        for logit, target, weight in zip(logits, row, pos, strict=True):
            target = target if threshold is None else float(target > threshold)
            log_p, log_not_p = -math.log1p(math.exp(-logit)), -math.log1p(math.exp(logit))
            total -= weight * target * log_p + (1 - target) * log_not_p
    return total if sum_classes else total / NUM_CLASSES


@pytest.mark.parametrize("threshold", [None, 0.2])
@pytest.mark.parametrize("sum_classes", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_bce_of_plain_and_mixed_labels(threshold: float | None, sum_classes: bool, mixed: bool) -> None:
    pos = [0.5, 2.0, 1.5, 0.1, 3.0]
    task = ClassificationTask(
        NUM_CLASSES, SMOOTHING, bce=BinaryCrossEntropy(threshold, sum_classes, torch.tensor(pos)), mixes_targets=mixed
    )
    one_hot = [smoothed("all-classes", target) for target in range(NUM_CLASSES)]
    rows = [one_hot[target] for target in TARGETS]
    if mixed:
        rows = [[sum(w * one_hot[c][k] for c, w in enumerate(mix)) for k in range(NUM_CLASSES)] for mix in MIXED]
    batch = example_batch(MIXED if mixed else None)
    expected = timm_bce(rows, threshold, sum_classes, pos)
    assert task.loss(LOGITS, batch).loss.item() == pytest.approx(expected, rel=1e-6)
    assert task.weight(batch) == 3


def test_balanced_pos_weights_are_negatives_by_positives() -> None:
    assert balanced_pos_weights((8, 2, 0), 10) == (2 / 8, 8 / 2, 1.0)
    assert balanced_pos_weights((1, 4, 1), 4) == (3.0, 1.0, 3.0)


def test_the_weight_of_a_batch_is_the_sum_of_its_parts_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(1000, generator=generator) * 10 ** torch.linspace(-3, 3, 1000)
    task, targets = ClassificationTask(1000, class_weights=weights), torch.randint(1000, (999,), generator=generator)
    whole = task.weight(make_batch(targets))
    for size in (1, 7, 333):
        assert sum(task.weight(make_batch(part)) for part in targets.split(size)) == whole


def test_balanced_class_weights_are_those_of_scikit_learn() -> None:
    weights = balanced_class_weights((6, 3, 0, 1))
    assert weights == pytest.approx((10 / (3 * 6), 10 / (3 * 3), 1.0, 10 / (3 * 1)))


def test_label_smoothing_that_inverts_the_targets_is_an_error() -> None:
    assert ClassificationTask(2, 0.5, "other-classes").loss(torch.zeros(3, 5), example_batch()).loss.isfinite()
    with pytest.raises(RecipeError, match=r"label_smoothing 0\.6"):
        ClassificationTask(2, 0.6, "other-classes")
    ClassificationTask(2, 0.6, "all-classes")


def test_training_top1_is_counted_against_the_hard_labels() -> None:
    generator = torch.Generator().manual_seed(3)
    logits, targets = torch.randn(40, 12, generator=generator), torch.randint(12, (40,), generator=generator)
    correct = sum(row.index(max(row)) == target for row, target in zip(logits.tolist(), targets.tolist(), strict=True))
    task = ClassificationTask(12, label_smoothing=0.1)
    soft = F.one_hot((targets + 1) % 12, 12).float()
    for batch in (make_batch(targets), make_batch(targets, soft_targets=soft)):
        top1 = float(task.loss(logits, batch).metrics["top1"])
        assert task.train_metrics({"top1": top1}, 40) == {"top1": correct / 40}


def image_batch(num: int) -> Batch:
    generator = torch.Generator().manual_seed(num)
    targets = torch.randint(10, (num,), generator=generator)
    return make_batch(targets, images=torch.randn(num, 3, 32, 32, generator=generator))


def test_googlenet_adds_0_3_of_the_loss_of_each_auxiliary_head_in_training_only() -> None:
    model = build_model("googlenet", num_classes=10, dropout=0.0, aux_dropout=0.0)
    model.train()
    batch, task = image_batch(4), ClassificationTask(10, label_smoothing=0.1)
    outputs = model(batch["images"])
    losses = [
        F.cross_entropy(x, batch["targets"], reduction="sum", label_smoothing=0.1)
        for x in (outputs.logits, *outputs.auxiliary)
    ]
    assert len(losses) == 3
    sums = task.loss(outputs, batch)
    torch.testing.assert_close(sums.loss, losses[0] + 0.3 * (losses[1] + losses[2]))
    assert int(sums.metrics["top1"]) == int((outputs.logits.argmax(1) == batch["targets"]).sum())
    metrics = task.metrics()
    with torch.no_grad():
        metrics.update(model.eval()(batch["images"]), batch)
    assert metrics.num_samples == 4


class GoogLeNetOutputs(NamedTuple):
    """torchvision's names and order."""

    logits: Tensor
    aux_logits2: Tensor | None
    aux_logits1: Tensor | None


class InceptionOutputs(NamedTuple):
    """torchvision's names."""

    logits: Tensor
    aux_logits: Tensor | None


class Boxes(NamedTuple):
    logits: Tensor
    boxes: Tensor


@pytest.mark.parametrize(("outputs_type", "num_heads"), [(GoogLeNetOutputs, 2), (InceptionOutputs, 1)])
def test_auxiliary_heads_of_torchvision_models_count_0_3_each(
    outputs_type: type[GoogLeNetOutputs] | type[InceptionOutputs], num_heads: int
) -> None:
    batch, task = image_batch(4), ClassificationTask(10)
    logits = torch.randn(3, 4, 10, generator=torch.Generator().manual_seed(1))
    losses = [F.cross_entropy(x, batch["targets"], reduction="sum") for x in logits]
    sums = task.loss(outputs_type(*logits[: num_heads + 1]), batch)
    torch.testing.assert_close(sums.loss, losses[0] + 0.3 * sum(losses[1 : num_heads + 1]))
    torch.testing.assert_close(task.loss(outputs_type(logits[0], *[None] * num_heads), batch).loss, losses[0])


@pytest.mark.parametrize("outputs_type", [tuple, list, lambda pair: Boxes(*pair), lambda pair: {"out": pair[0]}])
def test_outputs_of_another_type_are_an_error(outputs_type: type) -> None:
    with pytest.raises(UsageError, match="logits"):
        ClassificationTask(10).loss(outputs_type([torch.zeros(4, 10), torch.zeros(4, 10)]), image_batch(4))
