"""Triton kernels of batch norm and ReLU over three parts, each a range of channels of a channels_last tensor.

The parts have the same rows and any widths; each reads and writes rows of its own stride, so that a part can be some
channels of a wider tensor. One launch computes all three: programs are (block of channels of a part, split of the rows,
group). Statistics, sums and partial sums have the channels of the parts one after another.

Shapes: x0 to x2 and dx0 to dx2 [rows, width], rows x_stride apart; y0 to y2 and dy0 to dy2 [rows, width], rows y_stride
apart; weight and bias of a part [width]; stats [groups, 3, all channels]; sums [2, groups, all channels].

Hazards: parts of one launch write into one tensor, so their columns must not overlap. A part's running variance is
addressed by the number of a channel among all, hence the shifted pointer.
"""

import triton
import triton.language as tl

from reconv.kernels.triton.batch_norm import (
    MEAN,
    ROWS_PER_THREAD,
    RSTD,
    STATISTICS,
    activation_grad,
    apply_activation,
    bounds,
    fold,
    is_last,
    merged_sum,
    row_of,
    store_partial,
    store_statistics,
    tile_of,
)

_RELU: tl.constexpr = tl.constexpr(1)
_COUNTS = [
    *("width0", "width1", "width2", "x_stride0", "x_stride1", "x_stride2", "y_stride0", "y_stride1", "y_stride2"),
    *("num_rows", "group_rows"),
]  # widths and strides in eighths of channels, so that loads of 16 bytes are known to be aligned


@triton.jit
def _choose(part, first, second, third):
    return tl.where(part == 0, first, tl.where(part == 1, second, third))


@triton.jit
def _part_of(width0, width1, width2, BLOCK: tl.constexpr):
    """This program's part, its channels there, which of them exist, the part's first channel among all, and the number
    of all channels."""
    blocks0 = tl.cdiv(width0 * 8, BLOCK)
    blocks1 = tl.cdiv(width1 * 8, BLOCK)
    block = tl.program_id(0)
    part = (block >= blocks0).to(tl.int32) + (block >= blocks0 + blocks1).to(tl.int32)
    channel = (block - _choose(part, 0, blocks0, blocks0 + blocks1)) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < _choose(part, width0, width1, width2) * 8
    first = _choose(part, 0, width0, width0 + width1) * 8
    return part, channel, exists, first, (width0 + width1 + width2) * 8


@triton.jit(do_not_specialize=_COUNTS)
def statistics(
    x0, x1, x2, running_var0, running_var1, running_var2, result, partials, counters, width0, width1, width2,
    x_stride0, x_stride1, x_stride2, num_rows, group_rows, eps, LANES: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Mean, unbiased variance and 1 / std of each channel and group, as in `batch_norm`."""
    part, channel, exists, first, channels = _part_of(width0, width1, width2, BLOCK)
    x, stride = _choose(part, x0, x1, x2), _choose(part, x_stride0, x_stride1, x_stride2) * 8
    start, end = bounds(num_rows, group_rows)
    head = start + tl.arange(0, LANES)
    head_tile = tl.load(
        x + head[:, None] * stride + channel[None, :], mask=(head < end)[:, None] & exists[None, :], other=0.0
    )
    shift = tl.sum(head_tile.to(tl.float32), 0) / tl.minimum(end - start, LANES).to(tl.float32)
    total = tl.zeros([LANES, BLOCK], tl.float32)
    squares = tl.zeros([LANES, BLOCK], tl.float32)
    for tile in tl.range(
        tl.program_id(1), tl.cdiv(end - start, ROWS_PER_THREAD * LANES), tl.num_programs(1), num_stages=STAGES
    ):
        row = tile_of(start, tile, LANES)
        mask = (row < end) & exists[None, :]
        value = tl.load(x + row * stride + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        value = tl.where(mask, value - shift[None, :], 0.0)
        total += fold(value, LANES, BLOCK)
        squares += fold(value * value, LANES, BLOCK)
    at = first + channel
    store_partial(partials, 0, 2, channels, at, exists, tl.sum(total, 0))
    store_partial(partials, 1, 2, channels, at, exists, tl.sum(squares, 0))
    if is_last(counters):
        running_var = _choose(part, running_var0, running_var1, running_var2) - first
        store_statistics(result, running_var, partials, shift, end - start, channels, at, exists, eps, BLOCK)


@triton.jit(do_not_specialize=_COUNTS)
def normalize(
    x0, x1, x2, stats, weight0, weight1, weight2, bias0, bias1, bias2, y0, y1, y2, width0, width1, width2,
    x_stride0, x_stride1, x_stride2, y_stride0, y_stride1, y_stride2, num_rows, group_rows, LANES: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """relu(norm(x)) of each part."""
    part, channel, exists, first, channels = _part_of(width0, width1, width2, BLOCK)
    x, x_stride = _choose(part, x0, x1, x2), _choose(part, x_stride0, x_stride1, x_stride2) * 8
    y, y_stride = _choose(part, y0, y1, y2), _choose(part, y_stride0, y_stride1, y_stride2) * 8
    start, end = bounds(num_rows, group_rows)
    stats += tl.program_id(2) * STATISTICS * channels + first
    mean = row_of(stats + MEAN * channels, channel, exists)
    scale = row_of(_choose(part, weight0, weight1, weight2), channel, exists)
    scale *= row_of(stats + RSTD * channels, channel, exists)
    shift = row_of(_choose(part, bias0, bias1, bias2), channel, exists)
    for tile in tl.range(
        tl.program_id(1), tl.cdiv(end - start, ROWS_PER_THREAD * LANES), tl.num_programs(1), num_stages=STAGES
    ):
        row = tile_of(start, tile, LANES)
        mask = (row < end) & exists[None, :]
        value = tl.load(x + row * x_stride + channel[None, :], mask=mask, other=0.0)
        z = (value.to(tl.float32) - mean) * scale + shift
        result = apply_activation(z, _RELU).to(y.dtype.element_ty)
        tl.store(y + row * y_stride + channel[None, :], result, mask=mask)


@triton.jit(do_not_specialize=_COUNTS)
def gradient_sums(
    dy0, dy1, dy2, x0, x1, x2, stats, weight0, weight1, weight2, bias0, bias1, bias2, sums, partials, counters,
    width0, width1, width2, x_stride0, x_stride1, x_stride2, y_stride0, y_stride1, y_stride2, num_rows, group_rows,
    LANES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums over a group of dz and dz * xhat, where dz is the gradient before the ReLU."""
    part, channel, exists, first, channels = _part_of(width0, width1, width2, BLOCK)
    x, x_stride = _choose(part, x0, x1, x2), _choose(part, x_stride0, x_stride1, x_stride2) * 8
    dy, y_stride = _choose(part, dy0, dy1, dy2), _choose(part, y_stride0, y_stride1, y_stride2) * 8
    start, end = bounds(num_rows, group_rows)
    stats += tl.program_id(2) * STATISTICS * channels + first
    mean = row_of(stats + MEAN * channels, channel, exists)
    rstd = row_of(stats + RSTD * channels, channel, exists)
    scale = row_of(_choose(part, weight0, weight1, weight2), channel, exists) * rstd
    shift = row_of(_choose(part, bias0, bias1, bias2), channel, exists)
    plain_sum = tl.zeros([LANES, BLOCK], tl.float32)
    with_x = tl.zeros([LANES, BLOCK], tl.float32)
    for tile in tl.range(
        tl.program_id(1), tl.cdiv(end - start, ROWS_PER_THREAD * LANES), tl.num_programs(1), num_stages=STAGES
    ):
        row = tile_of(start, tile, LANES)
        mask = (row < end) & exists[None, :]
        value = tl.load(dy + row * y_stride + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        # A masked value has gradient 0, so it adds nothing whatever x - mean is there.
        centered = tl.load(x + row * x_stride + channel[None, :], mask=mask, other=0.0).to(tl.float32) - mean
        value = activation_grad(value, centered * scale + shift, _RELU)
        plain_sum += fold(value, LANES, BLOCK)
        with_x += fold(value * centered, LANES, BLOCK)
    at = first + channel
    store_partial(partials, 0, 2, channels, at, exists, tl.sum(plain_sum, 0))
    store_partial(partials, 1, 2, channels, at, exists, tl.sum(with_x, 0))
    if is_last(counters):
        out = sums + tl.program_id(2) * channels + at
        tl.store(out, merged_sum(partials, 0, 2, channels, at, exists, BLOCK), mask=exists)
        merged = merged_sum(partials, 1, 2, channels, at, exists, BLOCK)
        tl.store(out + tl.num_programs(2) * channels, merged * tl.reshape(rstd, [BLOCK]), mask=exists)


@triton.jit(do_not_specialize=_COUNTS)
def gradient(
    dy0, dy1, dy2, x0, x1, x2, stats, weight0, weight1, weight2, bias0, bias1, bias2, sums, dx0, dx1, dx2,
    width0, width1, width2, x_stride0, x_stride1, x_stride2, y_stride0, y_stride1, y_stride2, num_rows, group_rows,
    LANES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx of each part from the gradient of its output; dx has the strides of x."""
    part, channel, exists, first, channels = _part_of(width0, width1, width2, BLOCK)
    x, x_stride = _choose(part, x0, x1, x2), _choose(part, x_stride0, x_stride1, x_stride2) * 8
    dy, y_stride = _choose(part, dy0, dy1, dy2), _choose(part, y_stride0, y_stride1, y_stride2) * 8
    dx = _choose(part, dx0, dx1, dx2)
    start, end = bounds(num_rows, group_rows)
    stats += tl.program_id(2) * STATISTICS * channels + first
    sums += tl.program_id(2) * channels + first
    count = (end - start).to(tl.float32)
    mean = row_of(stats + MEAN * channels, channel, exists)
    rstd = row_of(stats + RSTD * channels, channel, exists)
    scale = row_of(_choose(part, weight0, weight1, weight2), channel, exists) * rstd
    shift = row_of(_choose(part, bias0, bias1, bias2), channel, exists)
    offset = row_of(sums, channel, exists) / count
    slope = row_of(sums + tl.num_programs(2) * channels, channel, exists) / count * rstd
    for tile in tl.range(
        tl.program_id(1), tl.cdiv(end - start, ROWS_PER_THREAD * LANES), tl.num_programs(1), num_stages=STAGES
    ):
        row = tile_of(start, tile, LANES)
        mask = (row < end) & exists[None, :]
        at = row * x_stride + channel[None, :]
        centered = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mean
        value = tl.load(dy + row * y_stride + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        value = activation_grad(value, centered * scale + shift, _RELU) - offset
        tl.store(dx + at, (scale * (value - centered * slope)).to(dx.dtype.element_ty), mask=mask)
