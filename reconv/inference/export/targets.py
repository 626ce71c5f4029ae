"""The formats that a model can be exported to."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from reconv.errors import UsageError
from reconv.inference.export import onnx_file
from reconv.inference.export.export_detector import NMSOperation
from reconv.inference.export.export_metadata import ExportMetadata


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The options of `reconv export` that single targets read."""

    opset: int | None = None
    int8: bool = False
    nms: bool = True


WriteModel = Callable[[nn.Module, Tensor, ExportMetadata, ExportOptions, Path], None]


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """One format."""

    name: str
    model_file: str
    runtime: str  # run_template/with_RUNTIME.py
    write: WriteModel  # (module, example images, metadata, options, folder)
    packages: tuple[str, ...]  # what writing and running it import
    extra: str  # of Reconv, which installs them
    needs: str  # what run.py needs besides numpy and Pillow
    contents: str  # what is in the file, for the model card
    nms: NMSOperation = "torch"  # of detectors
    options: tuple[str, ...] = ()  # of `reconv export`, which not every target has
    hidden_packages: tuple[str, ...] = ("reconv",)  # what run.py must do without when it is checked

    def check_packages(self) -> None:
        """Raise `UsageError` if a package is missing."""
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if missing:
            raise UsageError(
                f"export --to {self.name} needs {', '.join(missing)}",
                why="the package is not installed",
                then=f"pip install 'reconv[{self.extra}]'",
            )


_IN_FILE = "the network and the normalization; it takes uint8 images"

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
            options=("--opset", "--no-nms"),
            hidden_packages=("reconv", "torch"),
        ),
    )
}


def find_target(name: str) -> ExportTarget:
    """The target of a name; raises `UsageError` if there is none."""
    if name not in TARGETS:
        raise UsageError(f"there is no export target {name!r}", then=f"use one of {', '.join(TARGETS)}")
    return TARGETS[name]
