"""Passes over channels_last images of an answer, in Triton: the end of a convolution, and images times their gate.

Owns the device code. Refuses to know memory. Every value is read once and written once.
"""

import triton
import triton.language as tl

from reconv.kernels.norm_triton import activated

SIGMOID: tl.constexpr = tl.constexpr(4)  # of a gate; others are a norm's


@triton.jit
def ended(value, ACT: tl.constexpr):
    """The activation at the end of an operation."""
    if ACT == SIGMOID:
        return 1.0 / (1.0 + tl.exp(-value))
    return activated(value, ACT)


@triton.jit(do_not_specialize=["num_rows", "eighths"])
def finish(
    y, bias, other, num_rows, eighths, ADDS: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """The activation of rows of channels plus their bias (plus the other), in place of y."""
    channels = eighths * 8
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (row < num_rows)[:, None] & (channel < channels)[None, :]
    at = row[:, None] * channels + channel[None, :]
    value = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    if ADDS:
        value += tl.load(other + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, ended(value, ACT).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["pixels", "eighths"])
def excite(
    x, gate, other, y, pixels, eighths, ADDS: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """The activation of every pixel times its image's gate (plus the other)."""
    channels = eighths * 8
    num_blocks = tl.cdiv(channels, BLOCK)
    channel = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    pixel = tl.program_id(0) // num_blocks * ROWS + tl.arange(0, ROWS)
    image = tl.program_id(1)
    factor = tl.load(gate + image * channels + channel, mask=exists, other=0.0).to(tl.float32)
    mask = (pixel < pixels)[:, None] & exists[None, :]
    at = (image * pixels + pixel)[:, None] * channels + channel[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * factor[None, :]
    if ADDS:
        value += tl.load(other + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, ended(value, ACT).to(y.dtype.element_ty), mask=mask)
