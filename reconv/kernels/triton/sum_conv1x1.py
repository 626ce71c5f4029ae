"""Triton kernels of a residual sum that a 1x1 convolution reads, forward and backward.

Forward, a program computes tiles of the sum with all channels and multiplies them before they leave the SM. Backward,
the input gradient of the convolution is a matrix product that is never written: each tile of it is rounded as the
convolution would round it, then treated as `batch_norm.gradient_sums` treats the gradient it reads. Programs are
(block of channels, split of the rows, group).

A byte of the ReLU mask has eight rows of a channel, `lanes` rows apart from each other.

Shapes: x, other, y, dz and gradient2 [rows, channels]; out and dy [rows, outputs]; filters [outputs, channels]; stats,
other_stats and out_stats [groups, 3, channels]; sums [3, groups, channels]; bits [groups, tiles, lanes, channels].
Tiles: w_tile [outputs, channels], y_tile [rows, channels], dy_tile [rows, outputs], x_tile, other_tile and dz_tile
[rows, channels].

Hazards: the mask is written in tiles of the forward kernel and read in tiles of the backward kernel, which may be
smaller: MASK_LANES must be that of the writer. `sum_conv` has no mask for channels: CHANNELS and OUT are exact.
"""

import triton
import triton.language as tl

from reconv.kernels.triton.batch_norm import (
    ADD_NORM,
    MEAN,
    RELU,
    ROWS_PER_THREAD,
    RSTD,
    STATISTICS,
    apply_activation,
    bounds,
    channels_of,
    is_last,
    merged_sum,
    row_of,
    store_partial,
    store_relu_mask,
)
from reconv.kernels.triton.conv_epilogue import HEAD, add_product, head_mean, merge_statistics, store_tile

_FORWARD_COUNTS = ["num_rows", "group_rows", "tiles"]
_COUNTS = ["eighths", "num_rows", "group_rows", "tiles", "out_eighths"]


@triton.jit
def _fold(values, ROWS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """A tile [rows, channels] as [rows / lanes, lanes, channels] in float32; a thread has all rows of a lane."""
    return tl.reshape(values, [ROWS // LANES, LANES, BLOCK]).to(tl.float32)


@triton.jit
def _sum_tile(x, other, row, end, channel, mean, scale, shift, other_mean, other_scale, CHANNELS: tl.constexpr,
              RESIDUAL: tl.constexpr):  # fmt: skip
    """norm(x) + other or norm(x) + norm(other) of some rows [rows, channels], in float32."""
    at, exists = row[:, None] * CHANNELS + channel[None, :], (row < end)[:, None]
    value = tl.load(x + at, mask=exists, other=0.0).to(tl.float32)
    added = tl.load(other + at, mask=exists, other=0.0).to(tl.float32)
    z = (value - mean) * scale + shift
    if RESIDUAL == ADD_NORM:
        added = (added - other_mean) * other_scale
    return z + added


@triton.jit(do_not_specialize=_FORWARD_COUNTS)
def sum_conv(
    x, stats, weight, bias, other, other_stats, other_weight, other_bias, filters, y, bits, out, running_var, out_stats,
    partials, counters, num_rows, group_rows, tiles, eps, RESIDUAL: tl.constexpr, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr, OUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y = relu(norm(x) + other), its ReLU mask, the convolution out = conv(y), and the statistics of out."""
    LANES: tl.constexpr = ROWS // ROWS_PER_THREAD
    start, end = bounds(num_rows, group_rows)
    group = tl.program_id(2)
    channel, outputs = tl.arange(0, CHANNELS), tl.arange(0, OUT)
    exists = channel < CHANNELS
    stats += group * STATISTICS * CHANNELS
    mean = row_of(stats + MEAN * CHANNELS, channel, exists)
    scale = row_of(weight, channel, exists) * row_of(stats + RSTD * CHANNELS, channel, exists)
    shift = row_of(bias, channel, exists)
    other_mean, other_scale = mean, scale  # not used without a norm
    if RESIDUAL == ADD_NORM:
        other_stats += group * STATISTICS * CHANNELS
        other_mean = row_of(other_stats + MEAN * CHANNELS, channel, exists)
        other_scale = row_of(other_weight, channel, exists) * row_of(other_stats + RSTD * CHANNELS, channel, exists)
        shift += row_of(other_bias, channel, exists)
    w_tile = tl.load(filters + outputs[:, None] * CHANNELS + channel[None, :])
    head = _sum_tile(
        x, other, start + tl.arange(0, HEAD), end, channel, mean, scale, shift, other_mean, other_scale, CHANNELS,
        RESIDUAL,
    )  # fmt: skip
    inside = (start + tl.arange(0, HEAD) < end)[:, None]
    head = tl.where(inside, apply_activation(head, RELU), 0.0).to(w_tile.dtype)
    center = head_mean(add_product(w_tile, tl.trans(head), tl.zeros([OUT, HEAD], tl.float32)), end - start)
    total = tl.zeros([OUT, 4], tl.float32)
    squares = tl.zeros([OUT, 4], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(end - start, ROWS), tl.num_programs(1), num_stages=STAGES):
        first = start + tile * ROWS
        row = first + tl.arange(0, ROWS)
        z = _sum_tile(
            x, other, row, end, channel, mean, scale, shift, other_mean, other_scale, CHANNELS, RESIDUAL
        )  # fmt: skip
        store_relu_mask(bits, z, tile, tiles, CHANNELS, channel, exists, LANES, CHANNELS)
        y_tile = apply_activation(z, RELU).to(w_tile.dtype)
        tl.store(y + row[:, None] * CHANNELS + channel[None, :], y_tile, mask=(row < end)[:, None])
        product = add_product(w_tile, tl.trans(y_tile), tl.zeros([OUT, ROWS], tl.float32))
        total, squares = store_tile(
            product, out, total, squares, center, row, row < end, first + ROWS <= end, outputs, outputs < OUT, OUT,
            ROWS, OUT,
        )  # fmt: skip
    merge_statistics(
        total, squares, center, running_var, out_stats, partials, counters, OUT, outputs, outputs < OUT, end - start,
        eps, OUT,
    )  # fmt: skip


@triton.jit
def _passed(
    bits, tile, tiles, channels, channel, exists, ROWS: tl.constexpr, LANES: tl.constexpr, MASK_LANES: tl.constexpr
):
    """The ReLU mask of a tile [rows / lanes, lanes, channels]; a tile of the mask has 8 * MASK_LANES rows."""
    PER_MASK: tl.constexpr = 8 * MASK_LANES // ROWS  # tiles
    row = tile % PER_MASK * ROWS + tl.arange(0, ROWS // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    lane = (tl.program_id(2) * tiles + tile // PER_MASK) * MASK_LANES + tl.arange(0, LANES) % MASK_LANES
    byte = tl.load(
        bits + lane[:, None] * channels + channel[None, :], mask=(lane >= 0)[:, None] & exists[None, :], other=0
    )
    return (byte.to(tl.int32)[None, :, :] >> (row // MASK_LANES)[:, :, None]) & 1


@triton.jit(do_not_specialize=_COUNTS)
def gradient_sums(
    dy, filters, gradient2, x, stats, other, other_stats, bits, dz, sums, partials, counters, eighths, num_rows,
    group_rows, tiles, out_eighths, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OUT: tl.constexpr, LANES: tl.constexpr, MASK_LANES: tl.constexpr,
):  # fmt: skip
    """dz, and sums over a group of dz, dz * xhat and, for a sum of norms, dz * xhat of the other.

    dz is the gradient before the ReLU, from dy * filters plus the gradient of the sum's second use.
    """
    channels, out_channels = eighths * 8, out_eighths * 8
    start, end = bounds(num_rows, group_rows)
    channel, exists = channels_of(channels, BLOCK)
    stats += tl.program_id(2) * STATISTICS * channels
    mean = row_of(stats + MEAN * channels, channel, exists)
    other_stats += tl.program_id(2) * STATISTICS * channels
    if RESIDUAL == ADD_NORM:
        other_mean = row_of(other_stats + MEAN * channels, channel, exists)
    out = tl.arange(0, OUT)
    w_tile = tl.load(
        filters + out[:, None] * channels + channel[None, :],
        mask=(out < out_channels)[:, None] & exists[None, :],
        other=0.0,
    )
    plain_sum = tl.zeros([LANES, BLOCK], tl.float32)
    with_x = tl.zeros([LANES, BLOCK], tl.float32)
    with_other = tl.zeros([LANES, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(end - start, ROWS), tl.num_programs(1)):
        row = start + tile * ROWS + tl.arange(0, ROWS)[:, None]
        mask = (row < end) & exists[None, :]
        at = row * channels + channel[None, :]
        dy_tile = tl.load(
            dy + row * out_channels + out[None, :], mask=(row < end) & (out < out_channels)[None, :], other=0.0
        )
        product = tl.dot(dy_tile, w_tile, input_precision="ieee").to(dz.dtype.element_ty)
        # Triton 3.6 computes in the layout of the loads if they come after the product, else in both layouts. The
        # GPU starts them during the product.
        x_tile = tl.load(x + at, mask=mask, other=0.0)
        dy2_tile = tl.load(gradient2 + at, mask=mask, other=0.0)
        if RESIDUAL == ADD_NORM:
            other_tile = tl.load(other + at, mask=mask, other=0.0)
        passed = _passed(bits, tile, tiles, channels, channel, exists, ROWS, LANES, MASK_LANES)
        centered = _fold(x_tile, ROWS, LANES, BLOCK) - mean[None, :, :]
        value = _fold(product, ROWS, LANES, BLOCK) + _fold(dy2_tile, ROWS, LANES, BLOCK)
        dz_tile = tl.where(passed != 0, value, 0.0).to(dz.dtype.element_ty)
        tl.store(dz + at, tl.reshape(dz_tile, [ROWS, BLOCK]), mask=mask)
        value = dz_tile.to(tl.float32)  # sum the rounded values that the second pass will read
        # A masked row has gradient 0, so it adds nothing whatever x - mean is there.
        plain_sum += tl.sum(value, 0)
        with_x += tl.sum(value * centered, 0)
        if RESIDUAL == ADD_NORM:
            other_centered = _fold(other_tile, ROWS, LANES, BLOCK) - other_mean[None, :, :]
            with_other += tl.sum(value * other_centered, 0)
    store_partial(partials, 0, 3, channels, channel, exists, tl.sum(plain_sum, 0))
    store_partial(partials, 1, 3, channels, channel, exists, tl.sum(with_x, 0))
    if RESIDUAL == ADD_NORM:
        store_partial(partials, 2, 3, channels, channel, exists, tl.sum(with_other, 0))
    if is_last(counters):
        groups = tl.num_programs(2)
        into = sums + tl.program_id(2) * channels + channel
        tl.store(into, merged_sum(partials, 0, 3, channels, channel, exists, BLOCK), mask=exists)
        rstd = tl.load(stats + RSTD * channels + channel, mask=exists, other=0.0)
        merged = merged_sum(partials, 1, 3, channels, channel, exists, BLOCK)
        tl.store(into + groups * channels, merged * rstd, mask=exists)
        if RESIDUAL == ADD_NORM:
            rstd = tl.load(other_stats + RSTD * channels + channel, mask=exists, other=0.0)
            merged = merged_sum(partials, 2, 3, channels, channel, exists, BLOCK)
            tl.store(into + 2 * groups * channels, merged * rstd, mask=exists)
