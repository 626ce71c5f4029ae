"""The network as it is exported: uint8 images in, normalization inside; its graph and its ONNX program."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from reconv.data.transforms.normalize import Normalize, standardize
from reconv.recipe.parts.data import PreprocessConfig
from reconv.tasks.evaluation import average_views


class ExportNormalize(nn.Module):
    """uint8 images [n, height, width, channels] to what the network takes, float32 [n, channels, height, width]."""

    factor: Tensor
    shift: Tensor

    def __init__(self, preprocess: PreprocessConfig) -> None:
        super().__init__()
        self._per_image = preprocess.per_image_standardization
        factor, shift = Normalize(preprocess, torch.float32).affine(torch.device("cpu"))
        self.register_buffer("factor", factor.clone())
        self.register_buffer("shift", shift.clone())

    def forward(self, images: Tensor) -> Tensor:
        images = images.permute(0, 3, 1, 2)
        if self._per_image:
            return standardize(images, torch.float32)
        return images.to(torch.float32) * self.factor + self.shift


class ExportClassifier(nn.Module):
    """uint8 images [n, height, width, channels] to logits [n, classes] in float32, averaged over the views of `tta`."""

    def __init__(self, model: nn.Module, preprocess: PreprocessConfig, tta: str = "none") -> None:
        super().__init__()
        self.normalize = ExportNormalize(preprocess)
        self.model = model
        self._tta = tta

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = average_views(self.model, self._tta)(self.normalize(images))
        return logits.to(torch.float32)


def example_images(preprocess: PreprocessConfig, batch: int | None) -> Tensor:
    """Images to trace a network with; two where the batch size is dynamic, as 1 would become a constant."""
    shape = (batch or 2, preprocess.size, preprocess.size, preprocess.channels)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


OPSET = 20


def export_onnx(
    module: nn.Module, example: Tensor, outputs: Sequence[str], opset: int = OPSET, *, is_dynamic: bool = True
) -> torch.onnx.ONNXProgram:
    """The module as an ONNX program with the input `images` and these outputs."""
    program = trace(module, example, is_dynamic=is_dynamic)
    with quiet_exporter():
        exported = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=opset,
            input_names=["images"],
            output_names=list(outputs),
            verbose=False,
        )
    assert exported is not None
    _name_batch(exported.model)
    return exported


def _name_batch(model: Any) -> None:
    """Give the dynamic dimension of inputs and outputs its name, which torch.export replaces by a symbol."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.shape is not None and len(value.shape) and not isinstance(value.shape[0], int):
            value.shape[0] = BATCH


BATCH = "batch"  # the name of the dynamic dimension


_LOGGERS = ("torch.onnx", "torch.export")


def trace(module: nn.Module, example: Tensor, *, is_dynamic: bool) -> torch.export.ExportedProgram:
    """The graph of a module for batches of any size, or of the size of the example."""
    shapes = ({0: torch.export.Dim(BATCH)},) if is_dynamic else None
    with torch.no_grad(), quiet_exporter():
        return torch.export.export(module.eval(), (example,), dynamic_shapes=shapes)


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Without the exporter's own deprecation warnings, and its notes on packages that it does not need."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
