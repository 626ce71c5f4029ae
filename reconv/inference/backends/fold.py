"""The folded network: batch norms in the convolutions before them, and the backend that runs it.

The folded copy computes the same outputs as the original in eval mode. A norm is kept if its convolution has other
consumers. On the CPU the network runs in channels_last, with oneDNN's fused convolutions on weights packed once.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from reconv.data.transforms.normalize import EvalPreprocess
from reconv.inference.backends.base import InferenceBackend
from reconv.inference.backends.compiler import compile_inference
from reconv.inference.backends.onednn import use_onednn
from reconv.inference.backends.trace_graph import DispatchMode
from reconv.models.layers.batch_norm import BatchNormAct2d
from reconv.recipe.schema import Recipe
from reconv.tasks.evaluation import average_views


def fold_batch_norms(model: nn.Module, shape: Sequence[int]) -> tuple[nn.Module, int]:
    """A copy of the model in eval mode with its batch norms folded, and their number; `shape` is that of one image."""
    model = copy.deepcopy(model).eval().requires_grad_(False)
    pairs = _find_pairs(model, shape)
    for conv_name, norm_name in pairs:
        conv, norm = model.get_submodule(conv_name), model.get_submodule(norm_name)
        assert isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
        _fold(conv, norm)
        parent, _, child = norm_name.rpartition(".")
        left = nn.Sequential(norm.drop, norm.act) if isinstance(norm, BatchNormAct2d) else nn.Identity()
        setattr(model.get_submodule(parent), child, left)
    return model, len(pairs)


def _fold(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> None:
    """Fold the norm into the convolution's weight and bias, computed in float64."""
    assert norm.running_mean is not None and norm.running_var is not None
    dtype = conv.weight.dtype
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    scale = scale if norm.weight is None else norm.weight.double() * scale
    bias = torch.zeros_like(norm.running_mean) if conv.bias is None else conv.bias
    shift = (bias.double() - norm.running_mean.double()) * scale
    shift = shift if norm.bias is None else norm.bias.double() + shift
    conv.weight.copy_(conv.weight.double().mul_(scale.view(-1, 1, 1, 1)))  # keeps its strides
    conv.bias = nn.Parameter(shift.to(dtype), requires_grad=False)


def _find_pairs(model: nn.Module, shape: Sequence[int]) -> list[tuple[str, str]]:
    """Names of each convolution and the norm that is its only consumer, from a forward pass on one image."""
    outputs: dict[int, str] = {}
    alive: list[Tensor] = []  # an id is unique only while its tensor lives
    calls: Counter[str] = Counter()
    found: list[tuple[str, str, int]] = []

    def after_conv(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            outputs[id(output)] = name
            alive.append(output)
            calls[name] += 1

        return hook

    def before_norm(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            calls[name] += 1
            if id(args[0]) in outputs:
                found.append((outputs[id(args[0])], name, id(args[0])))

        return hook

    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            hooks.append(module.register_forward_hook(after_conv(name)))
        elif isinstance(module, nn.BatchNorm2d):
            hooks.append(module.register_forward_pre_hook(before_norm(name)))
    first = next(model.parameters())
    with torch.no_grad(), _CountReads() as uses:
        images = torch.zeros(1, *shape, device=first.device, dtype=first.dtype)
        model(images.contiguous(memory_format=torch.channels_last))
    for hook in hooks:
        hook.remove()
    return [(c, n) for c, n, number in found if uses.count[number] == 1 and calls[c] == calls[n] == 1]


class _CountReads(DispatchMode):
    """Counts how often each tensor is read by an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[int] = Counter()
        self._alive: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        self._alive.extend(tensors)
        self.count.update({id(tensor) for tensor in tensors})
        return self.run(func, args, kwargs or {})


class FoldedBackend(InferenceBackend):
    """Each convolution computes its bias, sum and activation in one pass."""

    name = "folded"

    def __init__(self, recipe: Recipe, folded: FoldedNetwork, precision: str) -> None:
        self.precision = precision
        preprocess = recipe.data.preprocess
        self._preprocess = EvalPreprocess(preprocess, folded.dtype, channels_last=True)
        model = folded.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        example = torch.zeros(1, preprocess.channels, preprocess.size, preprocess.size, dtype=folded.dtype)
        network, _ = compile_inference(model, example.contiguous(memory_format=torch.channels_last))
        use_onednn(network)
        self._forward = average_views(network, recipe.evaluate.tta)

    def __call__(self, images: Tensor) -> Any:
        with torch.no_grad():
            return self._forward(self._preprocess.prepare(images))


@dataclass(frozen=True, slots=True)
class FoldedNetwork:
    """A copy of a network with folded norms."""

    model: nn.Module
    exact: Callable[[Tensor], Any]  # the same in at least float32, for images of any dtype
    num_folded: int
    dtype: torch.dtype


def fold_network(model: nn.Module, shape: Sequence[int], dtype: torch.dtype) -> FoldedNetwork:
    """The network with folded norms in `dtype`; `shape` is that of one image."""
    folded, num_folded = fold_batch_norms(model, shape)
    wide = torch.promote_types(dtype, torch.float32)
    exact = folded if dtype == wide else copy.deepcopy(folded).to(wide)
    return FoldedNetwork(folded.to(dtype), lambda images: exact(images.to(wide)), num_folded, dtype)
