"""Triton kernels of squeeze-and-excitation of act(batch_norm(x)) and its gradients, channels_last.

The activation is never written: every kernel recomputes it from x. Programs are (block of channels, split of an image's
rows, image); where sums over an image's pixels are stored, one program computes all of them. The backward pass of the
norm needs only such sums, since the gate and the gradient of the means are one number per image and channel.

Shapes: x, other, y, gradient, dz and dx [images * pixels, channels]; gate, dgate, dmeans and result of `means` [images,
channels]; slopes and sums [2, images, channels]; sums of the norm [2, groups, channels]; stats [groups, 3, channels];
bits [images, tiles, lanes, channels].

Hazards: the third axis of the grid is an image, not a group: helpers of `batch_norm` that take a group from
program_id(2) must not be used, but for the mask, whose tiles are numbered by image here.
"""

import triton
import triton.language as tl

from reconv.kernels.triton.batch_norm import (
    MEAN,
    NONE,
    RELU,
    ROWS_PER_THREAD,
    RSTD,
    STATISTICS,
    activation_grad,
    apply_activation,
    apply_relu_mask,
    channels_of,
    fold,
    row_of,
    store_relu_mask,
    tile_of,
)

_COUNTS = ["eighths", "pixels", "images", "group_images", "groups", "tiles"]


@triton.jit
def _image(stats, weight, bias, eighths, pixels, group, BLOCK: tl.constexpr):
    """This program's channels, which of them exist, first row and end of its image; mean, 1 / std, scale and shift of
    each channel of its group [1, channels]."""
    channels = eighths * 8
    channel, exists = channels_of(channels, BLOCK)
    stats += group * STATISTICS * channels
    mean = row_of(stats + MEAN * channels, channel, exists)
    rstd = row_of(stats + RSTD * channels, channel, exists)
    factor, summand = row_of(weight, channel, exists) * rstd, row_of(bias, channel, exists)
    start = tl.program_id(2) * pixels
    return channel, exists, start, start + pixels, mean, rstd, factor, summand


@triton.jit
def _group(group_images, groups):
    """The group of this program's image; the last group has the rest."""
    return tl.minimum(tl.program_id(2) // group_images, groups - 1)


@triton.jit(do_not_specialize=_COUNTS)
def means(
    x, stats, weight, bias, result, slopes, eighths, pixels, images, group_images, groups, ACT: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Means over each image's pixels of act(norm(x)), and sums of act'(norm(x)) and of that times x - mean."""
    channels = eighths * 8
    group, image = _group(group_images, groups), tl.program_id(2)
    channel, exists, start, end, mean, _rstd, scale, shift = _image(stats, weight, bias, eighths, pixels, group, BLOCK)
    total = tl.zeros([LANES, BLOCK], tl.float32)
    slope = tl.zeros([LANES, BLOCK], tl.float32)
    with_x = tl.zeros([LANES, BLOCK], tl.float32)
    for tile in tl.range(0, tl.cdiv(pixels, ROWS_PER_THREAD * LANES), num_stages=STAGES):
        row = tile_of(start, tile, LANES)
        mask = (row < end) & exists[None, :]
        centered = tl.load(x + row * channels + channel[None, :], mask=mask, other=0.0).to(tl.float32) - mean
        inner = tl.where(mask, 1.0, 0.0)
        if ACT != NONE:
            z = centered * scale + shift
            inner = activation_grad(inner, z, ACT)
            total += fold(tl.where(mask, apply_activation(z, ACT), 0.0), LANES, BLOCK)
            slope += fold(inner, LANES, BLOCK)
        with_x += fold(inner * centered, LANES, BLOCK)
    at = image * channels + channel
    inner_x = tl.sum(with_x, 0)
    if ACT == NONE:
        of_act = inner_x * tl.reshape(scale, [BLOCK]) + tl.reshape(shift, [BLOCK]) * pixels
        of_slope = tl.zeros([BLOCK], tl.float32) + pixels
    else:
        of_act, of_slope = tl.sum(total, 0), tl.sum(slope, 0)
    tl.store(result + at, (of_act / pixels).to(result.dtype.element_ty), mask=exists)
    tl.store(slopes + at, of_slope, mask=exists)
    tl.store(slopes + images * channels + at, inner_x, mask=exists)


@triton.jit(do_not_specialize=_COUNTS)
def scale(
    x, stats, weight, bias, gate, other, y, bits, eighths, pixels, group_images, groups, tiles, ACT: tl.constexpr,
    RESIDUAL: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """act(norm(x)) times the image's gate; with `RESIDUAL`, the ReLU of its sum with `other`, whose mask is stored."""
    channels = eighths * 8
    group = _group(group_images, groups)
    channel, exists, start, end, mean, _rstd, factor, shift = _image(stats, weight, bias, eighths, pixels, group, BLOCK)
    opened = row_of(gate + tl.program_id(2) * channels, channel, exists)
    for tile in tl.range(tl.program_id(1), tl.cdiv(pixels, ROWS_PER_THREAD * LANES), tl.num_programs(1)):
        row = tile_of(start, tile, LANES)
        mask = (row < end) & exists[None, :]
        at = row * channels + channel[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        if RESIDUAL:
            added = tl.load(other + at, mask=mask, other=0.0).to(tl.float32)
        value = apply_activation((value - mean) * factor + shift, ACT) * opened
        if RESIDUAL:
            value += added
            store_relu_mask(bits, value, tile, tiles, channels, channel, exists, LANES, BLOCK)
            value = apply_activation(value, RELU)
        tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_COUNTS)
def image_sums(
    gradient, gradient2, x, stats, weight, bias, bits, dz, dgate, sums, eighths, pixels, images, group_images, groups,
    tiles, ACT: tl.constexpr, RESIDUAL: tl.constexpr, TWO_GRADS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The gate's gradient, and sums over each image's pixels of dz * act'(norm(x)) and of that times x - mean.

    dz is the gradient of the gated activation; with `RESIDUAL` it is masked by the ReLU and written.
    """
    channels = eighths * 8
    group, image = _group(group_images, groups), tl.program_id(2)
    channel, exists, start, end, mean, _rstd, scale, shift = _image(stats, weight, bias, eighths, pixels, group, BLOCK)
    plain_sum = tl.zeros([LANES, BLOCK], tl.float32)
    with_x = tl.zeros([LANES, BLOCK], tl.float32)
    of_gate = tl.zeros([LANES, BLOCK], tl.float32)
    for tile in tl.range(0, tl.cdiv(pixels, ROWS_PER_THREAD * LANES), num_stages=STAGES):
        row = tile_of(start, tile, LANES)
        mask = (row < end) & exists[None, :]
        at = row * channels + channel[None, :]
        dy_tile = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
        if TWO_GRADS:
            dy_tile += tl.load(gradient2 + at, mask=mask, other=0.0).to(tl.float32)
        centered = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mean
        if RESIDUAL:
            dy_tile = apply_relu_mask(bits, dy_tile, tile, tiles, channels, channel, exists, LANES, BLOCK)
            dz_tile = dy_tile.to(dz.dtype.element_ty)
            tl.store(dz + at, dz_tile, mask=mask)
            dy_tile = dz_tile.to(tl.float32)  # sum the rounded values that the next pass will read
        z = centered * scale + shift
        inner = activation_grad(dy_tile, z, ACT)
        plain_sum += fold(inner, LANES, BLOCK)
        with_x += fold(inner * centered, LANES, BLOCK)
        if ACT != NONE:
            of_gate += fold(dy_tile * apply_activation(z, ACT), LANES, BLOCK)
    at = image * channels + channel
    first, second = tl.sum(plain_sum, 0), tl.sum(with_x, 0)
    if ACT == NONE:
        total = second * tl.reshape(scale, [BLOCK]) + first * tl.reshape(shift, [BLOCK])
    else:
        total = tl.sum(of_gate, 0)
    tl.store(dgate + at, total.to(dgate.dtype.element_ty), mask=exists)
    tl.store(sums + at, first, mask=exists)
    tl.store(sums + images * channels + at, second, mask=exists)


@triton.jit(do_not_specialize=_COUNTS)
def norm_sums(
    gate, dmeans, sums, slopes, stats, result, eighths, pixels, images, group_images, BLOCK: tl.constexpr,
    IMAGES: tl.constexpr,
):  # fmt: skip
    """The sums of the norm's output gradient, and of that times xhat, over the images of a group."""
    channels = eighths * 8
    channel, exists = channels_of(channels, BLOCK)
    group, groups = tl.program_id(2), tl.num_programs(2)
    first = group * group_images
    end = tl.where(group == groups - 1, images, first + group_images)
    total = tl.zeros([IMAGES, BLOCK], tl.float32)
    with_x = tl.zeros([IMAGES, BLOCK], tl.float32)
    for base in range(first, end, IMAGES):
        image = base + tl.arange(0, IMAGES)
        mask = (image < end)[:, None] & exists[None, :]
        at = image[:, None] * channels + channel[None, :]
        opened = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
        share = tl.load(dmeans + at, mask=mask, other=0.0).to(tl.float32) / pixels
        total += opened * tl.load(sums + at, mask=mask, other=0.0)
        total += share * tl.load(slopes + at, mask=mask, other=0.0)
        at += images * channels
        with_x += opened * tl.load(sums + at, mask=mask, other=0.0)
        with_x += share * tl.load(slopes + at, mask=mask, other=0.0)
    rstd = tl.load(stats + (group * STATISTICS + RSTD) * channels + channel, mask=exists, other=0.0)
    at = group * channels + channel
    tl.store(result + at, tl.sum(total, 0), mask=exists)
    tl.store(result + groups * channels + at, tl.sum(with_x, 0) * rstd, mask=exists)


@triton.jit(do_not_specialize=_COUNTS)
def gradient(
    dz, x, stats, weight, bias, gate, dmeans, sums, dx, eighths, pixels, images, group_images, groups,
    ACT: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of x: through the product with the gate, and through the means."""
    channels = eighths * 8
    group, image = _group(group_images, groups), tl.program_id(2)
    channel, exists, start, end, mean, rstd, scale, shift = _image(stats, weight, bias, eighths, pixels, group, BLOCK)
    num_images = tl.where(group == groups - 1, images - group * group_images, group_images)
    count = num_images.to(tl.float32) * pixels
    sums += group * channels
    offset = row_of(sums, channel, exists) / count
    slope = row_of(sums + groups * channels, channel, exists) / count * rstd
    opened = row_of(gate + image * channels, channel, exists)
    share = row_of(dmeans + image * channels, channel, exists) / pixels
    for tile in tl.range(tl.program_id(1), tl.cdiv(pixels, ROWS_PER_THREAD * LANES), tl.num_programs(1)):
        row = tile_of(start, tile, LANES)
        mask = (row < end) & exists[None, :]
        at = row * channels + channel[None, :]
        centered = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mean
        value = tl.load(dz + at, mask=mask, other=0.0).to(tl.float32) * opened + share
        value = activation_grad(value, centered * scale + shift, ACT) - offset
        tl.store(dx + at, (scale * (value - centered * slope)).to(dx.dtype.element_ty), mask=mask)
