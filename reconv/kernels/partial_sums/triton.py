"""Triton kernel that adds the partial sums of the programs of another kernel."""

import triton
import triton.language as tl

_MERGED: tl.constexpr = tl.constexpr(16)  # partial sums per load


@triton.jit(do_not_specialize=["size", "splits"])
def add_partials(partials, total, size, splits, BLOCK: tl.constexpr):
    """The sum of the partial sums [splits, size], in a fixed order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    merged = tl.zeros([_MERGED, BLOCK], tl.float32)
    for base in tl.range(0, splits, _MERGED):
        split = base + tl.arange(0, _MERGED)
        mask = (split < splits)[:, None] & (at < size)[None, :]
        merged += tl.load(partials + split[:, None] * size + at[None, :], mask=mask, other=0.0)
    tl.store(total + at, tl.sum(merged, 0).to(total.dtype.element_ty), mask=at < size)
