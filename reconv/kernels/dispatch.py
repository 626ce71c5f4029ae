"""Checks of the devices, dtypes, layouts and shapes that the kernels support."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from reconv.kernels.jit.launch import is_traced

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CHANNEL_MULTIPLE = 8  # 16 bytes in half precision: one vector load
MAX_ELEMENTS = 2**31 - 1  # kernels index with 32 bits


@cache
def has_triton() -> bool:
    """True if Triton is installed."""
    return find_spec("triton") is not None


def is_interpreted() -> bool:
    """True if Triton's interpreter runs kernels, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def supports_device(x: Tensor) -> bool:
    """True if kernels run on this tensor's device."""
    return (x.is_cuda or is_interpreted() or is_traced(x)) and has_triton()


def supports(x: Tensor) -> bool:
    """True if kernels support this image tensor [n, channels, height, width]."""
    return (
        supports_device(x)
        and x.dim() == 4
        and x.dtype in DTYPES
        and x.shape[1] % CHANNEL_MULTIPLE == 0
        and 0 < x.numel() <= MAX_ELEMENTS
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def conv_output_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a convolution's output: autocast's, else the input's. A traced tensor may stand for any device."""
    for kind in ("cuda", "cpu") if x.is_meta else (x.device.type,):
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
    return x.dtype


def supports_groups(groups: Sequence[int]) -> bool:
    """True if all groups but the last have the same size, as kernels assume."""
    return len(set(groups[:-1])) <= 1
