"""The end of a convolution over channels_last images, in Triton: bias, what is added, and the activation.

Owns the device code. Refuses to know memory. Every value is read once and written in its own place.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_values", "eighths"])
def finish(y, bias, other, num_values, eighths, ADDS: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """The activation of y + bias of its channel (+ other), in place of y."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = at < num_values
    value = tl.load(y + at, mask=exists, other=0.0).to(tl.float32)
    value += tl.load(bias + at % (eighths * 8), mask=exists, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(other + at, mask=exists, other=0.0).to(tl.float32)
    if ACT == 1 or ACT == 2:
        value = tl.maximum(value, 0.0)
    if ACT == 2:
        value = tl.minimum(value, 6.0)
    if ACT == 3:
        value = value / (1.0 + tl.exp(-value))
    tl.store(y + at, value.to(y.dtype.element_ty), mask=exists)
