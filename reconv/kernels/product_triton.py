"""The end of a convolution over channels_last images, in Triton: bias, what is added, and the activation.

Owns the device code. Refuses to know memory. Every value is read once and written in its own place.
"""

import triton
import triton.language as tl


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
    if ACT == 1 or ACT == 2:
        value = tl.maximum(value, 0.0)
    if ACT == 2:
        value = tl.minimum(value, 6.0)
    if ACT == 3:
        value = value / (1.0 + tl.exp(-value))
    tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)
