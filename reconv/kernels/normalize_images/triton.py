"""Triton kernel that flips, scales, shifts and casts uint8 images."""

import triton
import triton.language as tl

_COUNTS = ["height", "width", "stride_n", "stride_c", "stride_h", "stride_w"]


@triton.jit(do_not_specialize=_COUNTS)
def normalize(
    images, flips, factor, shift, out, height, width, stride_n, stride_c, stride_h, stride_w,
    CHANNELS: tl.constexpr, FLIPS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """out[n, i, j, c] = images[n, c, i, j or the mirrored j] * factor[c] + shift[c]."""
    sample = tl.program_id(1)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    exists = pixel < height * width
    v = pixel // width
    h = pixel - v * width
    if FLIPS:
        h = tl.where(tl.load(flips + sample) != 0, width - 1 - h, h)
    at = images + sample * stride_n + v * stride_h + h * stride_w
    at_out = out + (sample * height * width + pixel) * CHANNELS
    for c in tl.static_range(CHANNELS):
        value = tl.load(at + c * stride_c, mask=exists, other=0).to(tl.float32)
        value = value * tl.load(factor + c) + tl.load(shift + c)
        tl.store(at_out + c, value.to(out.dtype.element_ty), mask=exists)
