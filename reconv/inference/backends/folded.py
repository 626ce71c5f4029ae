"""On the CPU: the folded network in channels_last, with oneDNN's fused convolutions on weights packed once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reconv.data.transforms.device_transforms import EvalPreprocess
from reconv.inference.backends.backend import InferenceBackend
from reconv.inference.backends.compiler import compile_inference
from reconv.inference.backends.folded_network import FoldedNetwork
from reconv.inference.backends.onednn import use_onednn
from reconv.recipe.schema import Recipe
from reconv.tasks.tta import average_views


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
