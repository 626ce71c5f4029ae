"""Squeeze and excitation of the activation of a batch norm, and the sum of a residual block behind it.

Owns the autograd functions over the kernels and their memory: forward reads the norm's input three times (statistics,
means, output) and keeps it; backward reads it twice, each gradient once or twice, and writes each once. Refuses to know
the small network that makes a gate of means. Limits: as in `norm`, and `accepts`. Invariant: no host read and no choice
by value, so that all of it can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from reconv.kernels.batch_norm.ops import (
    ACTIVATION_IDS,
    NormInput,
    NormParams,
    output_gradients,
    statistics,
    sum_groups,
)
from reconv.kernels.channels_last import ChannelRows, LaunchConfig, channel_rows
from reconv.kernels.jit.launch import MAX_GRID_YZ, launch
from reconv.kernels.norm_squeeze_excite import triton as device
from reconv.kernels.reference import Activation

GateFunction = Callable[[Tensor], Tensor]

_SMALL_IMAGE_PIXELS = 128  # of an image, below which half a program's threads would have none
_PREFETCH_BYTES = 100 * 1024  # of shared memory, so that two programs have room on a processor
_MERGED_CHANNELS, _MERGED_IMAGES = 16, 64


def supports(x: Tensor) -> bool:
    """Whether there are few enough images."""
    return len(x) <= MAX_GRID_YZ


def batch_norm_act_squeeze_excite(
    x: Tensor, norm: NormParams, groups: Sequence[int], act: Activation, gate_of: GateFunction
) -> tuple[Tensor, Tensor]:
    """The activation of the norm of x, times the gate made of its means, both [n, channels, 1, 1]; the statistics of x
    [groups, 3, channels]."""
    (output,), stats = _norm_gate(x, norm, groups, act, gate_of, None)
    return output, stats


def batch_norm_squeeze_excite_add_relu(
    x: Tensor, norm: NormParams, other: Tensor, groups: Sequence[int], gate_of: GateFunction
) -> tuple[Tensor, Tensor, Tensor]:
    """The ReLU of the other plus the norm of x times its gate, twice, as in `norm.join`, and the statistics of x."""
    (first, second), stats = _norm_gate(x, norm, groups, "none", gate_of, other)
    return first, second, stats


@dataclass(slots=True)
class _SharedState:
    """What the two functions tell each other beside what autograd carries."""

    images: _ImageRows
    act: Activation
    gate: Tensor | None = None  # once it is known
    sums: Tensor | None = None  # over the pixels of each image, from the backward pass


def _norm_gate(
    x: Tensor, norm: NormParams, groups: Sequence[int], act: Activation, gate_of: GateFunction, other: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor]:
    # Between the two functions flows the gradient of the gated activation, not yet multiplied with the gate: nobody
    # else may use `again`.
    between = _SharedState(_image_rows(x, groups), act)
    again, means, stats = _Squeeze.apply(x, norm.weight, norm.bias, norm, between)  # type: ignore[no-untyped-call]
    gate = gate_of(means).to(x.dtype)
    outputs: tuple[Tensor, ...] = _Excite.apply(  # type: ignore[no-untyped-call]
        again, stats, norm.weight.detach(), norm.bias.detach(), gate, other, between
    )
    return outputs, stats


class _Squeeze(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: NormParams, between: _SharedState
    ) -> tuple[Tensor, Tensor, Tensor]:
        images = between.images
        operand = NormInput(x, statistics(x, norm, images.rows), weight, bias)
        means = torch.empty((*x.shape[:2], 1, 1), dtype=x.dtype, device=x.device)
        slopes = torch.empty(2, *x.shape[:2], dtype=torch.float32, device=x.device)
        form = images.summing(False)
        launch(
            device.means, images.grid(form, splits=1), *operand.tensors(), means, slopes, *images.counts(),
            images.rows.num_groups, ACT=ACTIVATION_IDS[between.act], STAGES=images.stages(form, x), **images.tile(form),
        )  # fmt: skip
        ctx.save_for_backward(*operand.tensors(), slopes)
        ctx.between = between
        ctx.mark_non_differentiable(operand.stats)
        ctx.set_materialize_grads(False)
        return x.detach(), means, operand.stats

    @staticmethod
    def backward(ctx: Any, dz: Tensor, dmeans: Tensor, _: None) -> tuple[Tensor | None, ...]:
        *saved, slopes = ctx.saved_tensors
        operand, between = NormInput(*saved), ctx.between
        images = between.images
        rows, gate = images.rows, between.gate
        dmeans = dmeans.contiguous()
        sums = torch.empty(2, rows.num_groups, rows.channels, dtype=torch.float32, device=dz.device)
        launch(
            device.norm_sums, (-(-rows.channels // _MERGED_CHANNELS), 1, rows.num_groups),
            gate, dmeans, between.sums, slopes, operand.stats, sums, *images.counts(),
            BLOCK=_MERGED_CHANNELS, IMAGES=_MERGED_IMAGES,
        )  # fmt: skip
        between.sums = None
        dx, form = torch.empty_like(operand.x), images.passing()
        launch(
            device.gradient, images.grid(form), dz, *operand.tensors(), gate, dmeans, sums, dx, *images.counts(),
            rows.num_groups, ACT=ACTIVATION_IDS[between.act], **images.tile(form),
        )  # fmt: skip
        return dx, sum_groups(sums[1], operand.weight), sum_groups(sums[0], operand.bias), None, None


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
        between: _SharedState,
    ) -> tuple[Tensor, ...]:
        images, y, gate = between.images, torch.empty_like(x), gate.contiguous()
        is_join = other is not None
        form = images.summing(True) if is_join else images.passing()
        num_tiles = images.num_tiles(form)
        num_bytes = len(x) * num_tiles * images.rows.lanes(form) * images.rows.channels if is_join else 0
        bits = torch.empty(num_bytes, dtype=torch.uint8, device=x.device)
        launch(
            device.scale, images.grid(form), x, stats, weight, bias, gate, x if other is None else other, y,
            bits if is_join else y, images.rows.channels // 8, images.pixels, images.group_images,
            images.rows.num_groups, num_tiles, ACT=ACTIVATION_IDS[between.act], JOIN=int(is_join), **images.tile(form),
        )  # fmt: skip
        ctx.save_for_backward(x, stats, weight, bias, bits)
        ctx.between, ctx.is_join = between, is_join
        ctx.set_materialize_grads(False)
        between.gate = gate.detach()
        return (y, y.detach()) if is_join else (y,)

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None = None) -> tuple[Tensor | None, ...]:
        *saved, bits = ctx.saved_tensors
        operand, between = NormInput(*saved), ctx.between
        images = between.images
        gradient, gradient2 = output_gradients(first, second)
        form = images.summing(ctx.is_join)
        dz = torch.empty_like(operand.x) if ctx.is_join else gradient
        dgate = torch.empty_like(between.gate)
        between.sums = torch.empty(2, *operand.x.shape[:2], dtype=torch.float32, device=dz.device)
        read = [gradient, operand.x, *([] if gradient2 is None else [gradient2])]
        launch(
            device.image_sums, images.grid(form, splits=1),
            gradient, gradient if gradient2 is None else gradient2, *operand.tensors(), bits if ctx.is_join else dz,
            dz, dgate, between.sums, *images.counts(), images.rows.num_groups, images.num_tiles(form),
            ACT=ACTIVATION_IDS[between.act], JOIN=int(ctx.is_join), TWO=int(gradient2 is not None),
            STAGES=images.stages(form, *read), **images.tile(form),
        )  # fmt: skip
        return dz, None, None, None, dgate, dz if ctx.is_join else None, None


@dataclass(frozen=True, slots=True)
class _ImageRows:
    """Rows of channels, image by image."""

    rows: ChannelRows
    num: int
    pixels: int
    group_images: int

    def counts(self) -> tuple[int, int, int, int]:
        """What kernels are told of them."""
        return self.rows.channels // 8, self.pixels, self.num, self.group_images

    def summing(self, is_join: bool) -> LaunchConfig:
        """The form of kernels with sums over an image; those of a join share their mask, so also their warps.

        Copied ahead, values wait in shared memory; else a sum with SiLU takes all registers of a thread.
        """
        return LaunchConfig(self._warps, 1 if is_join else 3)

    def passing(self) -> LaunchConfig:
        """The form of kernels that only read and write."""
        return LaunchConfig(self._warps)

    @property
    def _warps(self) -> int:
        return 2 if self.pixels < _SMALL_IMAGE_PIXELS else 4

    def num_tiles(self, form: LaunchConfig) -> int:
        """Tiles of an image, below each other."""
        return -(-self.pixels // self.rows.tile_rows(form))

    def grid(self, form: LaunchConfig, splits: int | None = None) -> tuple[int, int, int]:
        """Blocks of channels, splits of an image, images."""
        return self.rows.num_blocks, splits or -(-self.num_tiles(form) // 2), self.num

    def stages(self, form: LaunchConfig, *tiles: Tensor) -> int:
        """Tiles of these tensors that are copied ahead."""
        num_bytes = self.rows.tile_rows(form) * self.rows.block * sum(tensor.element_size() for tensor in tiles)
        return min(form.stages, 1 + _PREFETCH_BYTES // num_bytes)

    def tile(self, form: LaunchConfig) -> dict[str, int]:
        """The tile of a kernel."""
        return {"LANES": self.rows.lanes(form), "BLOCK": self.rows.block, "num_warps": form.warps}


def _image_rows(x: Tensor, groups: Sequence[int]) -> _ImageRows:
    return _ImageRows(channel_rows(x, groups), len(x), x.shape[2] * x.shape[3], groups[0])
