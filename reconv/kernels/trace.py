"""Tracing a training pass on the meta device, to find the kernels that it launches.

The model itself is not changed, and nothing is computed: convolutions and matrix products return empty tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function, Variable
from torch.overrides import TorchFunctionMode

from reconv.core.batch import Batch
from reconv.kernels.dispatch import conv_output_dtype
from reconv.kernels.fused.ssd import SSDFeatureMaps
from reconv.kernels.jit.launch import KernelVariant, trace_launches
from reconv.models.architecture import ReconvModel
from reconv.models.layers.batch_norm import LayerState

_NUM_IMAGES = 2  # does not affect which variants are launched


def trace_kernels(
    model: nn.Module,
    image: Sequence[int],
    dtype: torch.dtype,
    autocast: AbstractContextManager[None],
    by_stages: bool = False,
) -> list[KernelVariant]:
    """The kernel variants that a training pass over images [channels, height, width] launches, in order of first
    launch. With activation checkpointing the stages of the model are called one by one, `by_stages`."""
    copied = _meta_copy(model).train()
    positions = torch.empty(_NUM_IMAGES, dtype=torch.int64, device="meta")
    LayerState(copied).set_micro_batch(Batch({}, positions, (_NUM_IMAGES,)), step=0)
    images = torch.empty(_NUM_IMAGES, *image, dtype=dtype, device="meta").to(memory_format=torch.channels_last)
    with trace_launches() as traced, _MetaOps():
        with autocast:
            ends = _with_losses(_by_stages(copied, images) if by_stages else copied(images))
        outputs = tuple(y for y in _tensors(ends) if y.requires_grad)
        gradients = tuple(torch.empty_like(y) for y in outputs)
        trained = tuple(p for p in copied.parameters() if p.requires_grad)
        # Not torch.autograd.grad: it would leave the mode and import torch's compiler.
        Variable._execution_engine.run_backward(
            outputs, gradients, False, False, trained, allow_unreachable=True, accumulate_grad=False
        )
    return list(traced)


def _by_stages(model: nn.Module, x: Any) -> Any:
    """The output of the model's stages, called one after another."""
    assert isinstance(model, ReconvModel)
    for _name, stage in model.stages():
        x = stage(x)
    return x


def _with_losses(output: Any) -> Any:
    """The output, or the losses of a detector's feature maps, which are kernels too."""
    if not isinstance(output, SSDFeatureMaps):
        return output
    from reconv.kernels.ops.box_losses import AnchorLayout, box_losses, empty_ground_truth

    layout = AnchorLayout(output.per_cell, output.num_classes)
    return box_losses(output.maps, output.biases, layout, empty_ground_truth(output.maps, layout))


def _meta_copy(model: nn.Module) -> nn.Module:
    """A copy of the model on the meta device."""
    copieds: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        copieds[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, copieds)


def _tensors(output: Any) -> Iterator[Tensor]:
    """All tensors of a model's output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors(tuple(output.values()))
    elif isinstance(output, Sequence):
        for part in output:
            yield from _tensors(part)


class _MetaOps(TorchFunctionMode):
    """Convolutions, matrix products, concatenations and a few other operations that return an empty tensor of the right
    shape, dtype and layout.

    Torch's own meta implementations ignore autocast and import its compiler first, which takes 1.5 s.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.conv2d:
            return _meta_matmul(*args[:2], *_conv_output_sides(*args, **kwargs))
        if func is F.linear:
            return _meta_matmul(*args[:2])
        if _is_global_pool(func, args):
            x = args[0]
            return _MetaMatmul.apply(x, None, (*x.shape[:2], 1, 1), x.dtype)  # type: ignore[no-untyped-call]
        is_scaled = func in (Tensor.mul, Tensor.div) and isinstance(args[1], (int, float))
        if func in (F.batch_norm, F.gelu) or is_scaled:
            return _MetaMatmul.apply(args[0], None, args[0].shape, args[0].dtype)  # type: ignore[no-untyped-call]
        if func is F.pad:
            return _MetaMatmul.apply(args[0], None, _padded_shape(*args[:2]), args[0].dtype)  # type: ignore[no-untyped-call]
        if func is torch.cat:
            return _MetaCat.apply(args[1] if len(args) > 1 else kwargs.get("dim", 0), *args[0])  # type: ignore[no-untyped-call]
        if func is torch.ops.aten.convolution_backward:
            return tuple(_empty_like(x) if wanted else None for x, wanted in zip(args[1:4], args[-1], strict=True))
        if func is torch.empty_like:
            return _empty_like(*args, **kwargs)
        return func(*args, **kwargs)


def _is_global_pool(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """True if a call pools whole images."""
    if func is F.adaptive_avg_pool2d:
        return bool(args[1] == 1)
    return func in (F.max_pool2d, torch.max_pool2d) and args[1] == tuple(args[0].shape[2:])


def _empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=dtype or x.dtype, device="meta")


def _meta_matmul(x: Tensor, weight: Tensor, *sides: int) -> Tensor:
    middle = () if sides else x.shape[1:-1]
    output: Tensor = _MetaMatmul.apply(  # type: ignore[no-untyped-call]
        x, weight, (x.shape[0], *middle, weight.shape[0], *sides), conv_output_dtype(x)
    )
    return output


def _conv_output_sides(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Iterator[int]:
    """Height and width of a convolution's output."""
    for axis in range(2):
        step, pad, spread = (v if isinstance(v, int) else v[axis] for v in (stride, padding, dilation))
        yield (x.shape[2 + axis] + 2 * pad - spread * (weight.shape[2 + axis] - 1) - 1) // step + 1


def _padded_shape(x: Tensor, pad: Sequence[int]) -> tuple[int, ...]:
    """The shape of a tensor after F.pad."""
    shape = list(x.shape)
    for axis, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True), start=1):
        shape[-axis] += before + after
    return tuple(shape)


class _MetaMatmul(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = torch.empty(shape, dtype=dtype, device="meta")
        return y.contiguous(memory_format=torch.channels_last) if y.dim() == 4 else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None, None


class _MetaCat(Function):
    @staticmethod
    def forward(ctx: Any, dim: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        shape = [*tensors[0].shape]
        shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
        y = torch.empty(shape, dtype=reduce(torch.promote_types, (tensor.dtype for tensor in tensors)), device="meta")
        return y.contiguous(memory_format=torch.channels_last) if y.dim() == 4 else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(_empty_like(tensor) for tensor in ctx.saved_tensors)
