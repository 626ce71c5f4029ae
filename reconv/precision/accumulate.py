"""The dtype in which sums are accumulated on a device: float64, or float32 where the device has no float64.

A module of its own: metrics and collectives need it without the precision policies.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WITHOUT_FLOAT64 = ("mps", "hpu")


def accumulate_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type in _WITHOUT_FLOAT64 else torch.float64


def to_accumulate_dtype(value: Tensor) -> Tensor:
    """The value in the accumulate dtype of its device."""
    return value.to(accumulate_dtype(value.device))
