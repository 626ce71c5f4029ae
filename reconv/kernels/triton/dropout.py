"""Triton kernel of counter-based dropout: the hash of `models/layers/dropout`, and the product with the mask.

Shapes: x and y [samples, elements]; keys [samples] int64.

Hazards: the hash must equal that of `models/layers/dropout` bit for bit: a run has the same masks with and without
kernels. Products of uint64 wrap, as they should.
"""

import triton
import triton.language as tl

_GOLDEN: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLY_1: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLY_2: tl.constexpr = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _splitmix64(x):
    """The splitmix64 finalizer on uint64."""
    x = (x ^ (x >> 30)) * _MULTIPLY_1
    x = (x ^ (x >> 27)) * _MULTIPLY_2
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=["elements", "rate", "scale"])
def drop(x, keys, y, elements, rate, scale, BLOCK: tl.constexpr):
    """A sample's values times scale, those whose random number is below the rate zero."""
    sample = tl.program_id(1)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = element < elements
    key = _splitmix64((tl.zeros([BLOCK], tl.int64) + tl.load(keys + sample)).to(tl.uint64, bitcast=True))
    hashed = _splitmix64(key + (element + 1).to(tl.uint64) * _GOLDEN)
    number = (hashed >> 40).to(tl.int32).to(tl.float32) * (1.0 / (1 << 24))
    at = sample.to(tl.int64) * elements + element
    # Dropped values are multiplied by zero: infinity and NaN become NaN, as in torch.
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * tl.where(number >= rate, 1.0, 0.0)
    tl.store(y + at, (value * scale).to(y.dtype.element_ty), mask=mask)
