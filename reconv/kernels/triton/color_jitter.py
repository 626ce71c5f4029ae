"""Triton kernels of color jitter: the sum of each channel of an image, then all operations on its pixels.

Shapes: images [n, 3, height, width] uint8 of any strides; sums [n, 3] int32; jitter [n, 4]; flips [n]; factor and shift
[3]; out [n, height, width, 3].

Hazards: sums are added by atomic operations on integers, so their order does not matter; they must be zero before.
Divisions are rounded (`div_rn`), as torch's are.
"""

import triton
import triton.language as tl

CHANNELS: tl.constexpr = tl.constexpr(3)
WHITE: tl.constexpr = tl.constexpr(255.0)

_COUNTS = ["white_pixels", "height", "width", "stride_n", "stride_c", "stride_h", "stride_w"]


@triton.jit(do_not_specialize=["num_pixels", "stride_n", "stride_c", "stride_pixel"])
def channel_sums(images, sums, num_pixels, stride_n, stride_c, stride_pixel, PIXELS: tl.constexpr):
    """Add this program's pixels to sums[n, c]; all pixels of an image are stride_pixel apart."""
    sample = tl.program_id(1)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    at = images + sample * stride_n + pixel * stride_pixel
    for c in tl.static_range(CHANNELS):
        value = tl.load(at + c * stride_c, mask=pixel < num_pixels, other=0).to(tl.int32)
        tl.atomic_add(sums + sample * CHANNELS + c, tl.sum(value, 0), sem="relaxed")


@triton.jit
def _brightness_and_contrast(at, total, exists, white_pixels, brightness, contrast):
    """A channel of 0 to 1, stretched about the mean of its image."""
    mean = tl.div_rn(tl.load(total).to(tl.float32), white_pixels)
    value = tl.div_rn(tl.load(at, mask=exists, other=0).to(tl.float32), WHITE)
    return (value - mean) * contrast + mean + brightness


@triton.jit
def _ramp(z):
    return tl.minimum(tl.maximum(z, 0.0), 1.0)


@triton.jit
def _store_channel(out, number, factor, shift, ramp, saturation, value, exists):
    """A channel back from HSV, normalized."""
    channel = ((ramp - 1.0) * saturation + 1.0) * value * WHITE
    channel = channel * tl.load(factor + number) + tl.load(shift + number)
    tl.store(out + number, channel.to(out.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=_COUNTS)
def jitter_and_normalize(
    images, sums, jitter, flips, factor, shift, out, white_pixels, height, width, stride_n, stride_c, stride_h,
    stride_w, FLIPS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """out[n, i, j, c] = jittered images[n, c, i, j or the mirrored j] * factor[c] + shift[c]."""
    sample = tl.program_id(1)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    exists = pixel < height * width
    v = pixel // width
    h = pixel - v * width
    if FLIPS:
        h = tl.where(tl.load(flips + sample) != 0, width - 1 - h, h)
    at, total = images + sample * stride_n + v * stride_h + h * stride_w, sums + sample * CHANNELS
    jitter += sample * 4
    brightness, contrast = tl.load(jitter), tl.load(jitter + 1)
    red = _brightness_and_contrast(at, total, exists, white_pixels, brightness, contrast)
    green = _brightness_and_contrast(at + stride_c, total + 1, exists, white_pixels, brightness, contrast)
    blue = _brightness_and_contrast(at + 2 * stride_c, total + 2, exists, white_pixels, brightness, contrast)

    value = tl.maximum(tl.maximum(red, green), blue)
    chroma = value - tl.minimum(tl.minimum(red, green), blue)
    difference = tl.where(value == red, green - blue, tl.where(value == green, blue - red, red - green))
    sextant = tl.where(value == red, 0.0, tl.where(value == green, 2.0, 4.0))
    sextant += tl.div_rn(difference, tl.where(chroma > 0.0, chroma, 1.0))
    hue = tl.where(chroma > 0.0, sextant, 0.0) + 6.0 * tl.load(jitter + 3)
    hue = tl.where(hue < 0.0, hue + 6.0, tl.where(hue >= 6.0, hue - 6.0, hue))  # from -4 to 8 before
    saturation = tl.where(value > 0.0, tl.div_rn(chroma, tl.where(value > 0.0, value, 1.0)), 0.0)
    saturation = _ramp(saturation * tl.load(jitter + 2))

    to = out + (sample * height * width + pixel) * CHANNELS
    _store_channel(to, 0, factor, shift, _ramp(tl.abs(hue - 3.0) - 1.0), saturation, value, exists)
    _store_channel(to, 1, factor, shift, _ramp(2.0 - tl.abs(hue - 2.0)), saturation, value, exists)
    _store_channel(to, 2, factor, shift, _ramp(2.0 - tl.abs(hue - 4.0)), saturation, value, exists)
