"""The network of a run: built from its recipe, on its device, with everything that runs it.

Owns what computes it (kernels, a compiler, recorded steps). Refuses to know training and data. Invariant: a network
that can be refused is refused before anything is written for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from reconv.data.dataset import Dataset
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.readers.factory import subsample
from reconv.data.transforms.device_transforms import EvalPreprocess, TrainPreprocess
from reconv.device import CudaGraph, Device
from reconv.distributed.process_group import ProcessGroup
from reconv.errors import RecipeError, UsageError
from reconv.kernels import dispatch as fused
from reconv.kernels.fuse import fuse
from reconv.kernels.jit import compile_process as compiler
from reconv.kernels.jit.launch import trace_launches
from reconv.kernels.trace_kernels import trace_kernels
from reconv.models import build_model
from reconv.models.activation_checkpoint import (
    ActivationCheckpointing,
    activation_bytes_per_image,
    checkpointed_forward,
    choose_stages,
    segment_stages,
)
from reconv.models.fastnet import FastNet
from reconv.models.layers.batch_norm import LayerState
from reconv.models.pipeline_split import check_splits
from reconv.models.ssd import SSD
from reconv.optim.param_groups import decay_groups
from reconv.precision import PrecisionPolicy, build_precision
from reconv.recipe.schema import Recipe
from reconv.trainer.build.task_builder import (
    check_detector,
    detector_options,
)

NUM_WHITENED = 2000


@dataclass(frozen=True, slots=True)
class Network:
    """A model on its device with everything that runs it."""

    model: nn.Module
    forward: Callable[..., Any]
    layers: LayerState
    precision: PrecisionPolicy
    channels_last: bool
    recomputed: ActivationCheckpointing | None = None


def check_model(recipe: Recipe, num_classes: int) -> None:
    """Refuse a network that cannot be built or decayed as told, before anything is written for it."""
    if recipe.task == "detection":
        check_detector(recipe)
    with torch.device("meta"):
        model = build_model(recipe.model.name, **model_options(recipe, num_classes))
    if isinstance(model, SSD) and recipe.task != "detection":
        raise RecipeError(f"{recipe.model.name} finds boxes, and the task is {recipe.task}", where="model.name")
    decay_groups(model, recipe.optimizer.weight_decay_exclude)
    build_recomputed(model, recipe, torch.float32)
    if recipe.parallel.pipeline_stages > 1:
        check_splits(model, recipe.parallel.pipeline_splits, recipe.parallel.pipeline_stages, _image_shape(recipe))


def build_recomputed(model: nn.Module, recipe: Recipe, dtype: torch.dtype) -> ActivationCheckpointing | None:
    """Which stages of the network are computed again in the backward pass; None: nothing is."""
    segments = recipe.memory.checkpoint_segments
    if segments:
        check_splits(model, segments, len(segments) + 1, _image_shape(recipe), "memory.checkpoint_segments")
        return segment_stages(model, segments, _image_shape(recipe), dtype)
    if recipe.memory.activation_checkpointing == "off":
        return None
    return choose_stages(model, recipe.memory.activation_checkpointing, _image_shape(recipe), dtype)


def kept_bytes(recipe: Recipe, num_classes: int, device: Device) -> tuple[int, int] | None:
    """What one image keeps for the gradients, and what the weights take; None where that is not known."""
    precision = build_precision(recipe.precision, device.kind)
    with torch.device("meta"):
        model = build_model(recipe.model.name, **model_options(recipe, num_classes))
    recomputed = build_recomputed(model, recipe, precision.compute_dtype)
    plain = activation_bytes_per_image(model, _image_shape(recipe), precision.compute_dtype)
    if plain is None:
        return None
    return recomputed.kept_bytes if recomputed is not None else plain, sum(p.nbytes for p in model.parameters())


def _image_shape(recipe: Recipe) -> tuple[int, int, int]:
    """Channels, height and width of the first training images."""
    side = recipe.augment.size or recipe.data.preprocess.size
    return recipe.data.preprocess.channels, side, side


def model_options(recipe: Recipe, num_classes: int) -> dict[str, Any]:
    """The keyword arguments of the recipe's network."""
    options = dict(recipe.model.options)
    if "num_classes" in options:
        raise RecipeError("model.options.num_classes: the number of classes follows from the data", then="leave it out")
    if recipe.data.preprocess.channels != 3:
        options.setdefault("in_channels", recipe.data.preprocess.channels)
    if recipe.task == "detection":  # the background is a class of the network, not of the data
        return {**options, **detector_options(recipe), "num_classes": num_classes + 1}
    return {**options, "num_classes": num_classes}


def is_compiled(recipe: Recipe, device: Device) -> bool:
    """Whether networks and losses are compiled: where the recipe says so, else on cuda and by Gaudi's compiler."""
    memory = recipe.memory
    if memory.activation_checkpointing != "off" or memory.checkpoint_segments or recipe.parallel.pipeline_stages > 1:
        return False
    if recipe.engine.compile == "on" and device.compile_backend is None:
        raise UsageError(
            f"engine.compile: nothing is compiled on {device.describe()}",
            why="lazy mode gathers whole graphs by itself",
            then="leave it at auto, or set PT_HPU_LAZY_MODE=0 in the environment",
        )
    is_usual = device.kind == "cuda" or device.compile_backend == "hpu_backend"
    return recipe.engine.compile == "on" or (recipe.engine.compile == "auto" and is_usual)


def compiled(function: Callable[..., Any], device: Device) -> Callable[..., Any]:
    """The function, compiled by what the device has."""
    assert device.compile_backend is not None
    found: Callable[..., Any] = torch.compile(function, dynamic=False, backend=device.compile_backend)
    return found


def wants_kernels(recipe: Recipe, device: Device) -> bool:
    """Whether kernels may compute what they can of a network in training."""
    engine = recipe.engine
    is_wanted = engine.fused_kernels == "on" or (engine.fused_kernels == "auto" and engine.compile == "auto")
    can = device.kind == "cuda" and recipe.parallel.pipeline_stages == 1 and recipe.precision.follows_autocast
    return is_wanted and can and fused.has_triton()


def is_network_compiled(recipe: Recipe, num_classes: int, device: Device) -> bool:
    """Whether the network itself is compiled, which it is not where kernels compute its layers."""
    if not (is_compiled(recipe, device) and wants_kernels(recipe, device)):
        return is_compiled(recipe, device)
    with torch.device("meta"):
        return fuse(build_model(recipe.model.name, **model_options(recipe, num_classes))) == 0


def build_network(recipe: Recipe, num_classes: int, device: Device) -> Network:
    """The recipe's model, initialised from its seed, on the device."""
    model = build_model(recipe.model.name, seed=recipe.seed, **model_options(recipe, num_classes))
    precision = build_precision(recipe.precision, device.kind)
    wish = recipe.engine.channels_last
    channels_last = device.channels_last if wish == "auto" else wish == "on"
    model = precision.cast_model(model).to(device.torch)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    has_kernels = wants_kernels(recipe, device) and fuse(model) > 0
    if recipe.engine.fused_kernels == "on" and not has_kernels:
        raise UsageError(
            f"engine.fused_kernels: nothing of {recipe.model.name} is computed by kernels on {device.kind}",
            then="leave it at auto",
        )
    recomputed = build_recomputed(model, recipe, precision.compute_dtype)
    forward: Callable[..., Any] = model
    if recomputed is not None:
        forward = checkpointed_forward(model, recomputed.segments, precision.autocast)
    elif is_compiled(recipe, device) and not has_kernels:
        forward = compiled(model, device)
    return Network(model, forward, LayerState(model, recipe.seed), precision, channels_last, recomputed)


def train_prepare(network: Network, recipe: Recipe, num_classes: int, device: Device) -> TrainPreprocess:
    """What makes a batch into what the network takes in training."""
    return TrainPreprocess(
        recipe.data.preprocess,
        recipe.augment,
        num_classes,
        network.precision.input_dtype,
        network.channels_last,
        wants_kernels(recipe, device),
    )


def compile_ahead(
    network: Network, prepare: TrainPreprocess, recipe: Recipe, device: Device, side: int, tell: Callable[[str], None]
) -> None:
    """Begin to compile the kernels of a training step on images of this side, beside the rest of the start."""
    if not (wants_kernels(recipe, device) and network.channels_last):
        compiler.stop_compiler()
        return
    from reconv.kernels.jit import compile_ahead as warm

    image = (recipe.data.preprocess.channels, side, side)
    policy = network.precision
    try:
        with trace_launches() as noted:
            prepare.trace_kernels(image, getattr(torch, recipe.data.transfer_dtype))
        variants = trace_kernels(network.model, image, policy.input_dtype, policy.autocast())
        warm.compile_ahead([*noted, *variants], device.torch, tell)
    except Exception as failure:  # any: this is a matter of speed alone
        tell(f"kernels are compiled one after another, as the first step needs them: {failure!r}")


def build_recorder(recipe: Recipe, device: Device, process_group: ProcessGroup) -> CudaGraph | None:
    """What records whole steps, where the device can and the recipe lets it; None: each operation is launched.

    With several processes a step is launched only where the recipe insists: the collectives then must be recordable.
    """
    wish, engine = recipe.engine.cuda_graphs, recipe.engine
    if wish == "off" or (wish == "auto" and (engine.compile == "off" or process_group.world_size > 1)):
        return None
    memory = recipe.memory
    recomputes = memory.activation_checkpointing != "off" or bool(memory.checkpoint_segments)
    if wish == "auto" and (recomputes or memory.offload_optimizer):
        return None  # none of them was ever recorded on a GPU
    return device.graph_capture()


def whiten(network: Network, recipe: Recipe, source: Dataset) -> str:
    """Give a network that begins with a whitening layer its filters; what a person should know of that."""
    if not isinstance(network.model, FastNet):
        return ""
    some = subsample(source, min(100.0, 100 * NUM_WHITENED / len(source)))
    bad_samples = BadSamples(recipe.data.bad_images.limit)  # training logs them when it meets them
    context = DataContext.on_host()
    [batch] = EvalLoader(some, recipe.data.preprocess, len(some), context, bad_samples=bad_samples)
    network.model.whiten(EvalPreprocess(recipe.data.preprocess, torch.float32)(batch)["images"])
    return f"the first layer whitens patches of {len(some):,} training images, and is not trained"
