"""Writes a model as a torch.export program, the graph that the other targets are made of too."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from reconv.exporters.folder import SETTINGS
from reconv.exporters.metadata import ExportMetadata

if TYPE_CHECKING:
    from reconv.exporters.targets import ExportOptions

MODEL_FILE = "model.pt2"
BATCH = "batch"  # the name of the dynamic dimension
_LOGGERS = ("torch.onnx", "torch.export")


def write_torch_export(
    module: nn.Module, example: Tensor, metadata: ExportMetadata, options: ExportOptions, folder: Path
) -> None:
    """Write `model.pt2` with torch.export.save; preprocess.json is in it as an extra file."""
    program = trace(module, example, is_dynamic=metadata.batch is None)
    settings = json.dumps(metadata.settings(MODEL_FILE), ensure_ascii=False)
    with quiet_exporter():
        torch.export.save(program, folder / MODEL_FILE, extra_files={SETTINGS: settings})


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
