"""States of metrics: parts in any order, written and read again, give the metrics of the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from reconv.core.batch import Batch
from reconv.metrics.custom import MetricsWithCustom
from reconv.metrics.multilabel import MultilabelMetrics
from reconv.metrics.state import decode_state, encode_state
from reconv.metrics.topk import ClassificationMetrics
from reconv.recipe.parts.code import CodeConfig
from reconv.tasks.base import Metrics

NUM, CLASSES = 60, 7


def mean_output(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs.sum(dim=1) * (targets + 1)).mean())


CUSTOM = CodeConfig(name=f"{__name__}:mean_output", options={})
CASES: list[tuple[Callable[[], Metrics], bool]] = [
    (lambda: ClassificationMetrics(CLASSES), False),
    (lambda: MetricsWithCustom(CLASSES, [CUSTOM]), False),
    (lambda: MultilabelMetrics(CLASSES), True),
]


@pytest.mark.parametrize(("make", "is_multilabel"), CASES)
def test_parts_that_were_written_and_read_have_the_metrics_of_the_whole(
    make: Callable[[], Metrics], is_multilabel: bool
) -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(NUM, CLASSES, generator=random)
    targets = torch.randint(0, CLASSES, (NUM,), generator=random)
    if is_multilabel:
        targets = (torch.rand(NUM, CLASSES, generator=random) > 0.6).float()

    def update(metrics: Metrics, start: int) -> None:
        rows = torch.arange(start, start + 10)
        metrics.update(logits[rows], Batch({"targets": targets[rows], "indices": rows}, rows, (10,)))

    whole, parts = make(), [make() for _ in range(4)]
    for start in range(0, NUM, 10):
        update(whole, start)
        update(parts[(start // 10) % 3], start)  # the last part stays empty
    found = make()
    found.merge([decode_state(encode_state(part.state())) for part in reversed(parts)])
    assert found.num_samples == NUM
    assert found.compute() == whole.compute()
