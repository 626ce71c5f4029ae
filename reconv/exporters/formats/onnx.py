"""Writes a model as ONNX with torch's exporter; see docs/decisions/onnx-export.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from reconv.exporters.metadata import ExportMetadata
from reconv.inference.backends.exported import OPSET, export_onnx

if TYPE_CHECKING:
    from reconv.exporters.targets import ExportOptions

MODEL_FILE = "model.onnx"


def write_onnx(
    module: nn.Module, example: Tensor, metadata: ExportMetadata, options: ExportOptions, folder: Path
) -> None:
    """Write the module to `model.onnx`, with the metadata in its `metadata_props`."""
    exported = export_onnx(
        module, example, tuple(metadata.outputs), options.opset or OPSET, is_dynamic=metadata.batch is None
    )
    exported.model.metadata_props.update(metadata.properties(MODEL_FILE))
    exported.save(str(folder / MODEL_FILE))
