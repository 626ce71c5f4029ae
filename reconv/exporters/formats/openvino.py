"""Writes a model for OpenVINO, from its ONNX graph; see docs/decisions/openvino.md."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor, nn

from reconv.exporters.formats import onnx as onnx_file
from reconv.exporters.metadata import ExportMetadata
from reconv.exporters.targets import IN_FILE, ExportOptions, ExportTarget
from reconv.inference.backends.quantize import quantize_openvino

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
        # Not Core.read_model: NNCF quantizes what that returns wrongly (ResNet-20: 21 % instead of 92 %).
        with _no_telemetry():
            model = openvino.convert_model(Path(temporary) / onnx_file.MODEL_FILE)
        for name, value in metadata.properties(MODEL_FILE).items():
            model.set_rt_info(value, [SECTION, name])
        openvino.save_model(model, folder / MODEL_FILE, compress_to_fp16=False)  # the default would round weights


@contextmanager
def _no_telemetry() -> Iterator[None]:
    """Without the report of use to Intel, which the converter leaves out in continuous integration."""
    before = os.environ.get("CI")
    os.environ["CI"] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["CI"]
        else:
            os.environ["CI"] = before


TARGET = ExportTarget(
    name="openvino",
    model_file=MODEL_FILE,
    runtime="openvino",
    write=write_openvino,
    packages=("onnx", "onnxscript", "openvino"),
    extra="openvino",
    needs="openvino",
    contents=IN_FILE,
    nms="onnx",
    options=("--opset", "--no-nms", "--precision int8"),
    quantize=quantize_openvino,
    hidden_packages=("reconv", "torch", "onnx"),
)
