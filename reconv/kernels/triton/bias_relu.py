"""Triton kernels of bias and ReLU with zeros around the output, and of the gradient.

Rows are the pixels of the smaller tensor or of the padded one; the padding is `above` and `left` of an image, and what
the padded sides leave below and right of it.

Shapes: x and dx [images, height, width, channels]; y and gradient [images, padded_height, padded_width, channels]; bias
and sums [channels]; partials [splits, channels].

Hazards: padding is 0 and not relu(0 + bias), hence the second mask.
"""

import triton
import triton.language as tl

from reconv.kernels.triton.batch_norm import (
    RELU,
    ROWS_PER_THREAD,
    activation_grad,
    apply_activation,
    channels_of,
    fold,
    is_last,
    merged_sum,
    row_of,
    store_partial,
    tile_of,
)

_COUNTS = ["eighths", "num_rows", "height", "width", "padded_height", "padded_width", "above", "left"]


@triton.jit(do_not_specialize=_COUNTS)
def bias_relu_pad(
    x, bias, y, eighths, num_rows, height, width, padded_height, padded_width, above, left, LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y = relu(x + bias) inside of the padding, else 0; `num_rows` of y."""
    channels = eighths * 8
    channel, exists = channels_of(channels, BLOCK)
    shift = row_of(bias, channel, exists)
    for tile in range(tl.program_id(1), tl.cdiv(num_rows, ROWS_PER_THREAD * LANES), tl.num_programs(1)):
        row = tile_of(0, tile, LANES)
        line = row // padded_width
        image = line // padded_height
        v = line - image * padded_height - above
        h = row - line * padded_width - left
        inside = (v >= 0) & (v < height) & (h >= 0) & (h < width)
        mask = (row < num_rows) & exists[None, :]
        at = ((image * height + v) * width + h) * channels + channel[None, :]
        value = tl.load(x + at, mask=mask & inside, other=0.0).to(tl.float32)
        value = tl.where(inside, apply_activation(value + shift, RELU), 0.0)
        tl.store(y + row * channels + channel[None, :], value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_COUNTS)
def bias_relu_pad_gradient(
    gradient, x, bias, dx, sums, partials, counters, eighths, num_rows, height, width, padded_height, padded_width,
    above, left, LANES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx from the gradient of the padded output, and its sum over each channel; `num_rows` of x."""
    channels = eighths * 8
    channel, exists = channels_of(channels, BLOCK)
    shift = row_of(bias, channel, exists)
    total = tl.zeros([LANES, BLOCK], tl.float32)
    for tile in tl.range(
        tl.program_id(1), tl.cdiv(num_rows, ROWS_PER_THREAD * LANES), tl.num_programs(1), num_stages=STAGES
    ):
        row = tile_of(0, tile, LANES)
        line = row // width
        image = line // height
        padded_line = image * padded_height + line - image * height + above
        padded_row = padded_line * padded_width + row - line * width + left
        mask = (row < num_rows) & exists[None, :]
        at = row * channels + channel[None, :]
        value = tl.load(gradient + padded_row * channels + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) + shift
        rounded = activation_grad(value, z, RELU).to(dx.dtype.element_ty)
        tl.store(dx + at, rounded, mask=mask)
        total += fold(rounded.to(tl.float32), LANES, BLOCK)
    store_partial(partials, 0, 1, channels, channel, exists, tl.sum(total, 0))
    if is_last(counters):
        tl.store(sums + channel, merged_sum(partials, 0, 1, channels, channel, exists, BLOCK), mask=exists)
