"""Triton kernels of a 1x1 convolution that also reduces the batch norm statistics of its output.

Programs are (block of outputs, split of the rows, group); those of the same rows are launched next to each other, so
that they read them from the L2 cache. The statistics are reduced as in `conv_epilogue`.

Shapes: x [rows, inputs]; filters [outputs, inputs]; y [rows, outputs]; x_stats and stats [groups, 3, channels];
partials [groups, splits, 2, outputs]. Tiles: w_tile [outputs, inputs], x_tile [rows, inputs].

Hazards: rows beyond a group are loaded as 0, but relu(norm(0)) is not 0: such rows must never be summed or stored.
"""

import triton
import triton.language as tl

from reconv.kernels.triton.batch_norm import RELU, STATISTICS, apply_activation, bounds, channels_of, norm_line
from reconv.kernels.triton.conv_epilogue import HEAD, add_product, head_mean, merge_statistics, store_tile

_COUNTS = ["eighths", "num_rows", "group_rows", "out_eighths"]


@triton.jit
def _filters(filters, out, exists, channel, channels):
    """The filters of some outputs and channels [outputs, channels]."""
    mask = exists[:, None] & (channel < channels)[None, :]
    return tl.load(filters + out[:, None] * channels + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _rows(x, row, end, channel, channels):
    """Some channels of the input's rows [rows, channels]."""
    mask = (row < end)[:, None] & (channel < channels)[None, :]
    return tl.load(x + row[:, None] * channels + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _used(values, scale, summand, HAS_NORM: tl.constexpr):
    """The values that are multiplied: relu(norm(x)) with a norm. Rows that do not exist are not stored or summed."""
    if HAS_NORM:
        values = apply_activation(values.to(tl.float32) * scale[None, :] + summand[None, :], RELU).to(values.dtype)
    return values


@triton.jit(do_not_specialize=_COUNTS)
def conv_few_inputs(
    x, x_stats, x_weight, x_bias, filters, y, running_var, stats, partials, counters, eighths, num_rows, group_rows,
    out_eighths, eps, HAS_NORM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A convolution of x or relu(norm(x)) with at most BLOCK_K inputs: a program reads its filters once."""
    channels, out_channels = eighths * 8, out_eighths * 8
    start, end = bounds(num_rows, group_rows)
    out, exists = channels_of(out_channels, BLOCK)
    channel = tl.arange(0, BLOCK_K)
    w_tile = _filters(filters, out, exists, channel, channels)
    scale, summand = 0.0, 0.0
    if HAS_NORM:
        x_stats += tl.program_id(2) * STATISTICS * channels
        _mean, _rstd, scale, summand = norm_line(x_stats, x_weight, x_bias, channels, channel, channel < channels)
    head_row = start + tl.arange(0, HEAD)
    head = _used(_rows(x, head_row, end, channel, channels), scale, summand, HAS_NORM)
    head = tl.where((head_row < end)[:, None], head, 0.0)
    shift = head_mean(add_product(w_tile, tl.trans(head), tl.zeros([BLOCK, HEAD], tl.float32)), end - start)
    total = tl.zeros([BLOCK, 4], tl.float32)
    squares = tl.zeros([BLOCK, 4], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(end - start, ROWS), tl.num_programs(1), num_stages=STAGES):
        first_row = start + tile * ROWS
        row = first_row + tl.arange(0, ROWS)
        x_tile = _used(_rows(x, row, end, channel, channels), scale, summand, HAS_NORM)
        product = add_product(w_tile, tl.trans(x_tile), tl.zeros([BLOCK, ROWS], tl.float32))
        total, squares = store_tile(
            product, y, total, squares, shift, row, row < end, first_row + ROWS <= end, out, exists, out_channels, ROWS,
            BLOCK,
        )  # fmt: skip
    merge_statistics(
        total, squares, shift, running_var, stats, partials, counters, out_channels, out, exists, end - start, eps,
        BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=_COUNTS)
def conv_many_inputs(
    x, filters, y, running_var, stats, partials, counters, eighths, num_rows, group_rows, out_eighths, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A convolution of any number of inputs, BLOCK_K at a time."""
    channels, out_channels = eighths * 8, out_eighths * 8
    start, end = bounds(num_rows, group_rows)
    out, exists = channels_of(out_channels, BLOCK)
    head = tl.zeros([BLOCK, HEAD], tl.float32)
    for first in tl.range(0, channels, BLOCK_K, num_stages=STAGES):
        channel = first + tl.arange(0, BLOCK_K)
        w_tile = _filters(filters, out, exists, channel, channels)
        head = add_product(w_tile, tl.trans(_rows(x, start + tl.arange(0, HEAD), end, channel, channels)), head)
    shift = head_mean(head, end - start)
    total = tl.zeros([BLOCK, 4], tl.float32)
    squares = tl.zeros([BLOCK, 4], tl.float32)
    product = tl.zeros([BLOCK, ROWS], tl.float32)
    first_row, first = start + tl.program_id(1) * ROWS, 0
    tiles = tl.cdiv(tl.cdiv(end - start, ROWS) - tl.program_id(1), tl.num_programs(1))
    # One loop for tiles and inputs: the first loads of a tile are in flight while the tile before it is stored.
    for _step in tl.range(0, tiles * tl.cdiv(channels, BLOCK_K), num_stages=STAGES):
        channel = first + tl.arange(0, BLOCK_K)
        row = first_row + tl.arange(0, ROWS)
        x_tile = _rows(x, row, end, channel, channels)
        w_tile = _filters(filters, out, exists, channel, channels)
        product = add_product(w_tile, tl.trans(x_tile), product)
        is_whole = first + BLOCK_K >= channels
        if is_whole:
            total, squares = store_tile(
                product, y, total, squares, shift, row, row < end, first_row + ROWS <= end, out, exists, out_channels,
                ROWS, BLOCK,
            )  # fmt: skip
            product = tl.zeros([BLOCK, ROWS], tl.float32)
        # Not in the branch: Triton 3.6 pipelines no loads whose addresses depend on one.
        first = tl.where(is_whole, 0, first + BLOCK_K)
        first_row += tl.where(is_whole, tl.num_programs(1) * ROWS, 0)
    merge_statistics(
        total, squares, shift, running_var, stats, partials, counters, out_channels, out, exists, end - start, eps,
        BLOCK,
    )  # fmt: skip
