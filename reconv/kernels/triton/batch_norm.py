"""Triton kernels of batch norm over rows of channels: statistics, forward, gradient sums, input gradient.

Every kernel reads and writes each tensor once and computes in float32. Programs are (block of channels, split of the
rows, group). The programs of a reduction store partial sums; the last one to finish adds them in order, so the result
is deterministic.

Shapes: x, other, y, dz, gradient, dx and dother [rows, channels]; weight and bias [channels]; stats [groups, 3,
channels] with mean, unbiased variance and 1 / std; sums [3, groups, channels]; partials [groups, splits, 2 or 3,
channels]; bits [groups, tiles, lanes, channels], a byte for eight rows.

Hazards: addresses are computed from row and channel alone, so a tensor that is not channels_last gives garbage without
an error. Offsets have 32 bits. A counter must be 0 at the start and is set back by the last program; two reductions
that share counters must not overlap. Partial sums are read past L1, where another program's older values may be.
"""

import triton
import triton.language as tl

NONE, RELU, RELU6, SILU = (tl.constexpr(i) for i in range(4))
HARDSWISH: tl.constexpr = tl.constexpr(5)  # 4 is the sigmoid of `pointwise`
NO_RESIDUAL, ADD, ADD_NORM = (tl.constexpr(i) for i in range(3))  # norm(x), + other, + norm(other)
ROWS_PER_THREAD: tl.constexpr = tl.constexpr(8)
MEAN, VARIANCE, RSTD, STATISTICS = (tl.constexpr(i) for i in range(4))
_MERGED: tl.constexpr = tl.constexpr(64)  # partial sums per load: each load waits for the L2 cache

_MINUS_LOG2_E: tl.constexpr = tl.constexpr(-1.4426950408889634)
_SIXTH: tl.constexpr = tl.constexpr(1.0 / 6.0)

_COUNTS = ["eighths", "num_rows", "group_rows", "tiles"]


@triton.jit
def tile_of(start, tile, LANES: tl.constexpr):
    """The rows of a tile [ROWS_PER_THREAD * lanes, 1]; a thread has the same lane of each of its rows."""
    return start + tile * (ROWS_PER_THREAD * LANES) + tl.arange(0, ROWS_PER_THREAD * LANES)[:, None]


@triton.jit
def fold(values, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """The sum over each thread's own rows [lanes, channels]."""
    return tl.sum(tl.reshape(values, [ROWS_PER_THREAD, LANES, BLOCK]), 0)


@triton.jit
def bounds(num_rows, group_rows):
    """First row and end of this program's group; the last group has the rest."""
    group = tl.program_id(2)
    start = group * group_rows
    end = tl.where(group == tl.num_programs(2) - 1, num_rows, start + group_rows)
    return start, end


@triton.jit
def channels_of(channels, BLOCK: tl.constexpr):
    """This program's channels, and which of them exist."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return channel, channel < channels


@triton.jit
def row_of(pointer, channel, exists):
    """One float32 number per channel, as [1, channels]."""
    return tl.load(pointer + channel, mask=exists, other=0.0).to(tl.float32)[None, :]


@triton.jit
def rows_of_tile(start, tile, ROWS: tl.constexpr):
    """The rows of a tile [rows, 1]."""
    return start + tile * ROWS + tl.arange(0, ROWS)[:, None]


@triton.jit
def norm_line(stats, weight, bias, channels, channel, exists):
    """Mean, 1 / std, and factor and summand of norm(x) = x * factor + summand."""
    mean = tl.load(stats + MEAN * channels + channel, mask=exists, other=0.0)
    rstd = tl.load(stats + RSTD * channels + channel, mask=exists, other=0.0)
    factor = tl.load(weight + channel, mask=exists, other=0.0).to(tl.float32) * rstd
    return mean, rstd, factor, tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32) - mean * factor


@triton.jit
def sigmoid_of(z):
    """Sigmoid of x: 0 if the exponential overflows, as it should be; a division would take several times as many
    instructions.
    """
    root = tl.rsqrt(1.0 + tl.exp2(z * _MINUS_LOG2_E))
    return root * root


@triton.jit
def apply_activation(z, ACT: tl.constexpr):
    """The activation of z; NaN is propagated."""
    if ACT == RELU:
        z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if ACT == RELU6:
        z = tl.clamp(z, 0.0, 6.0, propagate_nan=tl.PropagateNan.ALL)
    if ACT == SILU:
        z = z * sigmoid_of(z)
    if ACT == HARDSWISH:
        z = z * (tl.clamp(z + 3.0, 0.0, 6.0) * _SIXTH)
    return z


@triton.jit
def activation_grad(gradient, z, ACT: tl.constexpr):
    """The gradient of the activation's input."""
    if ACT == RELU:
        gradient = tl.where(z <= 0.0, 0.0, gradient)
    if ACT == RELU6:
        gradient = tl.where((z <= 0.0) | (z >= 6.0), 0.0, gradient)
    if ACT == SILU:
        sigmoid = sigmoid_of(z)
        gradient = gradient * sigmoid * (1.0 + z * (1.0 - sigmoid))
    if ACT == HARDSWISH:
        slope = tl.where(z <= -3.0, 0.0, tl.where(z >= 3.0, 1.0, z * (2.0 * _SIXTH) + 0.5))
        gradient = gradient * slope
    return gradient


@triton.jit
def is_last(counters):
    """True if all other programs of this block and group have stored their partial sums."""
    counter = counters + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    tl.debug_barrier()  # all threads' stores before the one thread's count
    arrived = tl.atomic_add(counter, 1, sem="acq_rel")
    is_it = arrived == tl.num_programs(1) - 1
    if is_it:
        tl.atomic_xchg(counter, 0, sem="relaxed")
        tl.debug_barrier()
    return is_it


@triton.jit
def merged_sum(partials, place, num_sums, channels, channel, exists, BLOCK: tl.constexpr):
    """The total of the partial sums of this block and group, read past L1, which may be stale."""
    splits = tl.num_programs(1)
    total = tl.zeros([_MERGED, BLOCK], tl.float32)
    first = tl.program_id(2) * splits
    for base in range(0, splits, _MERGED):
        split = base + tl.arange(0, _MERGED)
        at = ((first + split) * num_sums + place)[:, None] * channels + channel[None, :]
        total += tl.load(
            partials + at, mask=(split < splits)[:, None] & exists[None, :], other=0.0, cache_modifier=".cg"
        )
    return tl.sum(total, 0)


@triton.jit
def store_partial(partials, place, num_sums, channels, channel, exists, value):
    """Store this program's partial sum."""
    mine = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    tl.store(partials + (mine * num_sums + place) * channels + channel, value, mask=exists)


@triton.jit
def store_statistics(
    result, running_var, partials, shift, num_values, channels, channel, exists, eps, BLOCK: tl.constexpr
):
    """Store mean, unbiased variance and 1 / std of this group from partial sums of x - shift and of its squares."""
    count = num_values.to(tl.float32)
    mean = merged_sum(partials, 0, 2, channels, channel, exists, BLOCK) / count
    variance = merged_sum(partials, 1, 2, channels, channel, exists, BLOCK) / count - mean * mean
    variance = tl.where(variance < 0.0, 0.0, variance)  # not tl.maximum, which would hide NaN
    unbiased = variance * (count / tl.maximum(count - 1.0, 1.0))
    if num_values == 1:  # no variance: keep the running one
        unbiased = tl.load(running_var + channel, mask=exists, other=0.0).to(tl.float32)
    out = result + tl.program_id(2) * STATISTICS * channels + channel
    tl.store(out + MEAN * channels, shift + mean, mask=exists)
    tl.store(out + VARIANCE * channels, unbiased, mask=exists)
    tl.store(out + RSTD * channels, 1.0 / tl.sqrt(variance + eps), mask=exists)


@triton.jit
def _bits_at(tile, tiles, channels, channel, LANES: tl.constexpr):
    """Offsets of a tile's mask bytes [program id 2, tile, lane, channel], one bit per row of a thread."""
    lane = (tl.program_id(2) * tiles + tile) * LANES + tl.arange(0, LANES)
    return lane[:, None] * channels + channel[None, :]


@triton.jit
def _bits_exist(exists, LANES: tl.constexpr):
    return (tl.arange(0, LANES) >= 0)[:, None] & exists[None, :]


@triton.jit
def store_relu_mask(bits, z, tile, tiles, channels, channel, exists, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """Store the ReLU mask of a tile: set where the value passes or is NaN."""
    passed = tl.where(z <= 0.0, 0, 1) << (tl.arange(0, ROWS_PER_THREAD * LANES) // LANES)[:, None]
    slot = _bits_at(tile, tiles, channels, channel, LANES)
    tl.store(bits + slot, fold(passed, LANES, BLOCK).to(tl.uint8), mask=_bits_exist(exists, LANES))


@triton.jit
def apply_relu_mask(bits, gradient, tile, tiles, channels, channel, exists, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient of a tile, masked by its ReLU."""
    slot = _bits_at(tile, tiles, channels, channel, LANES)
    passed = tl.load(bits + slot, mask=_bits_exist(exists, LANES), other=0).to(tl.int32)
    passed = tl.reshape(
        tl.broadcast_to(passed[None, :, :], [ROWS_PER_THREAD, LANES, BLOCK]), [ROWS_PER_THREAD * LANES, BLOCK]
    )
    passed = (passed >> (tl.arange(0, ROWS_PER_THREAD * LANES) // LANES)[:, None]) & 1
    return tl.where(passed != 0, gradient, 0.0)


@triton.jit(do_not_specialize=_COUNTS)
def statistics(
    x, running_var, result, partials, counters, eighths, num_rows, group_rows, eps, LANES: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Mean, unbiased variance and 1 / std of each channel and group, in one pass.

    Sums are of x minus the mean of the group's first rows, so that squares do not cancel.
    """
    channels = eighths * 8
    start, end = bounds(num_rows, group_rows)
    channel, exists = channels_of(channels, BLOCK)
    head = start + tl.arange(0, LANES)
    head_tile = tl.load(
        x + head[:, None] * channels + channel[None, :], mask=(head < end)[:, None] & exists[None, :], other=0.0
    )
    shift = tl.sum(head_tile.to(tl.float32), 0) / tl.minimum(end - start, LANES).to(tl.float32)
    total = tl.zeros([LANES, BLOCK], tl.float32)
    squares = tl.zeros([LANES, BLOCK], tl.float32)
    for tile in tl.range(
        tl.program_id(1), tl.cdiv(end - start, ROWS_PER_THREAD * LANES), tl.num_programs(1), num_stages=STAGES
    ):
        row = tile_of(start, tile, LANES)
        mask = (row < end) & exists[None, :]
        value = tl.load(x + row * channels + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        value = tl.where(mask, value - shift[None, :], 0.0)
        total += fold(value, LANES, BLOCK)
        squares += fold(value * value, LANES, BLOCK)
    store_partial(partials, 0, 2, channels, channel, exists, tl.sum(total, 0))
    store_partial(partials, 1, 2, channels, channel, exists, tl.sum(squares, 0))
    if is_last(counters):
        store_statistics(result, running_var, partials, shift, end - start, channels, channel, exists, eps, BLOCK)


@triton.jit(do_not_specialize=_COUNTS)
def normalize(
    x, stats, weight, bias, other, other_stats, other_weight, other_bias, y, bits, eighths, num_rows, group_rows,
    tiles, ACT: tl.constexpr, RESIDUAL: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """act(norm(x)), act(norm(x) + other) or act(norm(x) + norm(other)); a sum with ReLU also stores its mask."""
    channels = eighths * 8
    start, end = bounds(num_rows, group_rows)
    channel, exists = channels_of(channels, BLOCK)
    group = tl.program_id(2)
    stats += group * STATISTICS * channels
    mean = row_of(stats + MEAN * channels, channel, exists)
    scale = row_of(weight, channel, exists) * row_of(stats + RSTD * channels, channel, exists)
    shift = row_of(bias, channel, exists)
    if RESIDUAL == ADD_NORM:
        other_stats += group * STATISTICS * channels
        other_mean = row_of(other_stats + MEAN * channels, channel, exists)
        other_scale = row_of(other_weight, channel, exists) * row_of(other_stats + RSTD * channels, channel, exists)
        shift += row_of(other_bias, channel, exists)
    for tile in tl.range(
        tl.program_id(1), tl.cdiv(end - start, ROWS_PER_THREAD * LANES), tl.num_programs(1), num_stages=STAGES
    ):
        row = tile_of(start, tile, LANES)
        mask = (row < end) & exists[None, :]
        at = row * channels + channel[None, :]
        x_tile = tl.load(x + at, mask=mask, other=0.0)
        if RESIDUAL != NO_RESIDUAL:
            other_tile = tl.load(other + at, mask=mask, other=0.0)
        z = (x_tile.to(tl.float32) - mean) * scale + shift
        if RESIDUAL != NO_RESIDUAL:
            other_tile = other_tile.to(tl.float32)
            if RESIDUAL == ADD_NORM:
                other_tile = (other_tile - other_mean) * other_scale
            z += other_tile
            if ACT == RELU:
                store_relu_mask(bits, z, tile, tiles, channels, channel, exists, LANES, BLOCK)
        tl.store(y + at, apply_activation(z, ACT).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_COUNTS)
def gradient_sums(
    gradient, gradient2, x, stats, weight, bias, other, other_stats, bits, dz, sums, partials, counters, eighths,
    num_rows, group_rows, tiles, ACT: tl.constexpr, RESIDUAL: tl.constexpr, TWO_GRADS: tl.constexpr,
    WRITE_DZ: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Sums over a group of dz, dz * xhat and, for a sum of norms, dz * xhat of the other; optionally writes dz.

    dz is the gradient before the activation; if the output has two uses, from the sum of their gradients.
    """
    channels = eighths * 8
    start, end = bounds(num_rows, group_rows)
    channel, exists = channels_of(channels, BLOCK)
    stats += tl.program_id(2) * STATISTICS * channels
    mean = row_of(stats + MEAN * channels, channel, exists)
    rstd = row_of(stats + RSTD * channels, channel, exists)
    if RESIDUAL == NO_RESIDUAL:
        scale = row_of(weight, channel, exists) * rstd
        shift = row_of(bias, channel, exists)
    if RESIDUAL == ADD_NORM:
        other_stats += tl.program_id(2) * STATISTICS * channels
        other_mean = row_of(other_stats + MEAN * channels, channel, exists)
        other_rstd = row_of(other_stats + RSTD * channels, channel, exists)
    plain_sum = tl.zeros([LANES, BLOCK], tl.float32)
    with_x = tl.zeros([LANES, BLOCK], tl.float32)
    with_other = tl.zeros([LANES, BLOCK], tl.float32)
    for tile in tl.range(
        tl.program_id(1), tl.cdiv(end - start, ROWS_PER_THREAD * LANES), tl.num_programs(1), num_stages=STAGES
    ):
        row = tile_of(start, tile, LANES)
        mask = (row < end) & exists[None, :]
        at = row * channels + channel[None, :]
        dy_tile = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
        if TWO_GRADS:
            dy_tile += tl.load(gradient2 + at, mask=mask, other=0.0).to(tl.float32)
        # A masked value has gradient 0, so it adds nothing whatever x - mean is there.
        centered = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mean
        if RESIDUAL == NO_RESIDUAL:
            dy_tile = activation_grad(dy_tile, centered * scale + shift, ACT)
        elif ACT == RELU:
            dy_tile = apply_relu_mask(bits, dy_tile, tile, tiles, channels, channel, exists, LANES, BLOCK)
        if WRITE_DZ:
            dz_tile = dy_tile.to(dz.dtype.element_ty)
            tl.store(dz + at, dz_tile, mask=mask)
            dy_tile = dz_tile.to(tl.float32)  # sum the rounded values that the second pass will read
        plain_sum += fold(dy_tile, LANES, BLOCK)
        with_x += fold(dy_tile * centered, LANES, BLOCK)
        if RESIDUAL == ADD_NORM:
            other_centered = tl.load(other + at, mask=mask, other=0.0).to(tl.float32) - other_mean
            with_other += fold(dy_tile * other_centered, LANES, BLOCK)
    store_partial(partials, 0, 3, channels, channel, exists, tl.sum(plain_sum, 0))
    store_partial(partials, 1, 3, channels, channel, exists, tl.sum(with_x, 0))
    if RESIDUAL == ADD_NORM:
        store_partial(partials, 2, 3, channels, channel, exists, tl.sum(with_other, 0))
    if is_last(counters):
        groups = tl.num_programs(2)
        out = sums + tl.program_id(2) * channels + channel
        tl.store(out, merged_sum(partials, 0, 3, channels, channel, exists, BLOCK), mask=exists)
        merged = merged_sum(partials, 1, 3, channels, channel, exists, BLOCK)
        tl.store(out + groups * channels, merged * tl.reshape(rstd, [BLOCK]), mask=exists)
        if RESIDUAL == ADD_NORM:
            merged = merged_sum(partials, 2, 3, channels, channel, exists, BLOCK)
            tl.store(out + 2 * groups * channels, merged * tl.reshape(other_rstd, [BLOCK]), mask=exists)


@triton.jit(do_not_specialize=_COUNTS)
def gradient(
    dz, x, stats, weight, bias, other, other_stats, other_weight, sums, slope_sums, other_slope_sums, dx, dother,
    eighths, num_rows, group_rows, ACT: tl.constexpr, RESIDUAL: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dx from the output gradient (or, without activation, from dz), and for a sum of norms also the other's.

    Sums are over a group of dz, dz * xhat and dz * xhat of the other.
    """
    channels = eighths * 8
    start, end = bounds(num_rows, group_rows)
    channel, exists = channels_of(channels, BLOCK)
    group = tl.program_id(2)
    stats += group * STATISTICS * channels
    count = (end - start).to(tl.float32)
    mean = row_of(stats + MEAN * channels, channel, exists)
    rstd = row_of(stats + RSTD * channels, channel, exists)
    scale = row_of(weight, channel, exists) * rstd
    shift = row_of(bias, channel, exists)
    offset = row_of(sums + group * channels, channel, exists) / count
    slope = row_of(slope_sums + group * channels, channel, exists) / count * rstd
    if RESIDUAL == ADD_NORM:
        other_stats += group * STATISTICS * channels
        other_mean = row_of(other_stats + MEAN * channels, channel, exists)
        other_rstd = row_of(other_stats + RSTD * channels, channel, exists)
        other_scale = row_of(other_weight, channel, exists) * other_rstd
        other_slope = row_of(other_slope_sums + group * channels, channel, exists) / count * other_rstd
    for tile in tl.range(
        tl.program_id(1), tl.cdiv(end - start, ROWS_PER_THREAD * LANES), tl.num_programs(1), num_stages=STAGES
    ):
        row = tile_of(start, tile, LANES)
        mask = (row < end) & exists[None, :]
        at = row * channels + channel[None, :]
        centered = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mean
        dy_tile = tl.load(dz + at, mask=mask, other=0.0).to(tl.float32)
        dy_tile = activation_grad(dy_tile, centered * scale + shift, ACT) - offset
        tl.store(dx + at, (scale * (dy_tile - centered * slope)).to(dx.dtype.element_ty), mask=mask)
        if RESIDUAL == ADD_NORM:
            other_centered = tl.load(other + at, mask=mask, other=0.0).to(tl.float32) - other_mean
            result = other_scale * (dy_tile - other_centered * other_slope)
            tl.store(dother + at, result.to(dother.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["channels", "momentum"])
def update_running(
    stats, running_mean, running_var, num_batches, channels, momentum, BLOCK: tl.constexpr
):  # fmt: skip
    """Running statistics moved towards mean and variance of stats [1, 3, channels]; one program, as there is one count.

    As torch does it: running = (1 - momentum) * running + momentum * value, in float32.
    """
    for first in range(0, channels, BLOCK):
        channel = first + tl.arange(0, BLOCK)
        exists = channel < channels
        mean = tl.load(stats + MEAN * channels + channel, mask=exists, other=0.0)
        variance = tl.load(stats + VARIANCE * channels + channel, mask=exists, other=0.0)
        old_mean = tl.load(running_mean + channel, mask=exists, other=0.0).to(tl.float32)
        old_variance = tl.load(running_var + channel, mask=exists, other=0.0).to(tl.float32)
        new_mean = (1.0 - momentum) * old_mean + momentum * mean
        new_variance = (1.0 - momentum) * old_variance + momentum * variance
        tl.store(running_mean + channel, new_mean.to(running_mean.dtype.element_ty), mask=exists)
        tl.store(running_var + channel, new_variance.to(running_var.dtype.element_ty), mask=exists)
    tl.store(num_batches, tl.load(num_batches) + 1)
