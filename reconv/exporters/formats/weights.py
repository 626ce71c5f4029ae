"""Writes the weights alone, for a network that the other program builds: safetensors, or a torchvision checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from reconv.build.package_networks import PackageNetwork, find_package_network, timm_names
from reconv.checkpoint.safetensors_bytes import encode
from reconv.checkpoint.weights_metadata import KEY, WeightsMetadata, to_header
from reconv.core.errors import UsageError
from reconv.exporters.folder import write_json
from reconv.exporters.metadata import ExportMetadata
from reconv.exporters.targets import ExportOptions, ExportTarget
from reconv.inference.backends.exported import ExportClassifier
from reconv.inference.predictor import Predictor
from reconv.models.external import import_package
from reconv.recipe.parts.code import names_code
from reconv.storage.files import write_atomic

SAFETENSORS_FILE = "model.safetensors"
PTH_FILE = "model.pth"
TIMM_NAMES = "timm_names.json"
_CONTENTS = "only the weights; run.py builds the model and normalizes the uint8 images"


def adapt_safetensors(
    target: ExportTarget, predictor: Predictor, metadata: ExportMetadata
) -> tuple[ExportTarget, ExportMetadata]:
    """The package that the file is checked with: timm, else torchvision, else Reconv itself."""
    if predictor.is_detector:
        raise UsageError(
            "a detector's weights are of no use elsewhere: neither timm nor torchvision has this model",
            why=f"{predictor.path} already holds them as safetensors",
            hint="export the whole model: --to onnx, or --to torch-export",
        )
    if names_code(predictor.recipe.model.name):
        raise UsageError(
            f"{predictor.recipe.model.name} is code of yours, which a weights file does not contain",
            why=f"{predictor.path} already holds the weights as safetensors",
            hint="export the whole model: --to onnx, or --to torch-export",
        )
    header = to_header(
        WeightsMetadata(
            recipe=predictor.recipe,
            class_names=predictor.class_names if predictor.has_class_names else (),
            class_ids=predictor.class_ids,
            weights=predictor.weights,
            step=predictor.step,
            version=metadata.settings("")["versions"]["reconv"],
            confidence=predictor.confidence,
        )
    )
    found = [
        find_package_network(predictor.recipe, len(predictor.class_names), name) for name in ("timm", "torchvision")
    ]
    networks = [network for network in found if network is not None]
    names = timm_names(predictor.recipe.model.name, predictor.module.state_dict()) if found[0] is not None else None
    installed = [network for network in networks if _can_import(network.package)]
    chosen = (installed or [PackageNetwork("reconv", predictor.recipe.model.name)])[0]
    extra = {
        "network_of": chosen.to_dict(),
        "names": TIMM_NAMES if chosen.package == "timm" else None,
        "loads_in": ["reconv", *(network.package for network in networks)],
    }
    target = replace(
        target,
        needs=f"torch safetensors {chosen.package}",
        hidden_packages=() if chosen.package == "reconv" else ("reconv",),
    )
    return target, replace(metadata, extra=extra, header=header, timm_names=names)


def adapt_torchvision(
    target: ExportTarget, predictor: Predictor, metadata: ExportMetadata
) -> tuple[ExportTarget, ExportMetadata]:
    """Refuse a network that torchvision does not have."""
    network = find_package_network(predictor.recipe, len(predictor.class_names), "torchvision")
    if network is None:
        name, options = predictor.recipe.model.name, dict(predictor.recipe.model.options)
        raise UsageError(
            f"torchvision has no model like {name}" + (f" with {options}" if options else ""),
            why="a weights file is of use only with the model that it belongs to",
            hint="export the whole model: --to onnx, or --to torch-export",
        )
    if not _can_import("torchvision"):  # the tensors have torchvision's names in Reconv, too
        options = {**predictor.recipe.model.options, "num_classes": len(predictor.class_names)}
        network = PackageNetwork("reconv", predictor.recipe.model.name, options)
        target = replace(target, needs="torch reconv", hidden_packages=())
    return target, replace(metadata, extra={"network_of": network.to_dict(), "names": None})


def write_safetensors(
    module: nn.Module, example: Tensor, metadata: ExportMetadata, options: ExportOptions, folder: Path
) -> None:
    """Write `model.safetensors` with our header, which `reconv eval` reads, and the metadata of every export."""
    header = {**metadata.properties(SAFETENSORS_FILE), **metadata.header}
    if KEY not in header:
        raise UsageError("the classes and the recipe do not fit into the header of a safetensors file")
    write_atomic(folder / SAFETENSORS_FILE, encode(_tensors(module), header))
    if metadata.timm_names is not None:
        write_json(folder / TIMM_NAMES, metadata.timm_names)


def write_torchvision_pth(
    module: nn.Module, example: Tensor, metadata: ExportMetadata, options: ExportOptions, folder: Path
) -> None:
    """Write `model.pth`, a state dict that torchvision's network loads strictly; read it with weights_only=True."""
    torch.save(_tensors(module), folder / PTH_FILE)


def _can_import(package: str) -> bool:
    """True if a package is installed in a build that fits torch."""
    try:
        import_package(package)
    except UsageError:
        return False
    return True


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    assert isinstance(module, ExportClassifier)
    return {name: tensor.detach().contiguous() for name, tensor in module.model.state_dict().items()}


SAFETENSORS = ExportTarget(
    name="safetensors",
    model_file=SAFETENSORS_FILE,
    runtime="weights",
    write=write_safetensors,
    needs="torch safetensors",
    contents=_CONTENTS,
    adapt=adapt_safetensors,
)
TORCHVISION_PTH = ExportTarget(
    name="torchvision-pth",
    model_file=PTH_FILE,
    runtime="weights",
    write=write_torchvision_pth,
    needs="torch torchvision",
    contents=_CONTENTS,
    adapt=adapt_torchvision,
)
