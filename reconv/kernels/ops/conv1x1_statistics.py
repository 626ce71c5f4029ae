"""A 1x1 convolution that also reduces the batch norm statistics of its output.

The norm after it then needs no pass over the output to find them. The backward pass is torch's own. All of it can be
captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from reconv.kernels.channels_last import ChannelRows, channel_rows, counters
from reconv.kernels.dispatch import CHANNEL_MULTIPLE, MAX_ELEMENTS
from reconv.kernels.jit.launch import launch
from reconv.kernels.ops.batch_norm import NormInput, NormParams
from reconv.kernels.triton import conv1x1_statistics as device

_MIN_TILE = 16  # of tensor cores
_WIDE, _NARROW = 128, 64  # outputs of a tile
_MIN_UTILIZATION = 0.8


@dataclass(frozen=True, slots=True)
class ConvTile:
    """Rows, outputs and inputs of a tile, warps, pipeline stages, programs per SM, and a limit of registers per thread.

    A tile has 16 outputs or more for each warp: else several warps would share an output, and exchange their sums.
    """

    rows: int
    outputs: int
    inputs: int | None  # None: all of them, and a program keeps its filters
    warps: int
    stages: int
    programs_per_sm: int
    registers: int | None = None


# The first entry that has room for a convolution's inputs and outputs: the configs of wide and of narrow tiles, or None
# where cuDNN's convolution and a pass for the statistics are faster. Measured on an H200 over the layers of four
# models (benchmarks/LOG.md).
_ANY = 1 << 31
_WITH_FILTERS = ConvTile(64, _WIDE, None, 4, 3, 3, 168)
_SMALL, _TALL = ConvTile(128, _NARROW, 64, 4, 3, 3, 168), ConvTile(256, _NARROW, 64, 4, 4, 1)
_LONG, _LARGE = ConvTile(128, _NARROW, 64, 4, 4, 2, 168), ConvTile(256, _WIDE, 64, 8, 4, 1)
_CONFIGS: tuple[tuple[int, int, ConvTile | None, ConvTile | None], ...] = (
    (24, _ANY, _WITH_FILTERS, ConvTile(128, _NARROW, None, 4, 2, 3, 168)),
    (32, _ANY, _WITH_FILTERS, ConvTile(128, _NARROW, None, 4, 3, 3, 168)),
    (64, _ANY, _WITH_FILTERS, ConvTile(128, _NARROW, None, 4, 2, 3, 168)),
    (112, _ANY, _SMALL, _SMALL),
    (128, _ANY, ConvTile(64, _WIDE, None, 8, 4, 3, 80), _SMALL),
    (256, 64, _TALL, _TALL),
    (256, 128, _LARGE, _LONG),
    (192, _ANY, _SMALL, _SMALL),
    (256, _ANY, ConvTile(128, _WIDE, 64, 8, 3, 2, 128), _SMALL),
    (512, 64, _TALL, _TALL),
    (512, 80, _LONG, _LONG),
    (512, 112, None, None),
    (512, 128, _LARGE, None),
    (_ANY, _ANY, None, None),
)


def tile_config(inputs: int, outputs: int) -> ConvTile | None:
    """The config of a convolution; None where separate kernels are faster."""
    for most_inputs, most_outputs, wide, narrow in _CONFIGS:
        if inputs <= most_inputs and outputs <= most_outputs:
            return wide if _is_wide(outputs) else narrow
    return None


def _is_wide(outputs: int) -> bool:
    """True if wide tiles compute few outputs that do not exist, or narrow ones would compute as many."""
    padded = -(-outputs // _WIDE) * _WIDE
    return outputs >= _MIN_UTILIZATION * padded or padded - outputs < _NARROW


def supports(x: Tensor, filters: Tensor) -> bool:
    """True if the kernels compute a convolution of x with weight [out, channels, 1, 1], faster than separate ones."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and tuple(filters.shape[1:]) == (x.shape[1], 1, 1)
        and len(filters) % CHANNEL_MULTIPLE == 0
        and x.numel() // x.shape[1] * len(filters) <= MAX_ELEMENTS
        and tile_config(x.shape[1], len(filters)) is not None
    )


def conv1x1_statistics(x: Tensor, filters: Tensor, norm: NormParams, groups: Sequence[int]) -> tuple[Tensor, Tensor]:
    """conv1x1(x), and mean, unbiased variance and 1 / std [groups, 3, outputs] of its output.

    The statistics have no gradient of their own: the norm's backward pass includes it.
    """
    output: tuple[Tensor, Tensor] = _Conv1x1Statistics.apply(x, filters, norm, groups)  # type: ignore[no-untyped-call]
    return output


class _Conv1x1Statistics(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, filters: Tensor, norm: NormParams, groups: Sequence[int]) -> tuple[Tensor, Tensor]:
        config = tile_config(x.shape[1], len(filters))
        if config is None:
            raise ValueError(f"no kernel for a convolution of {x.shape[1]} channels to {len(filters)}")
        y, stats = conv_output(x, filters.contiguous(), norm, groups, config)
        ctx.save_for_backward(x, filters)
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        return y, stats

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor | None, ...]:
        x, filters = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx, dfilters, _bias = torch.ops.aten.convolution_backward(
            *(dy, x, filters, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), [*ctx.needs_input_grad[:2], False]
        )
        return dx, dfilters, None, None


def conv_output(
    x: Tensor,
    filters: Tensor,
    norm: NormParams,
    groups: Sequence[int],
    config: ConvTile,
    before: NormInput | None = None,
) -> tuple[Tensor, Tensor]:
    """The convolution of x and its statistics; filters are contiguous.

    With `before`, a norm of x, it is the convolution of relu(norm(x)); then a tile must have all inputs.
    """
    rows, (samples, _, height, width), outputs = channel_rows(x, groups), x.shape, len(filters)
    grid = rows.tile_grid(config.rows, config.programs_per_sm, -(-outputs // config.outputs))
    y = torch.empty(samples, height, width, outputs, dtype=x.dtype, device=x.device)
    stats = torch.empty(rows.num_groups, 3, outputs, dtype=torch.float32, device=x.device)
    partials = torch.empty(rows.num_groups * grid[1] * 2 * outputs, dtype=torch.float32, device=x.device)
    written = y, norm.running_var, stats, partials, counters(grid[0] * grid[2], x.device)
    counts = rows.channels // 8, rows.num_rows, rows.group_rows, outputs // 8, norm.eps
    if config.inputs is None:
        of_x = (stats, stats, stats) if before is None else before.tensors()[1:]  # not used without a norm
        constants = {"HAS_NORM": before is not None, **_constants(rows, config)}
        launch(device.conv_few_inputs, grid, x, *of_x, filters, *written, *counts, **constants)
    else:
        assert before is None
        launch(device.conv_many_inputs, grid, x, filters, *written, *counts, **_constants(rows, config))
    return y.permute(0, 3, 1, 2), stats


def _constants(rows: ChannelRows, config: ConvTile) -> dict[str, int]:
    inputs = config.inputs or max(_MIN_TILE, 1 << (rows.channels - 1).bit_length())
    tile = {"ROWS": config.rows, "BLOCK": config.outputs, "BLOCK_K": inputs}
    tile |= {"STAGES": config.stages, "num_warps": config.warps}
    return tile if config.registers is None else tile | {"maxnreg": config.registers}
