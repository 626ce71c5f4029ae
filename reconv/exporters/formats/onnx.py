"""Writes a model as ONNX with torch's exporter; see docs/decisions/onnx-export.md."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from reconv.exporters.metadata import ExportMetadata
from reconv.exporters.targets import IN_FILE, ExportOptions, ExportTarget
from reconv.inference.backends.exported import OPSET, export_onnx
from reconv.inference.backends.quantize import quantize_onnx

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


TARGET = ExportTarget(
    name="onnx",
    model_file=MODEL_FILE,
    runtime="onnxruntime",
    write=write_onnx,
    packages=("onnx", "onnxscript", "onnxruntime"),
    extra="onnx",
    needs="onnxruntime",
    contents=IN_FILE,
    nms="onnx",
    options=("--opset", "--no-nms", "--precision int8"),
    quantize=quantize_onnx,
    hidden_packages=("reconv", "torch"),
)
