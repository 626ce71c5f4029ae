"""Writes a model as an AOTInductor package: compiled for this kind of CPU, loaded by torch from Python or C++."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from reconv.exporters.formats.torch_export import MODEL_FILE, NEEDS_TORCH
from reconv.exporters.metadata import ExportMetadata
from reconv.exporters.targets import IN_FILE, ExportOptions, ExportTarget
from reconv.inference.backends.exported import quiet_exporter, trace


def write_aoti(
    module: nn.Module, example: Tensor, metadata: ExportMetadata, options: ExportOptions, folder: Path
) -> None:
    """Compile the module to `model.pt2`, with the metadata in the package's own."""
    program = trace(module, example, is_dynamic=metadata.batch is None)
    with quiet_exporter():
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str((folder / MODEL_FILE).absolute()),
            inductor_configs={"aot_inductor.metadata": metadata.properties(MODEL_FILE)},
        )


TARGET = ExportTarget(
    name="aoti",
    model_file=MODEL_FILE,
    runtime="aoti",
    write=write_aoti,
    needs=NEEDS_TORCH,
    contents=f"{IN_FILE}, compiled by AOTInductor for the kind of CPU it was exported on",
    options=("--no-nms",),
)
