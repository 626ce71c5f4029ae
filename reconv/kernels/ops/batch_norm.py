"""Batch norm in training, fused with its activation and with the sum of a residual block.

Forward saves its inputs and, for a sum with ReLU, one bit per value; backward reads each of them twice and writes each
gradient once. There is no host synchronization and no choice by value, so all of it can be captured in a CUDA graph.
Image tensors must satisfy `dispatch.supports` and groups `dispatch.supports_groups`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from reconv.kernels.channels_last import ChannelRows, LaunchConfig, channel_rows, counters
from reconv.kernels.jit.launch import launch
from reconv.kernels.reference import Activation
from reconv.kernels.triton import batch_norm as device

ACTIVATION_IDS = {"none": 0, "relu": 1, "relu6": 2, "silu": 3, "hardswish": 5}  # as in triton.py
_SUM_ACTIVATIONS = ("none", "relu")
_NO_RESIDUAL, _ADD, _ADD_NORM = range(3)
_UPDATED_CHANNELS = 1024  # of running statistics, at a time

# Measured on an H200 over shapes of ResNet-50 (benchmarks/LOG.md). Where values are
# reduced or packed, ptxas interleaves loads with arithmetic and few are in flight: there tiles are prefetched, by few
# long programs. The two kernels of a residual sum share their mask layout, so also their number of warps.
CONFIGS = {
    "statistics": LaunchConfig(8, 3, 1),
    "batch_norm": LaunchConfig(),
    "sum": LaunchConfig(4, 2, 2),
    "gradient_sums": LaunchConfig(8, 3, 1),
    "sum_gradient_sums": LaunchConfig(4, 1, 4),
    "gradient": LaunchConfig(),
    "pool": LaunchConfig(),
}


@dataclass(frozen=True, slots=True)
class NormParams:
    """The parameters of one batch norm; a group of one value keeps the running variance."""

    weight: Tensor
    bias: Tensor
    running_var: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class NormInput:
    """An image tensor and its normalization; stats [groups, 3, channels]: mean, unbiased variance, 1 / std."""

    x: Tensor
    stats: Tensor
    weight: Tensor
    bias: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All tensors, in the order of the kernels' arguments."""
        return self.x, self.stats, self.weight, self.bias


def batch_norm_act(
    x: Tensor, norm: NormParams, groups: Sequence[int], act: Activation, stats: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """act(norm(x)), and mean, unbiased variance and 1 / std [groups, 3, channels].

    `stats` are these statistics, where the operation before the norm computed them.
    """
    output: tuple[Tensor, Tensor] = _BatchNormAct.apply(  # type: ignore[no-untyped-call]
        x, norm.weight, norm.bias, norm, groups, act, stats
    )
    return output


def batch_norm_add_act(
    x: Tensor,
    norm: NormParams,
    identity: Tensor,
    groups: Sequence[int],
    act: Activation,
    stats: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """act(norm(x) + identity), twice, and the statistics of x.

    The output is returned as two tensors that share memory, so that each use has its own gradient and the backward
    kernel adds them as it reads them.
    """
    output: tuple[Tensor, ...] = _BatchNormSum.apply(  # type: ignore[no-untyped-call]
        x, norm.weight, norm.bias, identity, None, None, norm, None, groups, act, stats, None
    )
    return output[:3]


def batch_norm_add_norm_act(
    x: Tensor,
    norm: NormParams,
    other: Tensor,
    other_norm: NormParams,
    groups: Sequence[int],
    act: Activation,
    stats: Tensor | None = None,
    other_stats: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """act(norm(x) + other_norm(other)), twice, and the statistics of both."""
    output: tuple[Tensor, ...] = _BatchNormSum.apply(  # type: ignore[no-untyped-call]
        x, norm.weight, norm.bias, other, other_norm.weight, other_norm.bias, norm, other_norm, groups, act, stats,
        other_stats,
    )  # fmt: skip
    return output


class NormFunction(Function):
    """Base of the autograd functions of a batch norm and of what is fused with it.

    The norm's input is saved, and statistics have no gradient. An unused output has the gradient None, not zeros.
    """

    @staticmethod
    def save(ctx: Any, operand: NormInput, *others: Tensor | None, constant: Sequence[Tensor | None] = ()) -> None:
        """Save the norm's input and others; `constant` are more outputs without a gradient than its statistics."""
        ctx.save_for_backward(*operand.tensors(), *others)
        ctx.mark_non_differentiable(operand.stats, *(tensor for tensor in constant if tensor is not None))
        ctx.set_materialize_grads(False)

    @staticmethod
    def saved(ctx: Any) -> tuple[NormInput, tuple[Tensor, ...]]:
        """The norm's input, and the other saved tensors."""
        tensors = ctx.saved_tensors
        return NormInput(*tensors[:4]), tensors[4:]

    @staticmethod
    def parameter_gradients(operand: NormInput, sums: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of weight and bias from sums of dz and dz * xhat [2 or more, groups, channels]."""
        return sum_groups(sums[1], operand.weight), sum_groups(sums[0], operand.bias)


class NormSumFunction(NormFunction):
    """Base of the autograd functions of a sum, norm(x) + other or norm(x) + other_norm(other)."""

    @staticmethod
    def save_sum(
        ctx: Any, operand: NormInput, other: NormInput | None, *others: Tensor, constant: Sequence[Tensor | None] = ()
    ) -> None:
        """Save both operands; one without a norm is not needed again."""
        others_norm = () if other is None else other.tensors()
        other_stats = None if other is None else other.stats
        NormFunction.save(ctx, operand, *others, *others_norm, constant=(other_stats, *constant))
        ctx.num_others = len(others)

    @staticmethod
    def saved_sum(ctx: Any) -> tuple[NormInput, NormInput | None, tuple[Tensor, ...]]:
        """Both operands, the second if it has a norm, and the other saved tensors."""
        operand, others = NormFunction.saved(ctx)
        of_norm = others[ctx.num_others :]
        return operand, NormInput(*of_norm) if of_norm else None, others[: ctx.num_others]

    @staticmethod
    def other_gradients(
        other: NormInput | None, sums: Tensor, dz: Tensor, dother: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of the second operand and of its norm's weight and bias."""
        if other is None:
            return dz, None, None
        dbias = sum_groups(sums[0], other.bias).clone()  # two parameters must not share a gradient's memory
        return dother, sum_groups(sums[2], other.weight), dbias


class _BatchNormAct(NormFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        norm: NormParams,
        groups: Sequence[int],
        act: Activation,
        stats: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.rows, ctx.act = channel_rows(x, groups), act
        operand = norm_input(x, weight, bias, norm, ctx.rows, stats)
        NormFunction.save(ctx, operand)
        return write_output(operand, None, None, ctx.rows, act), operand.stats

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor | None, ...]:
        operand, _others = NormFunction.saved(ctx)
        gradient = dy.contiguous(memory_format=torch.channels_last)
        sums = gradient_sums(gradient, None, operand, None, None, None, ctx.rows, ctx.act)
        dx, _other = input_gradients(gradient, operand, None, sums, ctx.rows, ctx.act)
        return dx, *NormFunction.parameter_gradients(operand, sums), None, None, None, None


class _BatchNormSum(NormSumFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        other_x: Tensor,
        other_weight: Tensor | None,
        other_bias: Tensor | None,
        norm: NormParams,
        other_norm: NormParams | None,
        groups: Sequence[int],
        act: Activation,
        stats: Tensor | None,
        other_stats: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        ctx.rows, ctx.act = channel_rows(x, groups), act
        operand = norm_input(x, weight, bias, norm, ctx.rows, stats)
        other = other_input(other_x, other_weight, other_bias, other_norm, ctx.rows, other_stats)
        bits = empty_relu_mask(ctx.rows, x.device, act)
        y = write_output(operand, other_x if other is None else other, bits, ctx.rows, act)
        NormSumFunction.save_sum(ctx, operand, other, bits)
        return y, y.detach(), operand.stats, None if other is None else other.stats

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        operand, other, (bits,) = NormSumFunction.saved_sum(ctx)
        gradient, gradient2 = output_gradients(first, second)
        dz = torch.empty_like(operand.x) if bits.numel() or gradient2 is not None else None
        sums = gradient_sums(gradient, gradient2, operand, other, bits, dz, ctx.rows, ctx.act)
        dz = gradient if dz is None else dz
        dx, dother = input_gradients(dz, operand, other, sums, ctx.rows, "none")
        of_other = NormSumFunction.other_gradients(other, sums, dz, dother)
        return dx, *NormFunction.parameter_gradients(operand, sums), *of_other, *([None] * 6)


def norm_input(
    x: Tensor, weight: Tensor, bias: Tensor, norm: NormParams, rows: ChannelRows, stats: Tensor | None
) -> NormInput:
    """The input of a norm with its statistics, which are computed unless they are known."""
    return NormInput(x, statistics(x, norm, rows) if stats is None else stats, weight, bias)


def other_input(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: NormParams | None,
    rows: ChannelRows,
    stats: Tensor | None,
) -> NormInput | None:
    """The same for the second operand of a sum; None if it has no norm."""
    if norm is None or weight is None or bias is None:
        return None
    return norm_input(x, weight, bias, norm, rows, stats)


def output_gradients(first: Tensor | None, second: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradients of an output's one or two uses, channels_last."""
    gradients = [g.contiguous(memory_format=torch.channels_last) for g in (first, second) if g is not None]
    return gradients[0], gradients[1] if len(gradients) == 2 else None


def empty_relu_mask(rows: ChannelRows, on: torch.device, act: Activation) -> Tensor:
    """Memory for the ReLU mask of a sum; empty without ReLU."""
    if act not in _SUM_ACTIVATIONS:
        raise ValueError(f"a residual sum ends in {' or '.join(_SUM_ACTIVATIONS)}, not in {act}")
    num_bytes = rows.num_groups * rows.num_tiles(CONFIGS["sum"]) * rows.lanes(CONFIGS["sum"]) * rows.channels
    return torch.empty(num_bytes if act == "relu" else 0, dtype=torch.uint8, device=on)


def update_running(
    stats: Tensor, running_mean: Tensor, running_var: Tensor, num_batches: Tensor, momentum: float
) -> None:
    """Move a norm's running statistics towards a batch's stats [1, 3, channels], as torch does, and count the batch."""
    counts = (len(running_mean), momentum)
    launch(
        device.update_running,
        (1,),
        stats.contiguous(),
        running_mean,
        running_var,
        num_batches,
        *counts,
        BLOCK=_UPDATED_CHANNELS,
    )


def row_counts(rows: ChannelRows) -> tuple[int, int, int]:
    """The sizes that every kernel takes."""
    return rows.channels // 8, rows.num_rows, rows.group_rows


def tile_constants(rows: ChannelRows, config: LaunchConfig) -> dict[str, int]:
    """The tile constants that every kernel takes."""
    return {"LANES": rows.lanes(config), "BLOCK": rows.block, "num_warps": config.warps}


def statistics(x: Tensor, norm: NormParams, rows: ChannelRows) -> Tensor:
    """Mean, unbiased variance and 1 / std [groups, 3, channels]."""
    config = CONFIGS["statistics"]
    splits = rows.splits(config)
    stats = torch.empty(rows.num_groups, 3, rows.channels, dtype=torch.float32, device=x.device)
    partials = torch.empty(rows.num_groups * splits * 2 * rows.channels, dtype=torch.float32, device=x.device)
    launch(
        device.statistics, rows.grid(config),
        x, norm.running_var, stats, partials, counters(rows.num_counts, x.device), *row_counts(rows), norm.eps,
        STAGES=rows.stages(config, x), **tile_constants(rows, config),
    )  # fmt: skip
    return stats


def write_output(
    operand: NormInput, other: NormInput | Tensor | None, bits: Tensor | None, rows: ChannelRows, act: Activation
) -> Tensor:
    """The activation of the normalized operand, plus the other one, normalized or as it is."""
    y = torch.empty_like(operand.x)
    config = CONFIGS["batch_norm" if other is None else "sum"]
    # Arguments that the kernel does not use get an arbitrary pointer.
    added = other.tensors() if isinstance(other, NormInput) else operand.tensors()
    if isinstance(other, Tensor):
        added = (other, *added[1:])
    launch(
        device.normalize, rows.grid(config),
        *operand.tensors(), *added, y, y if bits is None or not bits.numel() else bits, *row_counts(rows),
        rows.num_tiles(config), ACT=ACTIVATION_IDS[act], RESIDUAL=_residual_kind(other),
        STAGES=rows.stages(config, operand.x, added[0]), **tile_constants(rows, config),
    )  # fmt: skip
    return y


def gradient_sums(
    gradient: Tensor,
    gradient2: Tensor | None,
    operand: NormInput,
    other: NormInput | None,
    bits: Tensor | None,
    dz: Tensor | None,
    rows: ChannelRows,
    act: Activation,
) -> Tensor:
    """Sums of dz, dz * xhat and dz * xhat of the other operand [3, groups, channels]; also writes dz if it is given.

    `bits` is the ReLU mask of a sum.
    """
    config = CONFIGS["gradient_sums" if bits is None else "sum_gradient_sums"]
    splits = rows.splits(config)
    sums = torch.empty(3, rows.num_groups, rows.channels, dtype=torch.float32, device=gradient.device)
    partials = torch.empty(rows.num_groups * splits * 3 * rows.channels, dtype=torch.float32, device=gradient.device)
    kind = _NO_RESIDUAL if bits is None else _ADD if other is None else _ADD_NORM
    x, stats = (operand if other is None else other).tensors()[:2]
    read = [gradient, operand.x, *([] if gradient2 is None else [gradient2])]
    launch(
        device.gradient_sums, rows.grid(config),
        gradient, gradient if gradient2 is None else gradient2, *operand.tensors(), x, stats,
        x if bits is None or not bits.numel() else bits, x if dz is None else dz, sums, partials,
        counters(rows.num_counts, gradient.device), *row_counts(rows), rows.num_tiles(config),
        ACT=ACTIVATION_IDS[act], RESIDUAL=kind, TWO_GRADS=gradient2 is not None, WRITE_DZ=dz is not None,
        STAGES=rows.stages(config, *read), **tile_constants(rows, config),
    )  # fmt: skip
    return sums


def input_gradients(
    dz: Tensor,
    operand: NormInput,
    other: NormInput | None,
    sums: Tensor | Sequence[Tensor],
    rows: ChannelRows,
    act: Activation,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the operand's input and, for a sum of norms, of the other's, from `gradient_sums`."""
    dx = torch.empty_like(operand.x)
    dother = None if other is None else torch.empty_like(other.x)
    config = CONFIGS["gradient"]
    launch(
        device.gradient, rows.grid(config),
        dz, *operand.tensors(), *(operand if other is None else other).tensors()[:3],
        sums[0], sums[1], sums[1 if other is None else 2], dx,
        dx if dother is None else dother, *row_counts(rows), ACT=ACTIVATION_IDS[act], RESIDUAL=_residual_kind(other),
        STAGES=rows.stages(config, dz, operand.x), **tile_constants(rows, config),
    )  # fmt: skip
    return dx, dother


def sum_groups(sums: Tensor, parameter: Tensor) -> Tensor:
    """The gradient of a parameter, from sums [groups, channels]."""
    return (sums[0] if sums.shape[0] == 1 else sums.sum(0)).to(parameter.dtype)


def _residual_kind(other: NormInput | Tensor | None) -> int:
    return _NO_RESIDUAL if other is None else _ADD_NORM if isinstance(other, NormInput) else _ADD
