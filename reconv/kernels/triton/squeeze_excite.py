"""Triton kernels of squeeze-and-excitation, channels_last.

A program processes all pixels of one image and a block of channels, so that a sum over pixels stays within it.

Shapes: x, y, dy and dx [images * pixels, channels]; gate, dgate, dmeans and the result of `means` [images, channels].

Hazards: a program loops over all pixels of its image, so few images of many pixels leave most of a GPU idle.
"""

import triton
import triton.language as tl

_COUNTS = ["eighths", "pixels"]


@triton.jit
def _channels(channels, BLOCK: tl.constexpr):
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return channel, channel < channels


@triton.jit(do_not_specialize=_COUNTS)
def means(x, result, eighths, pixels, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """The mean over an image's pixels [images, channels]."""
    channels = eighths * 8
    channel, exists = _channels(channels, BLOCK)
    image = tl.program_id(1)
    total = tl.zeros([LANES, BLOCK], tl.float32)
    for first in range(0, pixels, LANES):
        pixel = first + tl.arange(0, LANES)
        mask = (pixel < pixels)[:, None] & exists[None, :]
        at = (image * pixels + pixel)[:, None] * channels + channel[None, :]
        total += tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / pixels
    tl.store(result + image * channels + channel, mean.to(result.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=_COUNTS)
def scale(x, gate, y, eighths, pixels, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """x times its image's gate."""
    channels = eighths * 8
    channel, exists = _channels(channels, BLOCK)
    image = tl.program_id(1)
    factor = tl.load(gate + image * channels + channel, mask=exists, other=0.0).to(tl.float32)[None, :]
    for first in range(0, pixels, LANES):
        pixel = first + tl.arange(0, LANES)
        mask = (pixel < pixels)[:, None] & exists[None, :]
        at = (image * pixels + pixel)[:, None] * channels + channel[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * factor
        tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_COUNTS)
def gate_gradient(dy, x, dgate, eighths, pixels, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient of the gate [images, channels]."""
    channels = eighths * 8
    channel, exists = _channels(channels, BLOCK)
    image = tl.program_id(1)
    total = tl.zeros([LANES, BLOCK], tl.float32)
    for first in range(0, pixels, LANES):
        pixel = first + tl.arange(0, LANES)
        mask = (pixel < pixels)[:, None] & exists[None, :]
        at = (image * pixels + pixel)[:, None] * channels + channel[None, :]
        gradient = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        total += gradient * tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(dgate + image * channels + channel, tl.sum(total, 0).to(dgate.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=_COUNTS)
def images_gradient(dy, gate, dmeans, dx, eighths, pixels, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient of the images: through the product with the gate, and through the means."""
    channels = eighths * 8
    channel, exists = _channels(channels, BLOCK)
    image = tl.program_id(1)
    factor = tl.load(gate + image * channels + channel, mask=exists, other=0.0).to(tl.float32)[None, :]
    share = tl.load(dmeans + image * channels + channel, mask=exists, other=0.0).to(tl.float32)[None, :] / pixels
    for first in range(0, pixels, LANES):
        pixel = first + tl.arange(0, LANES)
        mask = (pixel < pixels)[:, None] & exists[None, :]
        at = (image * pixels + pixel)[:, None] * channels + channel[None, :]
        value = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32) * factor + share
        tl.store(dx + at, value.to(dx.dtype.element_ty), mask=mask)
