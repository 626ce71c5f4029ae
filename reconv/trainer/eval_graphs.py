"""Forward passes of the evaluations of a run as CUDA graphs, one for each set of weights and shape of batch.

The weights are updated in place, so a graph that was captured once evaluates those of its day.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from reconv.core.batch import Batch
from reconv.logging.phases import PhaseTimer
from reconv.trainer.cuda_graph import CallGraphs, GraphCapture, batch_shape


@dataclass(slots=True)
class EvalGraphs:
    """Runs a forward pass eagerly in the first evaluation, and captures it in the second.

    If that fails, as for a network that reads a value on the host, evaluations run eagerly from then on.
    """

    device: GraphCapture
    warn: Callable[[str, int], None]  # text, step
    phases: PhaseTimer = field(default_factory=PhaseTimer)
    _graphs: CallGraphs[Any] = field(init=False)
    _seen: set[Hashable] = field(default_factory=set)  # run eagerly in this evaluation
    _warm: set[Hashable] = field(default_factory=set)  # run eagerly in an earlier one
    _is_disabled: bool = False
    _step: int = 0

    def __post_init__(self) -> None:
        self._graphs = CallGraphs(self.device, _cloned, self.phases)

    def start_evaluation(self, step: int) -> None:
        """Begin the evaluation after `step` steps, which captures what those before have run eagerly."""
        self._step = step
        self._warm |= self._seen
        self._seen.clear()

    def run(self, weights: str, forward: Callable[[Batch], Any], batch: Batch) -> Any:
        """The outputs for a batch. `forward` reads its images only; `weights` names the model, always the same one."""
        images = Batch({"images": batch["images"]}, batch.positions, batch.groups)
        key = (weights, batch_shape(images))
        is_due = key in self._warm and key not in self._graphs and not self._graphs.is_full
        if is_due and not self._is_disabled:
            self._try_capture(key, forward, images)
        if self._is_disabled:
            return forward(batch)
        if key in self._graphs:
            return self._graphs.replay(key, (), [images])
        self._seen.add(key)
        return self.device.run_on_stream(lambda: forward(images))

    def _try_capture(self, key: Hashable, forward: Callable[[Batch], Any], images: Batch) -> None:
        try:
            self._graphs.capture(key, lambda _, batches: forward(batches[0]), (), [images])
        except Exception as error:
            self._is_disabled = True
            self._graphs.clear()
            why = str(_first_cause(error)).strip().partition("\n")[0]
            text = f"evaluations run without CUDA graphs, which takes longer: capturing one failed ({why})"
            self.warn(text, self._step)


def _first_cause(error: BaseException) -> BaseException:
    """The error of the network itself: after it, torch raises another one because the capture cannot end."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _cloned(outputs: Any) -> Any:
    """The tensors of the outputs in memory of their own."""
    return tree_map_only(Tensor, torch.clone, outputs)
