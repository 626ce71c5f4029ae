"""The weights of a network in a lower type, all cast at once for each pass.

Owns the joint cast and its gradient: on a GPU two launches for what autocast does with one for each weight, which took
a fiftieth of an EfficientNet's step on an H200. Refuses to know networks beyond their convolutions and linear layers.
Invariant: values and gradients are bitwise those of autocast's own casts; a frozen or unused weight gets no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

_TAKERS = (F.conv2d, F.linear, torch.cat)  # products, and what makes one weight of several


def weights_of_products(model: nn.Module) -> list[nn.Parameter]:
    """The float32 weights and biases that go into convolutions and linear layers as they are."""
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    found = {p: None for layer in layers for p in layer.parameters(recurse=False) if p.dtype == torch.float32}
    return list(found)


class JointWeightCast(TorchFunctionMode):
    """Gives products their weights in the lower type; the first that asks for one has all of them cast."""

    def __init__(self, weights: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        super().__init__()
        self._weights = {id(weight): weight for weight in weights}
        self._dtype = dtype
        self._lower: dict[bool, dict[int, Tensor]] = {}  # by whether gradients are wanted

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Kernels of ours are not known to autocast, and their callers cast the weights.
        if func in _TAKERS or (func is Tensor.to and len(args) == 2 and args[1] is self._dtype):
            args = tuple(self._found(value) for value in args)
        return func(*args, **(kwargs or {}))

    def _found(self, value: Any) -> Any:
        """What stands for a weight in this pass; anything else as it is."""
        if isinstance(value, list | tuple):
            return [self._found(item) for item in value]
        if id(value) not in self._weights:
            return value
        wanted = torch.is_grad_enabled()
        if wanted not in self._lower:
            weights = {key: w for key, w in self._weights.items() if w.requires_grad or not wanted}
            cast: tuple[Tensor, ...] = _CastAll.apply(self._dtype, *weights.values())  # type: ignore[no-untyped-call]
            self._lower[wanted] = dict(zip(weights, cast, strict=True))
        return self._lower[wanted].get(id(value), value)


class _CastAll(Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return _cast(weights, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wide = iter(_cast([grad for grad in grads if grad is not None], torch.float32))
        return None, *(None if grad is None else next(wide) for grad in grads)


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    cast = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if cast:
        torch._foreach_copy_(cast, list(tensors))
    return tuple(cast)
