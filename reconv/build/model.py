"""The network of a run, built from its recipe on its device: precision, fused kernels, compilation, checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from reconv.core.errors import RecipeError, UsageError, one_of
from reconv.data.transforms.normalize import EvalPreprocess
from reconv.device import CudaGraph, Device
from reconv.distributed.environment import BACKEND_VARIABLE, requested_backend
from reconv.kernels import dispatch as fused
from reconv.models import build_model, build_uninitialized_model, model_spec, supports_zero_gamma
from reconv.models.activation_checkpoint import (
    ActivationCheckpointing,
    checkpointed_forward,
    choose_stages,
    segment_stages,
)
from reconv.models.layers.batch_norm import LayerState
from reconv.models.pipeline_split import check_splits
from reconv.models.resnet import SPECS as BACKBONES
from reconv.models.ssd import SPECS as DETECTORS
from reconv.models.ssd import SSDSpec
from reconv.precision import PrecisionPolicy, build_precision
from reconv.recipe.parts.code import names_code
from reconv.recipe.schema import Recipe

if TYPE_CHECKING:
    from reconv.distributed.process_group import ProcessGroup


@dataclass(frozen=True, slots=True)
class Network:
    """A model on its device with everything that runs it."""

    model: nn.Module
    forward: Callable[..., Any]
    layers: LayerState
    precision: PrecisionPolicy
    channels_last: bool
    recomputed: ActivationCheckpointing | None = None
    has_kernels: bool = False  # some layers launch kernels of ours in training


def build_eval_preprocess(recipe: Recipe, network: Network) -> EvalPreprocess:
    """The preprocessing on the device in evaluation and prediction: normalization."""
    return EvalPreprocess(recipe.data.preprocess, network.precision.input_dtype, network.channels_last)


def build_meta_model(recipe: Recipe, num_classes: int) -> nn.Module:
    """The recipe's network without values, for its names and shapes."""
    with torch.device("meta"):
        return build_recipe_model(recipe, num_classes)


def build_recipe_model(recipe: Recipe, num_classes: int, seed: int = 0, *, initializes: bool = True) -> nn.Module:
    """The recipe's network on the default device, initialized from a seed unless all of its weights are loaded."""
    options = model_options(recipe, num_classes)
    build = build_model if initializes else build_uninitialized_model
    return build(recipe.model.name, seed=seed, image_shape=image_shape(recipe), **options)


def build_activation_checkpointing(
    model: nn.Module, recipe: Recipe, dtype: torch.dtype
) -> ActivationCheckpointing | None:
    """Stages to recompute in the backward pass, or None to keep activations."""
    segments = recipe.memory.checkpoint_segments
    if segments:
        check_splits(model, segments, len(segments) + 1, image_shape(recipe), "memory.checkpoint_segments")
        return segment_stages(model, segments, image_shape(recipe), dtype)
    if recipe.memory.activation_checkpointing == "off":
        return None
    return choose_stages(model, recipe.memory.activation_checkpointing, image_shape(recipe), dtype)


def image_shape(recipe: Recipe) -> tuple[int, int, int]:
    """Channels, height and width of the first training images."""
    side = recipe.augment.size or recipe.data.preprocess.size
    return recipe.data.preprocess.channels, side, side


def model_options(recipe: Recipe, num_classes: int) -> dict[str, Any]:
    """The keyword arguments of the recipe's network."""
    options = dict(recipe.model.options)
    if "num_classes" in options:
        raise RecipeError("model.options.num_classes cannot be set: it follows from the data", hint="leave it out")
    if recipe.data.preprocess.channels != 3:
        options.setdefault("in_channels", recipe.data.preprocess.channels)
    if recipe.model.zero_init_last and supports_zero_gamma(recipe.model.name, options):
        options.setdefault("zero_gamma", "always")
    if recipe.task == "detection":  # the background is a class of the network, not of the data
        return {**options, **detector_options(recipe), "num_classes": num_classes + 1}
    return {**options, "num_classes": num_classes}


def uses_compile(recipe: Recipe, device: Device) -> bool:
    """True if networks and losses go through torch.compile; `auto` means on CUDA, and on Gaudi in eager mode."""
    memory = recipe.memory
    if memory.activation_checkpointing != "off" or memory.checkpoint_segments or recipe.parallel.pipeline_stages > 1:
        return False
    if recipe.engine.compile == "on" and device.compile_backend is None:
        raise UsageError(
            f"engine.compile: torch.compile is not available on {device.describe()}",
            why="lazy mode builds its own graphs",
            hint="set engine.compile to auto, or PT_HPU_LAZY_MODE=0 in the environment",
        )
    by_default = device.kind == "cuda" or device.compile_backend == "hpu_backend"
    return recipe.engine.compile == "on" or (recipe.engine.compile == "auto" and by_default)


def compile_for(function: Callable[..., Any], device: Device) -> Callable[..., Any]:
    """The function, compiled with the device's backend for static shapes."""
    assert device.compile_backend is not None
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False, backend=device.compile_backend)
    return compiled


def uses_fused_kernels(recipe: Recipe, device: Device) -> bool:
    """True if fused kernels replace the layers they support, in training."""
    engine = recipe.engine
    wanted = engine.fused_kernels == "on" or (engine.fused_kernels == "auto" and engine.compile == "auto")
    return wanted and _supports_kernels(recipe, device)


def uses_max_pool_kernels(recipe: Recipe, device: Device) -> bool:
    """True if kernels replace the max-pools of networks for which that was measured, and nothing else, in training."""
    engine = recipe.engine
    return engine.fused_kernels == "auto" and engine.compile == "off" and _supports_kernels(recipe, device)


def _supports_kernels(recipe: Recipe, device: Device) -> bool:
    supported = device.kind == "cuda" and recipe.parallel.pipeline_stages == 1 and recipe.precision.follows_autocast
    return supported and fused.has_triton()


def compiles_network(recipe: Recipe, num_classes: int, device: Device) -> bool:
    """True if the network goes through torch.compile, which it does not with fused kernels."""
    if not (uses_compile(recipe, device) and uses_fused_kernels(recipe, device)):
        return uses_compile(recipe, device)
    with torch.device("meta"):
        return _fuse(build_recipe_model(recipe, num_classes)) == 0


def _fuse(model: nn.Module) -> int:
    from reconv.kernels.fuse import fuse  # inference needs none of it

    return fuse(model)


def build_network(recipe: Recipe, num_classes: int, device: Device, *, initializes: bool = True) -> Network:
    """The recipe's model on the device, initialized from its seed unless all of its weights are loaded afterwards."""
    model = build_recipe_model(recipe, num_classes, seed=recipe.seed, initializes=initializes)
    precision = build_precision(recipe.precision, device.kind)
    wish = recipe.engine.channels_last
    channels_last = device.channels_last if wish == "auto" else wish == "on"
    model = precision.cast_model(model).to(device.torch)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    has_kernels = uses_fused_kernels(recipe, device) and _fuse(model) > 0
    if recipe.engine.fused_kernels == "on" and not has_kernels:
        raise UsageError(
            f"engine.fused_kernels: no layer of {recipe.model.name} has a fused kernel on {device.kind}",
            hint="set engine.fused_kernels to auto",
        )
    if uses_max_pool_kernels(recipe, device):
        from reconv.kernels.fuse import fuse_max_pools

        has_kernels = fuse_max_pools(model) > 0
    recomputed = build_activation_checkpointing(model, recipe, precision.compute_dtype)
    forward: Callable[..., Any] = model
    if recomputed is not None:
        forward = checkpointed_forward(model, recomputed.segments, precision.autocast)
    elif uses_compile(recipe, device) and not has_kernels:
        forward = compile_for(model, device)
    return Network(model, forward, LayerState(model, recipe.seed), precision, channels_last, recomputed, has_kernels)


def build_graph_capture(recipe: Recipe, device: Device, process_group: ProcessGroup) -> CudaGraph | None:
    """The capturer of whole steps, or None to launch eagerly.

    With several ranks only where the recipe insists: NCCL must be able to capture the collectives.
    """
    mode, engine = recipe.engine.cuda_graphs, recipe.engine
    if mode == "off" or (mode == "auto" and (engine.compile == "off" or process_group.is_distributed)):
        return None
    memory = recipe.memory
    recomputes = memory.activation_checkpointing != "off" or bool(memory.checkpoint_segments)
    if mode == "auto" and (recomputes or memory.offload_optimizer):
        return None  # these have never been captured on a GPU
    names = (recipe.model.name, recipe.loss.name)
    if mode == "auto" and (any(map(names_code, names)) or recipe.augment.device_extra):
        return None  # the user's own code may not be capturable
    capture = device.graph_capture()
    if capture is not None and process_group.is_distributed and requested_backend() == "gloo":
        raise UsageError(
            "engine.cuda_graphs: on needs NCCL",
            why=f"{BACKEND_VARIABLE}=gloo: gloo reduces on the host, which a graph cannot contain",
            hint="--set engine.cuda_graphs=auto",
        )
    return capture


def detector_options(recipe: Recipe) -> dict[str, Any]:
    """The options of the recipe's network that follow from its anchors."""
    if "boxes_per_cell" in recipe.model.options:
        raise RecipeError(
            "model.options.boxes_per_cell cannot be set: it follows from detection.anchors.aspect_ratios",
            hint="leave it out",
        )
    return {"boxes_per_cell": list(recipe.detection.anchors.per_cell)}


def detector_spec(recipe: Recipe) -> SSDSpec:
    """The architecture of the recipe's detector."""
    options = {**recipe.model.options, **detector_options(recipe)}
    own = [recipe.model.name] if recipe.model.name in BACKBONES else []
    spec = model_spec(recipe.model.name, **options) if recipe.model.name in DETECTORS else None
    if not isinstance(spec, SSDSpec):
        raise RecipeError(
            f"{recipe.model.name} is not a detector, and the task is detection",
            where="model.name",
            hint=one_of(
                *(f"--model {name}" for name in DETECTORS),
                *(f"--model {name} --set model.options.backbone={backbone}" for name in DETECTORS for backbone in own),
            ),
        )
    return spec
