"""Post-training quantization to int8, of ONNX files for onnxruntime and of OpenVINO files by NNCF.

Weights have one scale per output channel, activations one range per tensor, which calibration images show. Only what
lies between the first and the last convolution or linear layer is quantized: the normalization of images, the decoding
of boxes and NMS stay in float32.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from reconv.core.errors import UsageError
from reconv.inference.backends.base import U8

INPUT = "images"
_LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
# Not Sigmoid and Mul, the gates of squeeze-and-excitation and SiLU: int8 costs accuracy there and saves little time.
_QUANTIZED = (*_LAYERS, "Add", "Concat", "MaxPool", "AveragePool", "GlobalAveragePool", "Relu", "Clip")

MAX_DROP = 0.01  # of the accuracy or mAP of int8


def check_int8_packages(*names: str, extra: str) -> None:
    """Raise `UsageError` if a package that quantizes is missing."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"int8 needs {', '.join(missing)}", why="not installed", hint=f"pip install 'reconv[{extra}]'")


def quantize_onnx(fp32_path: Path, int8_path: Path, calibration_batches: Iterable[U8]) -> None:
    """Write an int8 copy of an ONNX file; `calibration_batches` are uint8 images [n, height, width, channels]."""
    check_int8_packages("onnx", "onnxruntime", extra="onnx")
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Calibration(CalibrationDataReader):  # type: ignore[misc]  # the package has no types
        def __init__(self) -> None:
            self._batches = iter(calibration_batches)

        def get_next(self) -> dict[str, U8] | None:
            batch = next(self._batches, None)
            return None if batch is None else {INPUT: batch}

    model = onnx.load(str(fp32_path))
    quantized = _between_layers(model.graph)
    with _quiet():
        quantize_static(
            str(fp32_path),
            str(int8_path),
            Calibration(),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
            op_types_to_quantize=list(_QUANTIZED),
            nodes_to_exclude=[node.name for node in model.graph.node if node.name not in quantized],
        )


def quantize_openvino(fp32_path: Path, int8_path: Path, calibration_batches: Iterable[U8]) -> None:
    """Write an int8 copy of an OpenVINO file; `calibration_batches` are uint8 images [n, height, width, channels]."""
    check_int8_packages("openvino", "nncf", extra="openvino")
    batches = list(calibration_batches)
    with _quiet():
        os.environ.setdefault("NNCF_CI", "1")  # otherwise NNCF reports its use to Intel
        import nncf
        import openvino

        model = openvino.Core().read_model(fp32_path)
        # Activations may be asymmetric: ReLU is not the only activation.
        quantized = nncf.quantize(
            model, nncf.Dataset(batches), subset_size=len(batches), preset=nncf.QuantizationPreset.MIXED
        )
    openvino.save_model(quantized, int8_path, compress_to_fp16=False)


def _between_layers(graph: Any) -> set[str]:
    """The names of the layers, and of the nodes on a path from one layer to another."""
    after, before = set[str](), set[str]()
    computed, needed = set[str](), set[str]()  # by a layer or from its result; by a layer or on the way to one
    for node in graph.node:
        if node.op_type in _LAYERS or not computed.isdisjoint(node.input):
            after.add(node.name)
            computed.update(node.output)
    for node in reversed(graph.node):
        if node.op_type in _LAYERS or not needed.isdisjoint(node.output):
            before.add(node.name)
            needed.update(node.input)
    return after & before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without advice that does not apply (to fold norms first: they are), progress bars and deprecation warnings."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
