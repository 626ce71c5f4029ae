"""Several small tensors in one, so that one copy moves all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGN_BYTES = 16  # of each tensor: a multiple of every dtype's size


def pack_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of contiguous tensors, one after the other."""
    packed = torch.empty(sum(map(_space, tensors)), dtype=torch.uint8)
    start = 0
    for tensor in tensors:
        packed[start : start + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
        start += _space(tensor)
    return packed


def unpack_tensors(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that were packed, as views; `like` has their shapes and dtypes."""
    found, start = [], 0
    for tensor in like:
        found.append(packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _space(tensor)
    return found


def _space(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
