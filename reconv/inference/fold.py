"""Batch norms folded into the convolutions before them, for networks that only answer.

Owns which norms can be folded and the arithmetic. Refuses to know why a network is no longer trained. Invariant: the
folded copy gives the outputs of the original at evaluation; a norm whose convolution feeds anything else stays.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reconv.models.external import BatchNormAct2d


def fold_batch_norms(model: nn.Module, shape: Sequence[int]) -> tuple[nn.Module, int]:
    """A copy for evaluation with its norms folded where that is exact, and how many were; `shape` is one image's."""
    model = copy.deepcopy(model).eval().requires_grad_(False)
    pairs = _pairs(model, shape)
    for conv_name, norm_name in pairs:
        conv, norm = model.get_submodule(conv_name), model.get_submodule(norm_name)
        assert isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
        _fold(conv, norm)
        parent, _, child = norm_name.rpartition(".")
        setattr(model.get_submodule(parent), child, norm.after if isinstance(norm, BatchNormAct2d) else nn.Identity())
    return model, len(pairs)


def _fold(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> None:
    """Give the convolution the weights of both, computed in fp64."""
    assert norm.running_mean is not None and norm.running_var is not None
    dtype = conv.weight.dtype
    scale = norm.weight.double() * (norm.running_var.double() + norm.eps).rsqrt()
    bias = torch.zeros_like(norm.running_mean) if conv.bias is None else conv.bias
    shift = norm.bias.double() + (bias.double() - norm.running_mean.double()) * scale
    weight = (conv.weight.double() * scale.view(-1, 1, 1, 1)).to(dtype)
    conv.weight.copy_(weight)  # in the strides it has
    conv.bias = nn.Parameter(shift.to(dtype), requires_grad=False)


def _pairs(model: nn.Module, shape: Sequence[int]) -> list[tuple[str, str]]:
    """Names of each convolution and the norm that alone reads its output, seen in a pass without values."""
    watched = copy.deepcopy(model).to("meta")
    outputs: dict[int, str] = {}
    kept: list[Tensor] = []  # an id means its tensor only while that lives
    calls: Counter[str] = Counter()
    found: list[tuple[str, str, int]] = []

    def after_conv(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            outputs[id(output)] = name
            kept.append(output)
            calls[name] += 1

        return hook

    def before_norm(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            calls[name] += 1
            if id(args[0]) in outputs:
                found.append((outputs[id(args[0])], name, id(args[0])))

        return hook

    for name, module in watched.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(after_conv(name))
        elif isinstance(module, nn.BatchNorm2d):
            module.register_forward_pre_hook(before_norm(name))
    with torch.no_grad(), _Uses() as uses:
        watched(torch.empty(2, *shape, device="meta", dtype=next(watched.parameters()).dtype))
    return [(c, n) for c, n, number in found if uses.count[number] == 1 and calls[c] == calls[n] == 1]


class _Uses(TorchDispatchMode):
    """Counts how often each tensor is read by an operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: Counter[int] = Counter()
        self._kept: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        self._kept.extend(tensors)
        self.count.update({id(tensor) for tensor in tensors})
        return func(*args, **(kwargs or {}))
