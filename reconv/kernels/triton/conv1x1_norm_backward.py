"""Triton kernels of the backward pass of a 1x1 convolution and the batch norm behind it.

With few channels the gradient of the convolution's output is never written: a program computes a tile of it with all
channels, rounds it as separate kernels would, and multiplies it twice, for the gradients of the input and of the
filters. With many channels it is written, but not read for the gradient of the input. Programs are (1, split of the
rows, group).

Shapes: x and dx [rows, in]; y, dz and dy [rows, out]; filters [out, in]; x_stats and y_stats [groups, 3, channels];
sums and slope_sums [groups, out]; x_sums [2, groups, in]; filter_sums [groups, splits, out, in]; partials [groups,
splits, 2, in]. Tiles: dz_tile, y_tile and dy_tile [rows, out], x_tile [rows, in] or transposed, w_tile [in, out] or
[out, in], dx_tile [in, rows].

Hazards: OUT and IN are the exact numbers of channels, powers of two, since filters are loaded without masks. A NaN
passes the ReLU: masks ask where a value stops, never where it passes.
"""

import triton
import triton.language as tl

from reconv.kernels.triton.batch_norm import (
    STATISTICS,
    bounds,
    is_last,
    merged_sum,
    norm_line,
    store_partial,
)
from reconv.kernels.triton.conv_epilogue import round_pairs

_COUNTS = ["num_rows", "group_rows"]


@triton.jit
def gradient_line(stats, weight, sums, slope_sums, count, channels, channel):
    """Factors of dz and x, and summand, of the gradient of a norm's input: dx = dz * scale + (x * of_x + summand)."""
    mean, rstd, scale, _ = norm_line(stats, weight, weight, channels, channel, channel < channels)
    offset = tl.load(sums + channel) / count
    slope = tl.load(slope_sums + channel) / count * rstd
    return scale, -scale * slope, scale * (mean * slope - offset)


@triton.jit
def _fold(values, ROWS: tl.constexpr, IN: tl.constexpr):
    """The sums of a tile [channels, rows] over each thread's own values of a tensor core's product [channels, 4]."""
    values = tl.reshape(values, [IN, ROWS // 8, 4, 2])
    return tl.sum(tl.sum(values, 3), 1)


@triton.jit
def _store_sums(plain_sum, with_x, rstd, sums, groups, partials, counters, IN: tl.constexpr):
    """Store this program's sums [channels, 4]; the last program stores the sums of its group."""
    channel = tl.arange(0, IN)
    exists = channel < IN
    store_partial(partials, 0, 2, IN, channel, exists, tl.sum(plain_sum, 1))
    store_partial(partials, 1, 2, IN, channel, exists, tl.sum(with_x, 1))
    if is_last(counters):
        tl.store(sums + channel, merged_sum(partials, 0, 2, IN, channel, exists, IN))
        tl.store(sums + groups * IN + channel, merged_sum(partials, 1, 2, IN, channel, exists, IN) * rstd)


@triton.jit(do_not_specialize=_COUNTS)
def gradients(
    dz, y, y_stats, y_weight, sums, slope_sums, x, x_stats, x_weight, x_bias, filters, dx, filter_sums, x_sums,
    partials, counters, num_rows, group_rows, HAS_NORM: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr,
    IN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of a convolution y = conv(relu(norm(x))) or conv(x), from the gradient dz of norm(y).

    dx is the gradient of the convolution's input, before the ReLU if there is one; then x_sums are the sums over a
    group of dx and dx * xhat. `filter_sums` [groups * splits, out, in] are parts of the gradient of the filters.
    """
    start, end = bounds(num_rows, group_rows)
    group, groups = tl.program_id(2), tl.num_programs(2)
    out, channel = tl.arange(0, OUT), tl.arange(0, IN)
    scale, of_y, summand = gradient_line(
        y_stats + group * STATISTICS * OUT, y_weight, sums + group * OUT, slope_sums + group * OUT,
        (end - start).to(tl.float32), OUT, out,
    )  # fmt: skip
    if HAS_NORM:
        x_stats += group * STATISTICS * IN
        mean, rstd, x_scale, x_summand = norm_line(x_stats, x_weight, x_bias, IN, channel, channel < IN)
    w_tile = tl.load(filters + channel[:, None] + out[None, :] * IN)
    of_filters = tl.zeros([IN, OUT], tl.float32)
    plain_sum = tl.zeros([IN, 4], tl.float32)
    with_x = tl.zeros([IN, 4], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(end - start, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = start + tile * ROWS + tl.arange(0, ROWS)
        exists = (row < end)[:, None]
        dz_tile = tl.load(dz + row[:, None] * OUT + out[None, :], mask=exists, other=0.0).to(tl.float32)
        y_tile = tl.load(y + row[:, None] * OUT + out[None, :], mask=exists, other=0.0).to(tl.float32)
        x_tile = tl.load(x + row[:, None] * IN + channel[None, :], mask=exists, other=0.0)
        dy_tile = (dz_tile * scale[None, :] + (y_tile * of_y[None, :] + summand[None, :])).to(w_tile.dtype)
        dx_tile = round_pairs(tl.dot(w_tile, tl.trans(dy_tile), input_precision="ieee"), w_tile.dtype)
        input_tile = tl.trans(x_tile)  # rows that do not exist are 0
        if HAS_NORM:
            centered = input_tile.to(tl.float32)
            z = centered * x_scale[:, None] + x_summand[:, None]
            stopped = (row >= end)[None, :] | (z <= 0.0)  # not where it is NaN
            dx_tile = tl.where(stopped, 0.0, dx_tile)
            dx_sums_tile = dx_tile.to(tl.float32)
            plain_sum += _fold(dx_sums_tile, ROWS, IN)
            with_x += _fold(dx_sums_tile * (centered - mean[:, None]), ROWS, IN)
            input_tile = round_pairs(tl.where(stopped, 0.0, z), w_tile.dtype)
        tl.store(dx + row[None, :] * IN + channel[:, None], dx_tile, mask=(row < end)[None, :])
        of_filters = tl.dot(input_tile, dy_tile, of_filters, input_precision="ieee")
    place = (group * tl.num_programs(1) + tl.program_id(1)) * OUT * IN
    tl.store(filter_sums + place + out[None, :] * IN + channel[:, None], of_filters)
    if HAS_NORM:
        _store_sums(plain_sum, with_x, rstd, x_sums + group * IN, groups, partials, counters, IN)


@triton.jit(do_not_specialize=_COUNTS)
def gradients_in_blocks(
    dz, y, y_stats, y_weight, sums, slope_sums, x, x_stats, x_weight, x_bias, filters, dy, dx, x_sums, partials,
    counters, num_rows, group_rows, ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of y = conv(relu(norm(x))) and of its input before the ReLU, from the gradient dz of norm(y); and
    the sums over a group of the latter and of it times xhat. Channels of y are taken BLOCK at a time."""
    start, end = bounds(num_rows, group_rows)
    group, groups = tl.program_id(2), tl.num_programs(2)
    count = (end - start).to(tl.float32)
    channel = tl.arange(0, IN)
    y_stats += group * STATISTICS * OUT
    sums += group * OUT
    slope_sums += group * OUT
    x_stats += group * STATISTICS * IN
    mean, rstd, x_scale, x_summand = norm_line(x_stats, x_weight, x_bias, IN, channel, channel < IN)
    plain_sum = tl.zeros([IN, 4], tl.float32)
    with_x = tl.zeros([IN, 4], tl.float32)
    product = tl.zeros([IN, ROWS], tl.float32)
    first_row, first = start + tl.program_id(1) * ROWS, 0
    tiles = tl.cdiv(tl.cdiv(end - start, ROWS) - tl.program_id(1), tl.num_programs(1))
    # One loop for tiles and blocks: the first loads of a tile are in flight while the tile before it is stored.
    for _step in tl.range(0, tiles * (OUT // BLOCK), num_stages=STAGES):
        row, out = first_row + tl.arange(0, ROWS), first + tl.arange(0, BLOCK)
        at, exists = row[:, None] * OUT + out[None, :], (row < end)[:, None]
        dz_tile = tl.load(dz + at, mask=exists, other=0.0).to(tl.float32)
        y_tile = tl.load(y + at, mask=exists, other=0.0).to(tl.float32)
        w_tile = tl.load(filters + out[:, None] * IN + channel[None, :])
        scale, of_y, summand = gradient_line(y_stats, y_weight, sums, slope_sums, count, OUT, out)
        dy_tile = (dz_tile * scale[None, :] + (y_tile * of_y[None, :] + summand[None, :])).to(w_tile.dtype)
        tl.store(dy + at, dy_tile, mask=exists)
        product = tl.dot(tl.trans(w_tile), tl.trans(dy_tile), product, input_precision="ieee")
        is_whole = first + BLOCK >= OUT
        if is_whole:
            x_tile = tl.load(x + row[:, None] * IN + channel[None, :], mask=exists, other=0.0)
            x_tile = tl.trans(x_tile).to(tl.float32)
            dx_tile = round_pairs(product, w_tile.dtype)
            stopped = (row >= end)[None, :] | (x_tile * x_scale[:, None] + x_summand[:, None] <= 0.0)
            dx_tile = tl.where(stopped, 0.0, dx_tile)
            dx_sums_tile = dx_tile.to(tl.float32)
            plain_sum += _fold(dx_sums_tile, ROWS, IN)
            with_x += _fold(dx_sums_tile * (x_tile - mean[:, None]), ROWS, IN)
            tl.store(dx + row[None, :] * IN + channel[:, None], dx_tile, mask=(row < end)[None, :])
            product = tl.zeros([IN, ROWS], tl.float32)
        # Not in the branch: Triton 3.6 pipelines no loads whose addresses depend on one.
        first = tl.where(is_whole, 0, first + BLOCK)
        first_row += tl.where(is_whole, tl.num_programs(1) * ROWS, 0)
    _store_sums(plain_sum, with_x, rstd, x_sums + group * IN, groups, partials, counters, IN)
