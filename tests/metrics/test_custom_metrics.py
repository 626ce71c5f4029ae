"""Your own metrics: exact over batches and ranks, and checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from reconv.core.batch import Batch
from reconv.core.custom_code import CustomCodeError, provide
from reconv.core.errors import UsageError
from reconv.metrics.custom import MetricsWithCustom, check_metrics
from reconv.metrics.topk import ClassificationMetrics
from reconv.recipe.parts.code import CodeConfig

NUM, CLASSES = 2500, 4
OUTPUTS = torch.randn(NUM, CLASSES, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(NUM) % CLASSES


class OrderedSum:
    """Depends on the order and the size of the calls, as floating-point sums do."""

    def __init__(self, scale: float = 1.0) -> None:
        self.total, self.sizes, self.scale = torch.zeros(()), [], scale

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.total = self.total / 3 + self.scale * outputs.sum() + targets[0]
        self.sizes.append(len(targets))

    def compute(self) -> dict[str, Any]:
        return {"ordered": self.total, "calls": len(self.sizes)}


def share_of_first(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs.argmax(dim=1) == 0).float().mean())


def metrics(*values: Any, **options: Any) -> MetricsWithCustom:
    names = [f"python:metric_n{number}" for number in range(len(values))]
    provide(dict(zip(names, values, strict=True)))
    return MetricsWithCustom(CLASSES, [CodeConfig(name=name, options=options) for name in names])


def add(found: ClassificationMetrics, indices: Tensor, batch_size: int) -> None:
    for rows in indices.split(batch_size):
        found.update(OUTPUTS[rows], Batch({"targets": TARGETS[rows], "indices": rows}, rows, (len(rows),)))


def test_values_do_not_depend_on_batches_and_ranks() -> None:
    whole = metrics(OrderedSum, scale=2.0)
    add(whole, torch.arange(NUM), 100)
    ranks = [metrics(OrderedSum, scale=2.0) for _ in range(2)]
    for rank, found in enumerate(ranks):
        add(found, torch.arange(rank, NUM, 2), 33)
    states = [found.state() for found in ranks]
    expected = whole.compute()
    for found in ranks:
        found.merge(states)
        assert found.compute() == {**expected, "loss": pytest.approx(expected["loss"])}
    assert expected["calls"] == 3 and expected["top1"] == whole.compute()["top1"]


def test_a_function_and_an_object_from_python_are_metrics_too() -> None:
    found = metrics(share_of_first, OrderedSum())
    add(found, torch.arange(NUM), 500)
    values = found.compute()
    assert values["metric_n0"] == share_of_first(OUTPUTS, TARGETS)
    assert found.compute() == values  # nothing is left of the first evaluation


@pytest.mark.parametrize(
    ("metric", "error", "message"),
    [
        (lambda outputs, targets: "high", UsageError, "returns metric_n0: 'high'"),
        (lambda outputs, targets: float("nan"), UsageError, "a finite number"),
        (lambda outputs, targets: {"top1": 1.0}, UsageError, "already a metric called top1"),
        (lambda outputs: 1.0, CustomCodeError, "raised TypeError"),
    ],
)
def test_what_is_not_a_number_is_refused(metric: Any, error: type[Exception], message: str) -> None:
    found = metrics(metric)
    add(found, torch.arange(4), 4)
    with pytest.raises(error, match=message):
        found.compute()


def test_what_is_not_a_metric_is_refused_before_the_run() -> None:
    provide({"python:metric_o": 3})
    with pytest.raises(UsageError, match="is not a metric"):
        check_metrics([CodeConfig(name="python:metric_o")])
