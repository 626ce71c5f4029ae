"""The type of single operations: inputs are cast on the way into the functions a list names.

Owns the table of names and the mode that casts. Refuses to know networks: it sees calls of torch's functions, whoever
makes them, eager or traced by the compiler. Invariant: a batch norm's statistics and parameters are float32 in every
mode; an operation that no list names runs as it would without this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from reconv.recipe import schema

Function = Callable[..., Any]

# Under the names a recipe may list. Operators reach a mode as methods: x + y as Tensor.add.
OPERATIONS: dict[str, tuple[Function, ...]] = {
    "conv2d": (F.conv2d,),
    "linear": (F.linear,),
    "matmul": (torch.matmul, Tensor.matmul),
    "mm": (torch.mm, Tensor.mm),
    "bmm": (torch.bmm, Tensor.bmm),
    "addmm": (torch.addmm, Tensor.addmm),
    "mv": (torch.mv, Tensor.mv),
    "dot": (torch.dot, Tensor.dot),
    "t": (torch.t, Tensor.t),
    "batch_norm": (F.batch_norm,),
    "group_norm": (F.group_norm,),
    "layer_norm": (F.layer_norm,),
    "max_pool2d": (F.max_pool2d, torch.max_pool2d),
    "avg_pool2d": (F.avg_pool2d,),
    "adaptive_avg_pool2d": (F.adaptive_avg_pool2d,),
    "mean": (torch.mean, Tensor.mean),
    "relu": (F.relu, torch.relu, Tensor.relu),
    "relu6": (F.relu6,),
    "silu": (F.silu,),
    "gelu": (F.gelu,),
    "sigmoid": (torch.sigmoid, Tensor.sigmoid),
    "add": (torch.add, Tensor.add),
    "mul": (torch.mul, Tensor.mul),
    "cat": (torch.cat,),
    "softmax": (F.softmax, torch.softmax, Tensor.softmax),
    "log_softmax": (F.log_softmax, torch.log_softmax, Tensor.log_softmax),
    "topk": (torch.topk, Tensor.topk),
    # Of the loss, which is computed in float32 outside of every mode: they may be listed as such, and only so.
    "cross_entropy": (F.cross_entropy,),
    "nll_loss": (F.nll_loss,),
}

# What a network has parameters for: with these in the lower type, and the images, all between them follows.
PARAMETRIC = ("conv2d", "linear", "matmul", "batch_norm", "group_norm", "layer_norm")


def targets(lower: torch.dtype, *, is_whole: bool, ops: schema.PrecisionOps) -> dict[Function, torch.dtype]:
    """The type each listed function computes in."""
    named: dict[str, torch.dtype] = dict.fromkeys(PARAMETRIC, lower) if is_whole else {}
    named.update((name, lower) for name in ops.low_precision)
    named.update((name, torch.float32) for name in ops.float32)
    return {function: dtype for name, dtype in named.items() for function in OPERATIONS[name]}


class Casts(TorchFunctionMode):
    """Casts the floating inputs of some functions to the type each of them is to compute in."""

    def __init__(self, wanted: Mapping[Function, torch.dtype]) -> None:
        super().__init__()
        self._wanted = dict(wanted)

    def __torch_function__(
        self, func: Function, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        dtype = self._wanted.get(func)
        if dtype is None:
            return func(*args, **given)
        rest = torch.float32 if func is F.batch_norm else dtype
        cast = [_to(value, rest if place else dtype) for place, value in enumerate(args)]
        named = {name: _to(value, dtype if name == "input" else rest) for name, value in given.items()}
        with torch.autocast(_device_kind(args, given), enabled=False):
            return func(*cast, **named)


def _to(value: Any, dtype: torch.dtype) -> Any:
    """A tensor of floats in another type, also inside a list; anything else as it is."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return [_to(item, dtype) for item in value]
    return value


def _device_kind(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The kind of device of the first tensor."""
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, Tensor):
                return item.device.type
    return "cpu"
