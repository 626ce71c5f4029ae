"""Writes a model for OpenVINO, from its ONNX graph; see docs/decisions/openvino.md."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from reconv.inference.export import onnx_file
from reconv.inference.export.export_metadata import ExportMetadata

if TYPE_CHECKING:
    from reconv.inference.export.targets import ExportOptions

MODEL_FILE = "model.xml"  # the graph; the weights are beside it, in model.bin
SECTION = "reconv"  # of the runtime information


def write_openvino(
    module: nn.Module, example: Tensor, metadata: ExportMetadata, options: ExportOptions, folder: Path
) -> None:
    """Write the module to `model.xml` and `model.bin`, with the metadata in its runtime information."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import openvino

    with tempfile.TemporaryDirectory(prefix="reconv-openvino-") as temporary:
        onnx_file.write_onnx(module, example, metadata, options, Path(temporary))
        # Not convert_model, which reports its use to Intel.
        model = openvino.Core().read_model(Path(temporary) / onnx_file.MODEL_FILE)
        for name, value in metadata.properties(MODEL_FILE).items():
            model.set_rt_info(value, [SECTION, name])
        openvino.save_model(model, folder / MODEL_FILE, compress_to_fp16=False)  # the default would round weights
