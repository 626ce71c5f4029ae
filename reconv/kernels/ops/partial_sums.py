"""Adding the partial sums of a kernel's programs, such as their parts of a weight gradient, in a fixed order."""

from __future__ import annotations

from torch import Tensor

from reconv.kernels.jit.launch import launch
from reconv.kernels.triton import partial_sums as device

_BLOCK, _WARPS = 64, 4


def add_partials(partials: Tensor, total: Tensor) -> Tensor:
    """Write the sum of partials [parts, ...] into `total`, in its dtype and in the order of its memory."""
    size = total.numel()
    launch(
        device.add_partials, (-(-size // _BLOCK),), partials, total, size, len(partials), BLOCK=_BLOCK, num_warps=_WARPS
    )
    return total
