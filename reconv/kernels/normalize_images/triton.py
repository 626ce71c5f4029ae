"""Triton kernel that flips, scales, shifts and casts uint8 images."""

import triton
import triton.language as tl

_COUNTS = ["num_pixels", "height", "width", "stride_n", "stride_c", "stride_h", "stride_w"]


@triton.jit(do_not_specialize=_COUNTS)
def normalize(
    images, flips, factor, shift, out, num_pixels, height, width, stride_n, stride_c, stride_h, stride_w,
    CHANNELS: tl.constexpr, FLIPS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """out[n, i, j, c] = images[n, c, i, j or the mirrored j] * factor[c] + shift[c]."""
    at_out = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    pixel, c = at_out // CHANNELS, at_out % CHANNELS
    exists = pixel < num_pixels
    line = pixel // width
    sample, v, h = line // height, line % height, pixel % width
    if FLIPS:
        h = tl.where(tl.load(flips + sample, mask=exists, other=0) != 0, width - 1 - h, h)
    at = sample * stride_n + c * stride_c + v * stride_h + h * stride_w
    value = tl.load(images + at, mask=exists, other=0).to(tl.float32)
    value = value * tl.load(factor + c) + tl.load(shift + c)
    tl.store(out + at_out, value.to(out.dtype.element_ty), mask=exists)
