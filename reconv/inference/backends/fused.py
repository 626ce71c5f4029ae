"""On CUDA: the folded network with fused operations, normalization included, as one CUDA graph per batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from reconv.data.transforms.normalize import EvalPreprocess
from reconv.device.graphs import GraphCapture
from reconv.inference.backends.base import InferenceBackend
from reconv.inference.backends.captured_network import CapturedInference, FusedInference
from reconv.inference.backends.fold import FoldedNetwork
from reconv.recipe.schema import Recipe
from reconv.tasks.evaluation import average_views

MAX_BATCH = 256  # images of the largest graph; larger batches are split


def graph_batch(num_images: int) -> int:
    """The batch size of the graph for at most MAX_BATCH images: the next power of two; the rest is padding."""
    return 1 << (num_images - 1).bit_length()


@dataclass(frozen=True, slots=True)
class _Graph:
    images: Tensor  # uint8 [n, channels, size, size] on the device: what the graph reads
    captured: CapturedInference


class FusedBackend(InferenceBackend):
    """Graphs for batches of 1, 2, 4, ... 256 images, each captured when it is first needed; they share their memory."""

    name = "fused"

    def __init__(
        self, recipe: Recipe, folded: FoldedNetwork, capture: GraphCapture, device: torch.device, precision: str
    ) -> None:
        self.precision = precision
        self.notes: list[str] = []  # why nothing is fused at a batch size
        self._device = device
        preprocess = recipe.data.preprocess
        self._shape = (preprocess.channels, preprocess.size, preprocess.size)
        tta = recipe.evaluate.tta
        self._inference = FusedInference(
            folded.model,
            capture,
            folded.exact,
            EvalPreprocess(preprocess, folded.dtype, channels_last=True, kernels=True).prepare,
            lambda network: average_views(network, tta),
        )
        self._graphs: dict[int, _Graph] = {}

    def __call__(self, images: Tensor) -> Any:
        with torch.no_grad():
            outputs = [self._run(part) for part in images.split(MAX_BATCH)]
            return outputs[0] if len(outputs) == 1 else _concat(outputs)

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        for size in sorted({graph_batch(min(size, MAX_BATCH)) for size in batch_sizes}, reverse=True):
            self._graph(size)

    def _run(self, images: Tensor) -> Any:
        num_images = len(images)
        graph = self._graph(graph_batch(num_images))
        graph.images[:num_images].copy_(images, non_blocking=True)
        graph.captured.run()
        # The next run overwrites them.
        return tree_map(lambda output: output[:num_images].clone(), graph.captured.outputs)

    def _graph(self, size: int) -> _Graph:
        if size not in self._graphs:
            images = torch.zeros(size, *self._shape, dtype=torch.uint8, device=self._device)
            captured = self._inference(images)
            if captured.note:
                self.notes.append(f"batch {size}: {captured.note}")
            self._graphs[size] = _Graph(images, captured)
        return self._graphs[size]


def _concat(outputs: Sequence[Any]) -> Any:
    concat: Callable[..., Tensor] = lambda *parts: torch.cat(parts)  # noqa: E731
    return tree_map(concat, *outputs)
