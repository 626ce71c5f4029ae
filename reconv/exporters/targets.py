"""The interface of an export format, and the list of them, for the command without torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from reconv.core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from reconv.exporters.detector import NMSOperation
    from reconv.exporters.metadata import ExportMetadata
    from reconv.inference.backends.base import U8
    from reconv.inference.predictor import Predictor

TARGETS: Mapping[str, str] = {  # by the name of --to: the module in `formats` and its target
    "onnx": "onnx:TARGET",
    "openvino": "openvino:TARGET",
    "torch-export": "torch_export:TARGET",
    "aoti": "aoti:TARGET",
    "safetensors": "weights:SAFETENSORS",
    "torchvision-pth": "weights:TORCHVISION_PTH",
}


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The options of `reconv export` that single targets read."""

    opset: int | None = None
    int8: bool = False
    nms: bool = True


if TYPE_CHECKING:
    Adapt = Callable[["ExportTarget", Predictor, ExportMetadata], tuple["ExportTarget", ExportMetadata]]
    Quantize = Callable[[Path, Path, Iterable[U8]], None]
    WriteModel = Callable[[nn.Module, Tensor, ExportMetadata, ExportOptions, Path], None]

IN_FILE = "the model and the normalization; it takes uint8 images"


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


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # an import of it was blocked
        return False


def find_target(name: str) -> ExportTarget:
    """The target of a name; raises `UsageError` if there is none."""
    if name not in TARGETS:
        raise UsageError(f"there is no export target {name!r}", hint=f"use one of {', '.join(TARGETS)}")
    module, _, attribute = TARGETS[name].partition(":")
    target: ExportTarget = getattr(import_module(f"reconv.exporters.formats.{module}"), attribute)
    return target
