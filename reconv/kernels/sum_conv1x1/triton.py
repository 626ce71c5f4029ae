"""Triton kernel of the backward pass of a residual sum that a 1x1 convolution reads.

The input gradient of the convolution is a matrix product that is never written: each tile of it is rounded as the
convolution would round it, then treated as `batch_norm.triton.gradient_sums` treats the gradient it reads. Programs are
(block of channels, split of the rows, group).
"""

import triton
import triton.language as tl

from reconv.kernels.batch_norm.triton import (
    ADD_NORM,
    MEAN,
    ROWS_PER_THREAD,
    RSTD,
    STATISTICS,
    bounds,
    channels_of,
    is_last,
    merged_sum,
    row_of,
    store_partial,
)

_COUNTS = ["eighths", "num_rows", "group_rows", "tiles", "out_eighths"]


@triton.jit
def _fold(values, ROWS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """A tile [rows, channels] as [rows / lanes, lanes, channels] in float32; a thread has all rows of a lane."""
    return tl.reshape(values, [ROWS // LANES, LANES, BLOCK]).to(tl.float32)


@triton.jit
def _passed(bits, tile, tiles, channels, channel, exists, ROWS: tl.constexpr, LANES: tl.constexpr):
    """The ReLU mask of a tile [rows / lanes, lanes, channels]; a byte has the rows of one lane of a whole tile."""
    slices: tl.constexpr = ROWS // LANES
    first = tile * slices
    lane = (tl.program_id(2) * tiles + first // ROWS_PER_THREAD) * LANES + tl.arange(0, LANES)
    byte = tl.load(
        bits + lane[:, None] * channels + channel[None, :], mask=(lane >= 0)[:, None] & exists[None, :], other=0
    )
    place = first % ROWS_PER_THREAD + tl.arange(0, slices)
    return (byte.to(tl.int32)[None, :, :] >> place[:, None, None]) & 1


@triton.jit(do_not_specialize=_COUNTS)
def gradient_sums(
    dy, filters, gradient2, x, stats, other, other_stats, bits, dz, sums, partials, counters, eighths, num_rows,
    group_rows, tiles, out_eighths, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OUT: tl.constexpr, LANES: tl.constexpr,
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
    some = tl.load(
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
        given = tl.load(
            dy + row * out_channels + out[None, :], mask=(row < end) & (out < out_channels)[None, :], other=0.0
        )
        product = tl.dot(given, some, input_precision="ieee").to(dz.dtype.element_ty)
        # Triton 3.6 computes in the layout of the loads if they come after the product, else in both layouts. The
        # GPU starts them during the product.
        value_x = tl.load(x + at, mask=mask, other=0.0)
        added = tl.load(gradient2 + at, mask=mask, other=0.0)
        if RESIDUAL == ADD_NORM:
            value_other = tl.load(other + at, mask=mask, other=0.0)
        passed = _passed(bits, tile, tiles, channels, channel, exists, ROWS, LANES)
        centered = _fold(value_x, ROWS, LANES, BLOCK) - mean[None, :, :]
        value = _fold(product, ROWS, LANES, BLOCK) + _fold(added, ROWS, LANES, BLOCK)
        kept = tl.where(passed != 0, value, 0.0).to(dz.dtype.element_ty)
        tl.store(dz + at, tl.reshape(kept, [ROWS, BLOCK]), mask=mask)
        value = kept.to(tl.float32)  # sum the rounded values that the second pass will read
        # A masked row has gradient 0, so it adds nothing whatever x - mean is there.
        plain_sum += tl.sum(value, 0)
        with_x += tl.sum(value * centered, 0)
        if RESIDUAL == ADD_NORM:
            other_centered = _fold(value_other, ROWS, LANES, BLOCK) - other_mean[None, :, :]
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
