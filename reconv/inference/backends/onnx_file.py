"""Writes a model as ONNX with torch's exporter; see docs/decisions/onnx-export.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from reconv.exporters.formats.torch_export import BATCH, quiet_exporter, trace
from reconv.exporters.metadata import ExportMetadata

if TYPE_CHECKING:
    from reconv.exporters.targets import ExportOptions

MODEL_FILE = "model.onnx"
OPSET = 20


def write_onnx(
    module: nn.Module, example: Tensor, metadata: ExportMetadata, options: ExportOptions, folder: Path
) -> None:
    """Write the module to `model.onnx`, with the metadata in its `metadata_props`."""
    exported = export_onnx(
        module, example, tuple(metadata.outputs), options.opset or OPSET, is_dynamic=metadata.batch is None
    )
    exported.model.metadata_props.update(metadata.properties(MODEL_FILE))
    exported.save(str(folder / MODEL_FILE))


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
