"""Triton kernel that adds partial sums.

Shapes: partials [parts, size]; total [size].

Hazards: the order of a sum depends on `parts` alone, never on which program came first, so results repeat.
"""

import triton
import triton.language as tl

_COUNTS = ["size", "parts"]
_MERGED: tl.constexpr = tl.constexpr(64)  # partial sums per load: each load waits for memory


@triton.jit(do_not_specialize=_COUNTS)
def add_partials(partials, total, size, parts, BLOCK: tl.constexpr):
    """The sum of the partial sums [parts, size], in a fixed order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros([_MERGED, BLOCK], tl.float32)
    for base in tl.range(0, parts, _MERGED):
        part = base + tl.arange(0, _MERGED)
        mask = (part < parts)[:, None] & (at < size)[None, :]
        sums += tl.load(partials + part[:, None] * size + at[None, :], mask=mask, other=0.0)
    tl.store(total + at, tl.sum(sums, 0).to(total.dtype.element_ty), mask=at < size)
