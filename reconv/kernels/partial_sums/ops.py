"""The sum of the partial sums that the programs of a kernel stored."""

from __future__ import annotations

from torch import Tensor

from reconv.kernels.jit.launch import launch
from reconv.kernels.partial_sums import triton as device

_SUMS, _WARPS = 128, 4  # sums and warps of a program


def add_partials(partials: Tensor, total: Tensor) -> None:
    """Write the sum of float32 partial sums [splits, ...] over the splits, in a fixed order and the memory's layout."""
    size = total.numel()
    launch(
        device.add_partials, (-(-size // _SUMS),), partials, total, size, len(partials), BLOCK=_SUMS, num_warps=_WARPS
    )
