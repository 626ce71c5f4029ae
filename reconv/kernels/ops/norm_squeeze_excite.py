"""Batch norm, activation and squeeze-and-excitation, optionally with the sum of a residual block.

Forward reads x three times (statistics, means, output) and saves it; backward reads it twice, each output gradient once
or twice, and writes each gradient once. The small network that computes the gate is a callable. All of it can be
captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from reconv.kernels.channels_last import ChannelRows, LaunchConfig, channel_rows
from reconv.kernels.jit.launch import MAX_GRID_YZ, launch
from reconv.kernels.ops.batch_norm import (
    ACTIVATION_IDS,
    NormFunction,
    NormInput,
    NormParams,
    norm_input,
    output_gradients,
)
from reconv.kernels.reference import Activation
from reconv.kernels.triton import norm_squeeze_excite as device

GateFunction = Callable[[Tensor], Tensor]

_SMALL_IMAGE_PIXELS = 128  # below it, half of a program's threads would be idle
_PREFETCH_BYTES = 100 * 1024  # of shared memory, so that two programs fit on an SM
_MERGED_CHANNELS, _MERGED_IMAGES = 16, 64


def supports(x: Tensor) -> bool:
    """True if the number of images fits into a launch grid."""
    return len(x) <= MAX_GRID_YZ


def batch_norm_act_squeeze_excite(
    x: Tensor,
    norm: NormParams,
    groups: Sequence[int],
    act: Activation,
    gate_fn: GateFunction,
    stats: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """act(norm(x)) times the gate computed from its means, both [n, channels, 1, 1], and the statistics of x, which
    may be given."""
    (output,), stats = _norm_gate(x, norm, groups, act, gate_fn, None, stats)
    return output, stats


def batch_norm_squeeze_excite_add_relu(
    x: Tensor,
    norm: NormParams,
    other: Tensor,
    groups: Sequence[int],
    gate_fn: GateFunction,
    stats: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """relu(norm(x) * gate + other), twice (see `batch_norm_add_act`), and the statistics of x, which may be given."""
    (first, second), stats = _norm_gate(x, norm, groups, "none", gate_fn, other, stats)
    return first, second, stats


@dataclass(slots=True)
class _SharedState:
    """State that the two autograd functions share beside their tensors."""

    images: _ImageRows
    act: Activation
    gate: Tensor | None = None  # set by the forward pass
    sums: Tensor | None = None  # over the pixels of each image, set by the backward pass


def _norm_gate(
    x: Tensor,
    norm: NormParams,
    groups: Sequence[int],
    act: Activation,
    gate_fn: GateFunction,
    other: Tensor | None,
    stats: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], Tensor]:
    # The gradient of `x_alias` is the gated activation's, not yet multiplied by the gate: nothing else may use it.
    shared = _SharedState(_image_rows(x, groups), act)
    x_alias, means, stats = _Squeeze.apply(  # type: ignore[no-untyped-call]
        x, norm.weight, norm.bias, norm, shared, stats
    )
    gate = gate_fn(means).to(x.dtype)
    outputs: tuple[Tensor, ...] = _Excite.apply(  # type: ignore[no-untyped-call]
        x_alias, stats, norm.weight.detach(), norm.bias.detach(), gate, other, shared
    )
    return outputs, stats


class _Squeeze(NormFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        norm: NormParams,
        shared: _SharedState,
        stats: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        images = shared.images
        operand = norm_input(x, weight, bias, norm, images.rows, stats)
        means = torch.empty((*x.shape[:2], 1, 1), dtype=x.dtype, device=x.device)
        slopes = torch.empty(2, *x.shape[:2], dtype=torch.float32, device=x.device)
        config = images.reduce_config(False)
        launch(
            device.means, images.grid(config, splits=1), *operand.tensors(), means, slopes, *images.counts(),
            images.rows.num_groups, ACT=ACTIVATION_IDS[shared.act],
            STAGES=images.stages(config, x), **images.tile(config),
        )  # fmt: skip
        NormFunction.save(ctx, operand, slopes)
        ctx.shared = shared
        return x.detach(), means, operand.stats

    @staticmethod
    def backward(ctx: Any, dz: Tensor, dmeans: Tensor, _: None) -> tuple[Tensor | None, ...]:
        (operand, (slopes,)), shared = NormFunction.saved(ctx), ctx.shared
        images = shared.images
        rows, gate = images.rows, shared.gate
        dmeans = dmeans.contiguous()
        sums = torch.empty(2, rows.num_groups, rows.channels, dtype=torch.float32, device=dz.device)
        launch(
            device.norm_sums, (-(-rows.channels // _MERGED_CHANNELS), 1, rows.num_groups),
            gate, dmeans, shared.sums, slopes, operand.stats, sums, *images.counts(),
            BLOCK=_MERGED_CHANNELS, IMAGES=_MERGED_IMAGES,
        )  # fmt: skip
        shared.sums = None
        dx, config = torch.empty_like(operand.x), images.pointwise_config()
        launch(
            device.gradient, images.grid(config), dz, *operand.tensors(), gate, dmeans, sums, dx, *images.counts(),
            rows.num_groups, ACT=ACTIVATION_IDS[shared.act], **images.tile(config),
        )  # fmt: skip
        return dx, *NormFunction.parameter_gradients(operand, sums), None, None, None


class _Excite(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        stats: Tensor,
        weight: Tensor,
        bias: Tensor,
        gate: Tensor,
        other: Tensor | None,
        shared: _SharedState,
    ) -> tuple[Tensor, ...]:
        images, y, gate = shared.images, torch.empty_like(x), gate.contiguous()
        is_sum = other is not None
        config = images.reduce_config(True) if is_sum else images.pointwise_config()
        num_tiles = images.num_tiles(config)
        num_bytes = len(x) * num_tiles * images.rows.lanes(config) * images.rows.channels if is_sum else 0
        bits = torch.empty(num_bytes, dtype=torch.uint8, device=x.device)
        launch(
            device.scale, images.grid(config), x, stats, weight, bias, gate, x if other is None else other, y,
            bits if is_sum else y, images.rows.channels // 8, images.pixels, images.group_images,
            images.rows.num_groups, num_tiles, ACT=ACTIVATION_IDS[shared.act], RESIDUAL=int(is_sum),
            **images.tile(config),
        )  # fmt: skip
        ctx.save_for_backward(x, stats, weight, bias, bits)
        ctx.shared, ctx.is_sum = shared, is_sum
        ctx.set_materialize_grads(False)
        shared.gate = gate.detach()
        return (y, y.detach()) if is_sum else (y,)

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None = None) -> tuple[Tensor | None, ...]:
        *saved, bits = ctx.saved_tensors
        operand, shared = NormInput(*saved), ctx.shared
        images = shared.images
        gradient, gradient2 = output_gradients(first, second)
        config = images.reduce_config(ctx.is_sum)
        dz = torch.empty_like(operand.x) if ctx.is_sum else gradient
        dgate = torch.empty_like(shared.gate)
        shared.sums = torch.empty(2, *operand.x.shape[:2], dtype=torch.float32, device=dz.device)
        read = [gradient, operand.x, *([] if gradient2 is None else [gradient2])]
        launch(
            device.image_sums, images.grid(config, splits=1),
            gradient, gradient if gradient2 is None else gradient2, *operand.tensors(), bits if ctx.is_sum else dz,
            dz, dgate, shared.sums, *images.counts(), images.rows.num_groups, images.num_tiles(config),
            ACT=ACTIVATION_IDS[shared.act], RESIDUAL=int(ctx.is_sum), TWO_GRADS=int(gradient2 is not None),
            STAGES=images.stages(config, *read), **images.tile(config),
        )  # fmt: skip
        return dz, None, None, None, dgate, dz if ctx.is_sum else None, None


@dataclass(frozen=True, slots=True)
class _ImageRows:
    """Rows of channels, image by image."""

    rows: ChannelRows
    num: int
    pixels: int
    group_images: int

    def counts(self) -> tuple[int, int, int, int]:
        """The sizes that kernels take."""
        return self.rows.channels // 8, self.pixels, self.num, self.group_images

    def reduce_config(self, is_sum: bool) -> LaunchConfig:
        """The launch config of kernels that reduce over an image; with a residual sum they share a mask layout.

        Prefetched values wait in shared memory; else a reduction with SiLU takes all registers of a thread.
        """
        return LaunchConfig(self._warps, 1 if is_sum else 3)

    def pointwise_config(self) -> LaunchConfig:
        """The launch config of pointwise kernels."""
        return LaunchConfig(self._warps)

    @property
    def _warps(self) -> int:
        return 2 if self.pixels < _SMALL_IMAGE_PIXELS else 4

    def num_tiles(self, config: LaunchConfig) -> int:
        """Tiles along the rows of an image."""
        return -(-self.pixels // self.rows.tile_rows(config))

    def grid(self, config: LaunchConfig, splits: int | None = None) -> tuple[int, int, int]:
        """The launch grid: blocks of channels, splits of an image, images."""
        return self.rows.num_blocks, splits or -(-self.num_tiles(config) // 2), self.num

    def stages(self, config: LaunchConfig, *tiles: Tensor) -> int:
        """Pipeline stages for tiles of these tensors."""
        num_bytes = self.rows.tile_rows(config) * self.rows.block * sum(tensor.element_size() for tensor in tiles)
        return min(config.stages, 1 + _PREFETCH_BYTES // num_bytes)

    def tile(self, config: LaunchConfig) -> dict[str, int]:
        """The tile constants."""
        return {"LANES": self.rows.lanes(config), "BLOCK": self.rows.block, "num_warps": config.warps}


def _image_rows(x: Tensor, groups: Sequence[int]) -> _ImageRows:
    return _ImageRows(channel_rows(x, groups), len(x), x.shape[2] * x.shape[3], groups[0])
