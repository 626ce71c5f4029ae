"""Triton kernels of act(batch_norm(conv1x1(x))) and its gradients, for convolutions with few inputs.

The convolution's output y is never in memory: every kernel recomputes its tile of y from the few channels of x, as a
product in the tensors' dtype accumulated in float32. A row is a pixel. Programs are (block of output channels, split of
the rows, group), except those of the input gradient, which need all output channels of their rows.

Shapes: x and dx [rows, inputs]; filters and dfilters [outputs, inputs]; da (the gradient of the activation) [rows,
outputs]; stats [groups, 3, outputs]; lines [groups, 4, outputs]; sums [2, groups, outputs]; parts [groups, splits] of
dz * x and y * x [outputs, inputs], of dz [outputs] and of x [inputs]. Tiles: x_tile [rows, inputs], w_tile [inputs,
outputs], da_tile [rows, outputs].

Hazards: masked rows must have da 0 and x 0, else they enter the sums. `weight_gradients` adds groups in order; it is
one launch for all groups.
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
    norm_line,
    rows_of_tile,
    store_partial,
    store_statistics,
)

FACTOR, SUMMAND, SLOPE, OFFSET, LINES = (tl.constexpr(i) for i in range(5))
_ONES: tl.constexpr = tl.constexpr(16)  # columns of a product that sums: the fewest of tensor cores

_COUNTS = ["eighths", "num_rows", "group_rows", "out_eighths"]


@triton.jit
def _inputs(x, row, end, channels, IN: tl.constexpr):
    """x of these rows [rows, inputs]; 0 beyond its channels and the group's rows."""
    k = tl.arange(0, IN)[None, :]
    return tl.load(x + row * channels + k, mask=(row < end) & (k < channels), other=0.0)


@triton.jit
def _filters(filters, channels, out, exists, IN: tl.constexpr):
    """The filters of these output channels [inputs, outputs]."""
    k = tl.arange(0, IN)[:, None]
    return tl.load(filters + out[None, :] * channels + k, mask=exists[None, :] & (k < channels), other=0.0)


@triton.jit(do_not_specialize=_COUNTS)
def statistics(
    x, filters, running_var, result, partials, counters, eighths, num_rows, group_rows, out_eighths, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, IN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Mean, unbiased variance and 1 / std of each channel and group of y, in one pass.

    Sums are of y minus the mean of the group's first rows, so that squares do not cancel.
    """
    channels, outputs = eighths * 8, out_eighths * 8
    start, end = bounds(num_rows, group_rows)
    out, exists = channels_of(outputs, BLOCK)
    w_tile = _filters(filters, channels, out, exists, IN)
    head = tl.dot(_inputs(x, rows_of_tile(start, 0, ROWS), end, channels, IN), w_tile, input_precision="ieee")
    shift = tl.sum(head, 0) / tl.minimum(end - start, ROWS).to(tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(end - start, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = rows_of_tile(start, tile, ROWS)
        y = tl.dot(_inputs(x, row, end, channels, IN), w_tile, input_precision="ieee")
        value = tl.where(row < end, y - shift[None, :], 0.0)
        total += value
        squares += value * value
    store_partial(partials, 0, 2, outputs, out, exists, tl.sum(total, 0))
    store_partial(partials, 1, 2, outputs, out, exists, tl.sum(squares, 0))
    if is_last(counters):
        store_statistics(result, running_var, partials, shift, end - start, outputs, out, exists, eps, BLOCK)


@triton.jit(do_not_specialize=_COUNTS)
def output(
    x, filters, stats, weight, bias, a, eighths, num_rows, group_rows, out_eighths, ACT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, IN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """a = act(norm(y))"""
    channels, outputs = eighths * 8, out_eighths * 8
    start, end = bounds(num_rows, group_rows)
    out, exists = channels_of(outputs, BLOCK)
    stats += tl.program_id(2) * STATISTICS * outputs
    _mean, _rstd, factor, summand = norm_line(stats, weight, bias, outputs, out, exists)
    w_tile = _filters(filters, channels, out, exists, IN)
    for tile in tl.range(tl.program_id(1), tl.cdiv(end - start, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = rows_of_tile(start, tile, ROWS)
        y = tl.dot(_inputs(x, row, end, channels, IN), w_tile, input_precision="ieee")
        value = apply_activation(y * factor[None, :] + summand[None, :], ACT).to(a.dtype.element_ty)
        tl.store(a + row * outputs + out[None, :], value, mask=(row < end) & exists[None, :])


@triton.jit(do_not_specialize=_COUNTS)
def gradient_sums(
    da, x, filters, stats, weight, bias, parts, eighths, num_rows, group_rows, out_eighths, ACT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, IN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Per split, the sums over rows of dz * x and y * x [outputs, inputs], of dz [outputs] and of x [inputs].

    dz is the gradient before the activation. All sums are products of tensor cores: it is their rounded factors, dz
    and y in the tensors' dtype, that are summed.
    """
    channels, outputs = eighths * 8, out_eighths * 8
    start, end = bounds(num_rows, group_rows)
    out, exists = channels_of(outputs, BLOCK)
    stats += tl.program_id(2) * STATISTICS * outputs
    _mean, _rstd, factor, summand = norm_line(stats, weight, bias, outputs, out, exists)
    w_tile = _filters(filters, channels, out, exists, IN)
    dz_x = tl.zeros([BLOCK, IN], tl.float32)
    y_x = tl.zeros([BLOCK, IN], tl.float32)
    dz_sum = tl.zeros([BLOCK, _ONES], tl.float32)  # equal columns
    x_sum = tl.zeros([BLOCK, IN], tl.float32)  # equal rows
    for tile in tl.range(tl.program_id(1), tl.cdiv(end - start, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = rows_of_tile(start, tile, ROWS)
        x_tile = _inputs(x, row, end, channels, IN)
        da_tile = tl.load(da + row * outputs + out[None, :], mask=(row < end) & exists[None, :], other=0.0)
        y = tl.dot(x_tile, w_tile, input_precision="ieee")
        # A masked row has gradient 0 and x 0, so it adds nothing.
        dz = activation_grad(da_tile.to(tl.float32), y * factor[None, :] + summand[None, :], ACT)
        dz = tl.trans(dz.to(x_tile.dtype))
        dz_x = tl.dot(dz, x_tile, dz_x, input_precision="ieee")
        y_x = tl.dot(tl.trans(y.to(x_tile.dtype)), x_tile, y_x, input_precision="ieee")
        dz_sum = tl.dot(dz, tl.full([ROWS, _ONES], 1.0, x_tile.dtype), dz_sum, input_precision="ieee")
        x_sum = tl.dot(tl.full([BLOCK, ROWS], 1.0, x_tile.dtype), x_tile, x_sum, input_precision="ieee")
    k, column = tl.arange(0, IN)[None, :], tl.arange(0, _ONES)[None, :]
    products = outputs * channels
    parts += (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * (2 * products + outputs + channels)
    at, mask = out[:, None] * channels + k, exists[:, None] & (k < channels)
    tl.store(parts + at, dz_x, mask=mask)
    tl.store(parts + products + at, y_x, mask=mask)
    tl.store(parts + 2 * products + out[:, None] + column, dz_sum, mask=exists[:, None] & (column == 0))
    tl.store(parts + 2 * products + outputs + k + 0 * at, x_sum, mask=mask & (out == 0)[:, None])


@triton.jit(do_not_specialize=[*_COUNTS, "num_groups"])
def weight_gradients(
    parts, filters, stats, weight, bias, dfilters, sums, lines, eighths, num_rows, group_rows, out_eighths, num_groups,
    BLOCK: tl.constexpr, IN: tl.constexpr,
):  # fmt: skip
    """The filters' gradient, sums of dz and dz * yhat, and the numbers per channel that the input gradient needs.

    dy = factor * dz - slope * y - offset, so its product with x follows from those of dz, y and 1.
    """
    channels, outputs = eighths * 8, out_eighths * 8
    out, exists = channels_of(outputs, BLOCK)
    k = tl.arange(0, IN)[None, :]
    at, mask = out[:, None] * channels + k, exists[:, None] & (k < channels)
    w_tile = tl.load(filters + at, mask=mask, other=0.0).to(tl.float32)
    products = outputs * channels
    total = tl.zeros([BLOCK, IN], tl.float32)
    for group in range(num_groups):
        start = group * group_rows
        count = tl.where(group == num_groups - 1, num_rows - start, group_rows).to(tl.float32)
        mean, rstd, factor, summand = norm_line(
            stats + group * STATISTICS * outputs, weight, bias, outputs, out, exists
        )
        group_parts = parts + group * (2 * products + outputs + channels)
        dz_x = tl.load(group_parts + at, mask=mask, other=0.0)
        y_x = tl.load(group_parts + products + at, mask=mask, other=0.0)
        dz_sum = tl.load(group_parts + 2 * products + out, mask=exists, other=0.0)
        x_sum = tl.load(group_parts + 2 * products + outputs + k, mask=k < channels, other=0.0)
        dz_yhat = (tl.sum(dz_x * w_tile, 1) - mean * dz_sum) * rstd  # y is a sum of x * filters
        slope = factor * rstd * dz_yhat / count
        offset = factor * dz_sum / count - slope * mean
        total += factor[:, None] * dz_x - slope[:, None] * y_x - offset[:, None] * x_sum
        tl.store(sums + group * outputs + out, dz_sum, mask=exists)
        tl.store(sums + (num_groups + group) * outputs + out, dz_yhat, mask=exists)
        into = lines + group * LINES * outputs + out
        tl.store(into + FACTOR * outputs, factor, mask=exists)
        tl.store(into + SUMMAND * outputs, summand, mask=exists)
        tl.store(into + SLOPE * outputs, slope, mask=exists)
        tl.store(into + OFFSET * outputs, offset, mask=exists)
    tl.store(dfilters + at, total.to(dfilters.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_COUNTS)
def input_gradient(
    da, x, filters, lines, dx, eighths, num_rows, group_rows, out_eighths, ACT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, IN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx = dy * filters; programs are (tile of rows, 1, group)."""
    channels, outputs = eighths * 8, out_eighths * 8
    start, end = bounds(num_rows, group_rows)
    lines += tl.program_id(2) * LINES * outputs
    row, k = rows_of_tile(start, tl.program_id(0), ROWS), tl.arange(0, IN)[None, :]
    x_tile = _inputs(x, row, end, channels, IN)
    total = tl.zeros([ROWS, IN], tl.float32)
    for first in tl.range(0, outputs, BLOCK, num_stages=STAGES):
        out = first + tl.arange(0, BLOCK)
        exists = out < outputs
        da_tile = tl.load(da + row * outputs + out[None, :], mask=(row < end) & exists[None, :], other=0.0)
        w_tile = _filters(filters, channels, out, exists, IN)
        factor = tl.load(lines + FACTOR * outputs + out, mask=exists, other=0.0)[None, :]
        summand = tl.load(lines + SUMMAND * outputs + out, mask=exists, other=0.0)[None, :]
        slope = tl.load(lines + SLOPE * outputs + out, mask=exists, other=0.0)[None, :]
        offset = tl.load(lines + OFFSET * outputs + out, mask=exists, other=0.0)[None, :]
        y = tl.dot(x_tile, w_tile, input_precision="ieee")
        dz = activation_grad(da_tile.to(tl.float32), y * factor + summand, ACT)
        dy = factor * dz - (slope * y + offset)
        total = tl.dot(dy.to(x_tile.dtype), tl.trans(w_tile), total, input_precision="ieee")
    tl.store(dx + row * channels + k, total.to(dx.dtype.element_ty), mask=(row < end) & (k < channels))
