"""Checks that training and inference make before they start."""

from __future__ import annotations

import platform

import torch
from torch import nn

from reconv.build.data import Datasets
from reconv.build.model import build_activation_checkpointing, build_meta_model, detector_spec, image_shape
from reconv.core.custom_code import code_errors
from reconv.core.errors import DataError, RecipeError, UsageError
from reconv.core.machine import Machine, available_memory_bytes
from reconv.core.text import count
from reconv.data.dataset import Dataset
from reconv.device import Device, count_devices, device_kind
from reconv.device.affinity import format_allowed_cpus
from reconv.distributed.environment import requested_backend
from reconv.distributed.process_group import ProcessGroup
from reconv.models.activation_checkpoint import (
    activation_bytes_per_image,
)
from reconv.models.architecture import ReconvModel
from reconv.models.external import check_image_sizes
from reconv.models.pipeline_split import check_splits
from reconv.models.ssd import SSD
from reconv.optim.param_groups import decay_groups
from reconv.precision import build_precision
from reconv.recipe.batch_split import num_copies, split_batch
from reconv.recipe.parts.code import names_code
from reconv.recipe.schema import Recipe


def check_num_devices(devices: int, device: str, recipe: Recipe, num_nodes: int = 1) -> None:
    """Refuse more processes than the batch or this machine allow, before any is started."""
    split_batch(recipe, num_copies(recipe, devices * num_nodes))
    check_machine_has(devices, device)


def check_machine_has(devices: int, device: str) -> None:
    """Refuse more processes than this machine has devices or memory for."""
    if ":" in device:
        raise UsageError(f"--device {device} is a single device, and --devices {devices} needs several")
    kind, available = device_kind(device), available_memory_bytes(Machine())
    num_devices = count_devices(kind)
    if num_devices is not None and devices > num_devices and requested_backend() != "gloo":
        raise UsageError(f"--devices {devices}: this machine has {count(num_devices, kind + ' device')}")
    if available is not None and devices * _MIN_PROCESS_BYTES > available:
        raise UsageError(
            f"--devices {devices}: there is not enough memory for so many processes",
            why=f"each needs at least {_MIN_PROCESS_BYTES >> 20} MB, and {available >> 20} MB are available",
            hint=f"use at most --devices {available // _MIN_PROCESS_BYTES}",
        )


def check_same_data(process_group: ProcessGroup, datasets: Datasets | Dataset) -> None:
    """Refuse ranks whose datasets differ."""
    if process_group.world_size == 1:
        return
    found = process_group.all_gather((platform.node(), datasets.fingerprint()))
    others = [(rank, host) for rank, (host, fingerprint) in enumerate(found) if fingerprint != found[0][1]]
    if others:
        listed = ", ".join(f"rank {rank} on {host}" for rank, host in others[:4])
        raise DataError(
            "the ranks do not have the same data",
            where=f"{listed}, unlike rank 0 on {found[0][0]}",
            why="files are missing there, or --data is another folder",
            hint="compare `reconv data check PATH` on both machines",
        )


def describe_ranks(process_group: ProcessGroup, device: str) -> list[str]:
    """The ranks of each machine with their devices and cores; empty for a single process."""
    if process_group.world_size == 1:
        return []
    found = process_group.all_gather((platform.node(), process_group.rank, device, format_allowed_cpus()))
    machines: dict[str, list[str]] = {}
    for host, rank, of_rank, cpus in found:
        machines.setdefault(host, []).append(f"rank {rank} on {of_rank}, cores {cpus}")
    launcher = f", started by {process_group.launch_env.launcher}"
    lines = [f"{process_group.world_size} processes on {count(len(machines), 'machine')}{launcher}"]
    return lines + [f"  {host}: {'; '.join(ranks)}" for host, ranks in machines.items()]


_MIN_PROCESS_BYTES = 256 << 20  # measured: a quickstart process on a CPU


def check_model(recipe: Recipe, num_classes: int) -> None:
    """Refuse a network that cannot be built as the recipe says, without allocating it."""
    if recipe.task == "detection":
        detector_spec(recipe).map_sides(recipe.data.preprocess.size)
    model = build_meta_model(recipe, num_classes)
    if isinstance(model, SSD) and recipe.task != "detection":
        raise RecipeError(
            f"{recipe.model.name} is a detector, and the task is {recipe.task}",
            where="model.name",
            hint="train a preset with task: detection, for example reconv train ssd-resnet34",
        )
    if names_code(recipe.model.name):
        _check_logits(model, recipe, num_classes)
    sizes = {recipe.augment.size or recipe.data.preprocess.size, recipe.data.preprocess.size}
    if not isinstance(model, ReconvModel):
        check_image_sizes(model, recipe.data.preprocess.channels, sizes)
    decay_groups(model, recipe.optimizer.weight_decay_exclude)
    build_activation_checkpointing(model, recipe, torch.float32)
    if recipe.parallel.pipeline_stages > 1:
        check_splits(model, recipe.parallel.pipeline_splits, recipe.parallel.pipeline_stages, image_shape(recipe))


def _check_logits(model: nn.Module, recipe: Recipe, num_classes: int) -> None:
    """Refuse a network of the user that does not return logits [n, num_classes] for images of the recipe's size."""
    name = recipe.model.name
    with torch.no_grad(), code_errors(f"the forward pass of {name}"):
        logits = model.eval()(torch.zeros(2, *image_shape(recipe)))
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, num_classes):
        found = f"a tensor {list(logits.shape)}" if isinstance(logits, torch.Tensor) else f"a {type(logits).__name__}"
        raise UsageError(
            f"{name} returns {found} for images {[2, *image_shape(recipe)]}",
            why=f"in evaluation a model returns logits [images, classes], here [2, {num_classes}]",
            hint="use the argument num_classes for the size of its last layer",
        )


def memory_estimate(recipe: Recipe, num_classes: int, device: Device) -> tuple[int, int] | None:
    """Bytes of the activations of one image, and of the weights; None where the activations are unknown."""
    precision = build_precision(recipe.precision, device.kind)
    model = build_meta_model(recipe, num_classes)
    recomputed = build_activation_checkpointing(model, recipe, precision.compute_dtype)
    plain = activation_bytes_per_image(model, image_shape(recipe), precision.compute_dtype)
    if plain is None:
        return None
    return recomputed.kept_bytes if recomputed is not None else plain, sum(p.nbytes for p in model.parameters())
