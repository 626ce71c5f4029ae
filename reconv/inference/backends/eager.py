"""The network as it was trained: the outputs of evaluation during training, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reconv.build.model import Network, build_eval_preprocess
from reconv.inference.backends.base import InferenceBackend
from reconv.recipe.schema import Recipe
from reconv.tasks.evaluation import average_views, eval_mode


class EagerBackend(InferenceBackend):
    """The network's own modules, in the precision of its recipe."""

    name = "eager"

    def __init__(self, recipe: Recipe, network: Network) -> None:
        self.precision = recipe.precision.mode
        self._network = network
        self._preprocess = build_eval_preprocess(recipe, network)
        self._forward = average_views(network.model, recipe.evaluate.tta)

    def __call__(self, images: Tensor) -> Any:
        # Not torch.inference_mode, which not every device supports.
        with eval_mode(self._network.model), torch.no_grad():
            prepared = self._preprocess.prepare(images)
            with self._network.precision.autocast():
                return self._forward(prepared)
