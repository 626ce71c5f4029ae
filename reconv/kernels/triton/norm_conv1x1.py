"""Triton kernels of a 1x1 convolution of act(batch_norm(x)) and its gradients.

The activation is never written: forward and backward recompute it from x, and backward recomputes its gradient from the
few output channels in each of its two passes. Products are in the tensors' dtype and accumulated in float32. Programs
of the backward pass are (block of channels, split of the rows, group).

Shapes: x and dx [rows, channels]; y and dy [rows, outputs]; filters [outputs, channels]; stats [groups, 3, channels];
sums [2, groups, channels]; filter_sums [groups, splits, outputs, channels]; partials [groups, splits, 2, channels].
Tiles: x_tile [rows, channels], w_tile [channels, outputs] or [outputs, channels], dy_tile [rows, outputs].

Hazards: masked rows get act(norm(0)), which may not be 0; their gradient is 0, and `project` does not store them.
"""

import triton
import triton.language as tl

from reconv.kernels.triton.batch_norm import (
    STATISTICS,
    activation_grad,
    apply_activation,
    bounds,
    channels_of,
    is_last,
    merged_sum,
    norm_line,
    rows_of_tile,
    store_partial,
)

_COUNTS = ["eighths", "num_rows", "group_rows", "out_eighths"]


@triton.jit(do_not_specialize=_COUNTS)
def project(
    x, stats, weight, bias, filters, y, eighths, num_rows, group_rows, out_eighths, ACT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, OUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y[row, out] = sum over channels of act(norm(x))[row, channel] * filters[out, channel]."""
    channels, out_channels = eighths * 8, out_eighths * 8
    start, end = bounds(num_rows, group_rows)
    stats += tl.program_id(2) * STATISTICS * channels
    row, out = rows_of_tile(start, tl.program_id(0), ROWS), tl.arange(0, OUT)
    total = tl.zeros([ROWS, OUT], tl.float32)
    for first in tl.range(0, channels, BLOCK, num_stages=STAGES):
        channel = first + tl.arange(0, BLOCK)
        exists = channel < channels
        x_tile = tl.load(x + row * channels + channel[None, :], mask=(row < end) & exists[None, :], other=0.0)
        w_tile = tl.load(
            filters + channel[:, None] + out[None, :] * channels,
            mask=exists[:, None] & (out < out_channels)[None, :],
            other=0.0,
        )
        _mean, _rstd, factor, summand = norm_line(stats, weight, bias, channels, channel, exists)
        z = x_tile.to(tl.float32) * factor[None, :] + summand[None, :]
        total = tl.dot(apply_activation(z, ACT).to(w_tile.dtype), w_tile, total, input_precision="ieee")
    mask = (row < end) & (out < out_channels)[None, :]
    tl.store(y + row * out_channels + out[None, :], total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _filters(filters, out_channels, channels, channel, exists, OUT: tl.constexpr):
    """The filters of this program's channels [out, channels]."""
    out = tl.arange(0, OUT)
    mask = (out < out_channels)[:, None] & exists[None, :]
    return tl.load(filters + out[:, None] * channels + channel[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=_COUNTS)
def gradient_sums(
    dy, x, stats, weight, bias, filters, sums, filter_sums, partials, counters, eighths, num_rows, group_rows,
    out_eighths, ACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OUT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Sums over a group of dz and dz * xhat, and per split of dy * act(norm(x)) [out, channels]."""
    channels, out_channels = eighths * 8, out_eighths * 8
    start, end = bounds(num_rows, group_rows)
    channel, exists = channels_of(channels, BLOCK)
    stats += tl.program_id(2) * STATISTICS * channels
    mean, rstd, factor, summand = norm_line(stats, weight, bias, channels, channel, exists)
    w_tile = _filters(filters, out_channels, channels, channel, exists, OUT)
    out = tl.arange(0, OUT)
    plain_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    with_x = tl.zeros([ROWS, BLOCK], tl.float32)
    of_filters = tl.zeros([OUT, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(end - start, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = rows_of_tile(start, tile, ROWS)
        dy_tile = tl.load(
            dy + row * out_channels + out[None, :], mask=(row < end) & (out < out_channels)[None, :], other=0.0
        )
        x_tile = tl.load(x + row * channels + channel[None, :], mask=(row < end) & exists[None, :], other=0.0)
        x_tile = x_tile.to(tl.float32)
        z = x_tile * factor[None, :] + summand[None, :]
        # A masked row has gradient 0, so it adds nothing whatever z is there.
        dz = activation_grad(tl.dot(dy_tile, w_tile, input_precision="ieee"), z, ACT)
        plain_sum += dz
        with_x += dz * (x_tile - mean[None, :])
        # In this order: the other way round Triton 3.6 does not pipeline the loads.
        of_filters = tl.dot(
            tl.trans(dy_tile), apply_activation(z, ACT).to(dy_tile.dtype), of_filters, input_precision="ieee"
        )
    place = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * out_channels + out
    mask = (out < out_channels)[:, None] & exists[None, :]
    tl.store(filter_sums + place[:, None] * channels + channel[None, :], of_filters, mask=mask)
    store_partial(partials, 0, 2, channels, channel, exists, tl.sum(plain_sum, 0))
    store_partial(partials, 1, 2, channels, channel, exists, tl.sum(with_x, 0))
    if is_last(counters):
        into = sums + tl.program_id(2) * channels + channel
        tl.store(into, merged_sum(partials, 0, 2, channels, channel, exists, BLOCK), mask=exists)
        merged = merged_sum(partials, 1, 2, channels, channel, exists, BLOCK)
        tl.store(into + tl.num_programs(2) * channels, merged * rstd, mask=exists)


@triton.jit(do_not_specialize=_COUNTS)
def gradient(
    dy, x, stats, weight, bias, filters, sums, dx, eighths, num_rows, group_rows, out_eighths, ACT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, OUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of the norm's input."""
    channels, out_channels = eighths * 8, out_eighths * 8
    start, end = bounds(num_rows, group_rows)
    channel, exists = channels_of(channels, BLOCK)
    stats += tl.program_id(2) * STATISTICS * channels
    sums += tl.program_id(2) * channels
    count = (end - start).to(tl.float32)
    mean, rstd, factor, summand = norm_line(stats, weight, bias, channels, channel, exists)
    offset = tl.load(sums + channel, mask=exists, other=0.0) / count
    slope = tl.load(sums + tl.num_programs(2) * channels + channel, mask=exists, other=0.0) / count * rstd
    w_tile = _filters(filters, out_channels, channels, channel, exists, OUT)
    out = tl.arange(0, OUT)
    for tile in tl.range(tl.program_id(1), tl.cdiv(end - start, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = rows_of_tile(start, tile, ROWS)
        dy_tile = tl.load(
            dy + row * out_channels + out[None, :], mask=(row < end) & (out < out_channels)[None, :], other=0.0
        )
        at, mask = row * channels + channel[None, :], (row < end) & exists[None, :]
        x_tile = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        dz = activation_grad(
            tl.dot(dy_tile, w_tile, input_precision="ieee"), x_tile * factor[None, :] + summand[None, :], ACT
        )
        result = factor[None, :] * (dz - offset[None, :] - (x_tile - mean[None, :]) * slope[None, :])
        tl.store(dx + at, result.to(dx.dtype.element_ty), mask=mask)
