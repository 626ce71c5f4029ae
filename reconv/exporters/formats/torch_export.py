"""Writes a model as a torch.export program, the graph that the other targets are made of too."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from reconv.exporters.folder import SETTINGS
from reconv.exporters.metadata import ExportMetadata
from reconv.exporters.targets import IN_FILE, ExportOptions, ExportTarget
from reconv.inference.backends.exported import quiet_exporter, trace

MODEL_FILE = "model.pt2"


def write_torch_export(
    module: nn.Module, example: Tensor, metadata: ExportMetadata, options: ExportOptions, folder: Path
) -> None:
    """Write `model.pt2` with torch.export.save; preprocess.json is in it as an extra file."""
    program = trace(module, example, is_dynamic=metadata.batch is None)
    settings = json.dumps(metadata.settings(MODEL_FILE), ensure_ascii=False)
    with quiet_exporter():
        torch.export.save(program, folder / MODEL_FILE, extra_files={SETTINGS: settings})


NEEDS_TORCH = f"'torch=={torch.__version__.partition('+')[0]}'"
TARGET = ExportTarget(
    name="torch-export",
    model_file=MODEL_FILE,
    runtime="torch_export",
    write=write_torch_export,
    needs=NEEDS_TORCH,
    contents=IN_FILE,
    options=("--no-nms",),
)
