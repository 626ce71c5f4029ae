"""Interface of the backends: a function from uint8 images to the outputs of the network, normalization included.

The plain one, `eager`, gives the outputs of evaluation during training, bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reconv.build.model import Network, build_eval_preprocess
from reconv.recipe.schema import Recipe
from reconv.tasks.evaluation import average_views, eval_mode

BackendName = Literal["auto", "eager", "folded", "fused", "onnxruntime"]
Precision = Literal["auto", "fp32", "bf16", "fp16", "int8"]
BACKENDS: tuple[BackendName, ...] = ("auto", "eager", "folded", "fused", "onnxruntime")
PRECISIONS: tuple[Precision, ...] = ("auto", "fp32", "bf16", "fp16", "int8")


class InferenceBackend(ABC):
    """A network ready for inference; one thread at a time may call it."""

    name: str
    precision: str  # of the computation
    difference: float | None = None  # largest difference from eager, relative to the largest output; None: not compared

    @abstractmethod
    def __call__(self, images: Tensor) -> Any:
        """Logits [n, classes], or SSDOutput, of images [n, channels, size, size] from 0 to 255 on the device."""

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Prepare batches of these sizes, so that the first of them is as fast as the next."""
        return

    def describe(self) -> str:
        """The backend in one line, for a log."""
        compared = "" if self.difference is None else f", outputs within {self.difference:.1g} of eager's"
        return f"{self.name}, {self.precision}{compared}"


LogFunction = Callable[[str], None]


def no_log(text: str) -> None:
    """Discard a message."""


U8 = npt.NDArray[np.uint8]


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
