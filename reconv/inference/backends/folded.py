"""On the CPU: the folded network in channels_last, with oneDNN's fused convolutions on weights packed once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reconv.data.transforms.normalize import EvalPreprocess
from reconv.inference.backends.base import InferenceBackend
from reconv.inference.backends.compiler import compile_inference
from reconv.inference.backends.fold import fold_batch_norms
from reconv.inference.backends.onednn import use_onednn
from reconv.recipe.schema import Recipe
from reconv.tasks.evaluation import average_views


class FoldedBackend(InferenceBackend):
    """Each convolution computes its bias, sum and activation in one pass."""

    name = "folded"

    def __init__(self, recipe: Recipe, folded: FoldedNetwork, precision: str) -> None:
        self.precision = precision
        preprocess = recipe.data.preprocess
        self._preprocess = EvalPreprocess(preprocess, folded.dtype, channels_last=True)
        model = folded.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        example = torch.zeros(1, preprocess.channels, preprocess.size, preprocess.size, dtype=folded.dtype)
        network, _ = compile_inference(model, example.contiguous(memory_format=torch.channels_last))
        use_onednn(network)
        self._forward = average_views(network, recipe.evaluate.tta)

    def __call__(self, images: Tensor) -> Any:
        with torch.no_grad():
            return self._forward(self._preprocess.prepare(images))


@dataclass(frozen=True, slots=True)
class FoldedNetwork:
    """A copy of a network with folded norms."""

    model: nn.Module
    exact: Callable[[Tensor], Any]  # the same in at least float32, for images of any dtype
    num_folded: int
    dtype: torch.dtype


def fold_network(model: nn.Module, shape: Sequence[int], dtype: torch.dtype) -> FoldedNetwork:
    """The network with folded norms in `dtype`; `shape` is that of one image."""
    folded, num_folded = fold_batch_norms(model, shape)
    wide = torch.promote_types(dtype, torch.float32)
    exact = folded if dtype == wide else copy.deepcopy(folded).to(wide)
    return FoldedNetwork(folded.to(dtype), lambda images: exact(images.to(wide)), num_folded, dtype)
