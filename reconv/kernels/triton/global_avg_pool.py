"""Triton kernel that writes one value per channel to all pixels of channels_last images.

Shapes: values [images, channels]; out [images, pixels, channels].

Hazards: values are already divided by the number of pixels.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["eighths", "num_pixels"])
def broadcast_to_pixels(values, out, eighths, num_pixels, PIXELS: tl.constexpr, BLOCK: tl.constexpr):
    """out[n, pixel, c] = values[n, c]; a program writes a block of channels of one image."""
    channels = eighths * 8
    image = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    value = tl.load(values + image * channels + channel, mask=exists, other=0.0)
    tile = tl.broadcast_to(value[None, :], [PIXELS, BLOCK])
    for first in range(0, num_pixels, PIXELS):
        pixel = first + tl.arange(0, PIXELS)
        at = (image * num_pixels + pixel)[:, None] * channels + channel[None, :]
        tl.store(out + at, tile, mask=(pixel < num_pixels)[:, None] & exists[None, :])
