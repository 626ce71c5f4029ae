"""Autocast with a dtype per operation: the inputs of listed torch functions are cast to the dtype they compute in.

Statistics and parameters of batch norm are float32 in every mode. Works in eager mode and under torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from reconv.recipe.parts.precision import PrecisionOps

Function = Callable[..., Any]

# By the names that a recipe may list. Operators reach a torch function mode as methods: x + y as Tensor.add.
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
    # The loss is computed in float32 outside of any mode; these may only be listed as float32.
    "cross_entropy": (F.cross_entropy,),
    "nll_loss": (F.nll_loss,),
}

# Operations with parameters: with these and the images in low precision, everything between them follows.
PARAMETRIC = ("conv2d", "linear", "matmul", "batch_norm", "group_norm", "layer_norm")


def op_dtypes(low_precision: torch.dtype, *, casts_all: bool, ops: PrecisionOps) -> dict[Function, torch.dtype]:
    """The dtype that each listed function computes in."""
    by_name: dict[str, torch.dtype] = dict.fromkeys(PARAMETRIC, low_precision) if casts_all else {}
    by_name.update((name, low_precision) for name in ops.low_precision)
    by_name.update((name, torch.float32) for name in ops.float32)
    return {function: dtype for name, dtype in by_name.items() for function in OPERATIONS[name]}


class CastOps(TorchFunctionMode):
    """Casts the floating-point inputs of functions to the dtype that each of them computes in."""

    def __init__(self, dtypes: Mapping[Function, torch.dtype]) -> None:
        super().__init__()
        self._dtypes = dict(dtypes)

    def __torch_function__(
        self, func: Function, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        dtype = self._dtypes.get(func)
        if dtype is None:
            return func(*args, **kwargs)
        param_dtype = torch.float32 if func is F.batch_norm else dtype
        cast_args = [_cast(value, param_dtype if i else dtype) for i, value in enumerate(args)]
        cast_kwargs = {name: _cast(value, dtype if name == "input" else param_dtype) for name, value in kwargs.items()}
        with torch.autocast(_device_kind(args, kwargs), enabled=False):
            return func(*cast_args, **cast_kwargs)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in the dtype, also inside a list; anything else unchanged."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return [_cast(item, dtype) for item in value]
    return value


def _device_kind(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The device type of the first tensor."""
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, Tensor):
                return item.device.type
    return "cpu"
