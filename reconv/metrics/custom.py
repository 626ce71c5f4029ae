"""Your own metrics of a validation set, beside those of classification.

The outputs for all samples are collected and passed to the metrics in the order of the validation set and in pieces of
fixed size, so that the values depend neither on the batch size nor on the number of ranks. That takes 4 bytes per
sample and class in host memory, on every rank.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from reconv.core.batch import Batch
from reconv.core.custom_code import build_object, code_errors
from reconv.core.errors import UsageError
from reconv.metrics.state import MetricsState
from reconv.metrics.topk import ClassificationMetrics
from reconv.recipe.parts.code import CodeConfig

UPDATE_SIZE = 1024  # samples per call of update


@dataclass(frozen=True, slots=True)
class OutputRows:
    """Outputs, targets and indices of some samples."""

    outputs: Tensor  # float32 [n, classes]
    targets: Tensor
    indices: Tensor

    @classmethod
    def join(cls, parts: Sequence[OutputRows]) -> OutputRows:
        """All parts in the order of the validation set."""
        order = torch.cat([part.indices for part in parts]).argsort(stable=True)
        outputs, targets = (torch.cat([getattr(part, name) for part in parts]) for name in ("outputs", "targets"))
        return cls(outputs[order], targets[order], torch.cat([part.indices for part in parts])[order])


_OUTPUT_ROWS = tuple(field.name for field in fields(OutputRows))


class MetricsWithCustom(ClassificationMetrics):
    """The metrics of classification and the user's own."""

    def __init__(self, num_classes: int, metrics: Sequence[CodeConfig]) -> None:
        super().__init__(num_classes)
        self._metrics = metrics
        self._outputs: list[OutputRows] = []

    def update(self, outputs: Any, batch: Batch) -> None:
        super().update(outputs, batch)
        self._outputs.append(OutputRows(outputs.float().cpu(), batch["targets"].cpu(), batch["indices"].cpu()))

    def compute(self) -> dict[str, float]:
        values = super().compute()
        if not self._outputs:
            return values
        rows = OutputRows.join(self._outputs)
        for config in self._metrics:
            for name, value in _compute(config, rows):
                if name in values:
                    raise UsageError(f"{config.name}: there is already a metric called {name}", hint="rename it")
                values[name] = value
        return values

    def state(self) -> MetricsState:
        rows = asdict(OutputRows.join(self._outputs)) if self._outputs else {}
        return {**super().state(), **{name: tensor.numpy() for name, tensor in rows.items()}}

    def merge(self, states: Sequence[MetricsState]) -> None:
        super().merge(states)
        columns = [[torch.from_numpy(state[name]) for name in _OUTPUT_ROWS] for state in states if "outputs" in state]
        self._outputs = [OutputRows(*tensors) for tensors in columns]


def check_metrics(metrics: Sequence[CodeConfig]) -> None:
    """Refuse what is not a metric, before a run needs it."""
    for config in metrics:
        _build(config)


def _build(config: CodeConfig) -> Any:
    """A new metric: an object with `update` and `compute`, or a function of outputs and targets."""
    metric = build_object(config.name, config.options, "a metric")
    if not callable(metric) and not (hasattr(metric, "update") and hasattr(metric, "compute")):
        raise UsageError(
            f"{config.name} is not a metric",
            where="metrics",
            why="it has no update(outputs, targets) and compute(), and is not a function of outputs and targets",
        )
    return metric


def _compute(config: CodeConfig, rows: OutputRows) -> Iterator[tuple[str, float]]:
    """The names and values of one metric."""
    metric = _build(config)
    with code_errors(config.name):
        if hasattr(metric, "update"):
            metric = copy.deepcopy(metric)  # one from Python must not remember the last evaluation
            for start in range(0, len(rows.targets), UPDATE_SIZE):
                piece = slice(start, start + UPDATE_SIZE)
                metric.update(rows.outputs[piece], rows.targets[piece])
            result = metric.compute()
        else:
            result = metric(rows.outputs, rows.targets)
    default = getattr(metric, "name", None) or config.name.rpartition(":")[2].rpartition(".")[2]
    named = result if isinstance(result, Mapping) else {default: result}
    for name, value in named.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not isinstance(name, str) or not math.isfinite(number):
            raise UsageError(
                f"{config.name} returns {name}: {value!r}",
                where="metrics",
                why="a metric is a finite number, or a dict of them by name",
            )
        yield name, number
