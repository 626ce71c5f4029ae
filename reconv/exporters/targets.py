"""The formats that a model can be exported to."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from reconv.core.errors import UsageError
from reconv.exporters.detector import NMSOperation
from reconv.exporters.formats import aoti as aoti_file
from reconv.exporters.formats import onnx as onnx_file
from reconv.exporters.formats import openvino as openvino_file
from reconv.exporters.formats import torch_export as torch_export_file
from reconv.exporters.formats import weights as weights_file
from reconv.exporters.metadata import ExportMetadata
from reconv.inference.backends.base import U8
from reconv.inference.backends.quantize import quantize_onnx, quantize_openvino
from reconv.inference.predictor import Predictor


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The options of `reconv export` that single targets read."""

    opset: int | None = None
    int8: bool = False
    nms: bool = True


Adapt = Callable[["ExportTarget", Predictor, ExportMetadata], tuple["ExportTarget", ExportMetadata]]
Quantize = Callable[[Path, Path, Iterable[U8]], None]
WriteModel = Callable[[nn.Module, Tensor, ExportMetadata, ExportOptions, Path], None]


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """One format."""

    name: str
    model_file: str
    runtime: str  # run_template/with_RUNTIME.py
    write: WriteModel  # (module, example images, metadata, options, folder)
    needs: str  # what run.py needs besides numpy and Pillow, as pip takes it
    contents: str  # what is in the file, for the model card
    nms: NMSOperation = "torch"  # of detectors
    packages: tuple[str, ...] = ()  # what writing and running it import, besides torch
    extra: str = ""  # of Reconv, which installs them
    adapt: Adapt | None = None  # what depends on the model; refuses those that the target cannot hold
    quantize: Quantize | None = None  # (fp32 file, int8 file, calibration images)
    options: tuple[str, ...] = ()  # of `reconv export`, which not every target has
    hidden_packages: tuple[str, ...] = ("reconv",)  # what run.py must do without when it is checked

    def check_packages(self) -> None:
        """Raise `UsageError` if a package is missing."""
        missing = [name for name in self.packages if not _is_installed(name)]
        if missing:
            raise UsageError(
                f"export --to {self.name} needs {', '.join(missing)}",
                why="the package is not installed",
                hint=f"pip install 'reconv[{self.extra}]'",
            )


_TORCH = torch.__version__.partition("+")[0]
_WEIGHTS = "only the weights; run.py builds the model and normalizes the uint8 images"
_IN_FILE = "the model and the normalization; it takes uint8 images"

TARGETS: Mapping[str, ExportTarget] = {
    target.name: target
    for target in (
        ExportTarget(
            name="onnx",
            model_file=onnx_file.MODEL_FILE,
            runtime="onnxruntime",
            write=onnx_file.write_onnx,
            packages=("onnx", "onnxscript", "onnxruntime"),
            extra="onnx",
            needs="onnxruntime",
            contents=_IN_FILE,
            nms="onnx",
            options=("--opset", "--no-nms", "--int8"),
            quantize=quantize_onnx,
            hidden_packages=("reconv", "torch"),
        ),
        ExportTarget(
            name="openvino",
            model_file=openvino_file.MODEL_FILE,
            runtime="openvino",
            write=openvino_file.write_openvino,
            packages=("onnx", "onnxscript", "openvino"),
            extra="openvino",
            needs="openvino",
            contents=_IN_FILE,
            nms="onnx",
            options=("--opset", "--no-nms", "--int8"),
            quantize=quantize_openvino,
            hidden_packages=("reconv", "torch", "onnx"),
        ),
        ExportTarget(
            name="torch-export",
            model_file=torch_export_file.MODEL_FILE,
            runtime="torch_export",
            write=torch_export_file.write_torch_export,
            needs=f"'torch=={_TORCH}'",
            contents=_IN_FILE,
            options=("--no-nms",),
        ),
        ExportTarget(
            name="aoti",
            model_file=torch_export_file.MODEL_FILE,
            runtime="aoti",
            write=aoti_file.write_aoti,
            needs=f"'torch=={_TORCH}'",
            contents=f"{_IN_FILE}, compiled by AOTInductor for the kind of CPU it was exported on",
            options=("--no-nms",),
        ),
        ExportTarget(
            name="safetensors",
            model_file=weights_file.SAFETENSORS_FILE,
            runtime="weights",
            write=weights_file.write_safetensors,
            needs="torch safetensors",
            contents=_WEIGHTS,
            adapt=weights_file.adapt_safetensors,
        ),
        ExportTarget(
            name="torchvision-pth",
            model_file=weights_file.PTH_FILE,
            runtime="weights",
            write=weights_file.write_torchvision_pth,
            needs="torch torchvision",
            contents=_WEIGHTS,
            packages=("torchvision",),
            extra="torchvision",
            adapt=weights_file.adapt_torchvision,
        ),
    )
}


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # an import of it was blocked
        return False


def find_target(name: str) -> ExportTarget:
    """The target of a name; raises `UsageError` if there is none."""
    if name not in TARGETS:
        raise UsageError(f"there is no export target {name!r}", hint=f"use one of {', '.join(TARGETS)}")
    return TARGETS[name]
