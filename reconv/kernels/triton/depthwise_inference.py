"""Triton kernel of a depthwise inference convolution with bias and activation, channels_last.

A thread computes four neighboring pixels and reuses its loads. A program computes a tile of such groups by a block of
channels: in large images a rectangle, whose windows overlap; in small ones consecutive groups across lines and images,
so that no tile is half empty.

Shapes: x [images, height, width, channels]; weight [KERNEL * KERNEL, channels]; bias [channels]; y [images, out_height,
out_width, channels].

Hazards: weights are transposed once when a model is compiled; the filters of a convolution [channels, 1, k, k] would
be read as others.
"""

import triton
import triton.language as tl

from reconv.kernels.triton.pointwise import epilogue

_COUNTS = ["images", "eighths", "height", "width", "out_height", "out_width"]


@triton.jit
def _with(total, value, row_of_taps, exists, channels, J: tl.constexpr, KERNEL: tl.constexpr):
    """The total plus values times one tap of each filter, where the tap exists."""
    if (J >= 0) and (J < KERNEL):
        total += value * tl.load(row_of_taps + J * channels, mask=exists, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def _leave(y, at, total, mask, ACT: tl.constexpr):
    tl.store(y + at, epilogue(total, ACT).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_COUNTS)
def depthwise_conv(
    x, weight, bias, y, images, eighths, height, width, out_height, out_width, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, ACT: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """act(conv + bias) with weights [k * k, channels]; `TALL` 0: tiles of consecutive groups."""
    channels = eighths * 8
    num_blocks, fours = tl.cdiv(channels, BLOCK), tl.cdiv(out_width, 4)
    channel = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    tile, exists = tl.program_id(0) // num_blocks, channel < channels
    if TALL == 0:
        place = tile * WIDE + tl.arange(0, WIDE)
        four, line, image = place % fours, place // fours % out_height, place // (fours * out_height)
    else:
        across, down = tl.cdiv(fours, WIDE), tl.cdiv(out_height, TALL)
        place = tl.arange(0, TALL * WIDE)
        four, line = tile % across * WIDE + place % WIDE, tile // across % down * TALL + place // WIDE
        image = place * 0 + tile // (across * down)
    here, column = (image < images) & (line < out_height) & (four < fours), four * 4
    first = tl.zeros([four.shape[0], BLOCK], tl.float32)
    first += tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)[None, :]
    second, third, fourth = first, first, first
    for i in range(KERNEL):  # not unrolled: hoisting all loads would run out of registers
        v = line * STRIDE + i - PAD
        in_line = here & (v >= 0) & (v < height)
        taps = weight + i * KERNEL * channels + channel
        for j in tl.static_range(KERNEL + 3 * STRIDE):
            h = column * STRIDE + j - PAD
            inside = in_line & (h >= 0) & (h < width)
            at = ((image * height + v) * width + h)[:, None] * channels + channel[None, :]
            value = tl.load(x + at, mask=inside[:, None] & exists[None, :], other=0.0).to(tl.float32)
            first = _with(first, value, taps, exists, channels, j, KERNEL)
            second = _with(second, value, taps, exists, channels, j - STRIDE, KERNEL)
            third = _with(third, value, taps, exists, channels, j - 2 * STRIDE, KERNEL)
            fourth = _with(fourth, value, taps, exists, channels, j - 3 * STRIDE, KERNEL)
    at = ((image * out_height + line) * out_width + column)[:, None] * channels + channel[None, :]
    _leave(y, at, first, here[:, None] & exists[None, :], ACT)
    _leave(y, at + channels, second, (here & (column + 1 < out_width))[:, None] & exists[None, :], ACT)
    _leave(y, at + 2 * channels, third, (here & (column + 2 < out_width))[:, None] & exists[None, :], ACT)
    _leave(y, at + 3 * channels, fourth, (here & (column + 3 < out_width))[:, None] & exists[None, :], ACT)
