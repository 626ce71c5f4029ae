"""The widest floating type of a device: float64 where there is one, else float32.

Owns that one fact. Refuses to know what is added in it. Invariant: whatever is summed over a run or an evaluation is
summed in this type, so that no part of the program asks a device for a type it lacks.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WITHOUT_FLOAT64 = ("mps", "hpu")


def widest(device: torch.device) -> torch.dtype:
    """The type sums are kept in on a device."""
    return torch.float32 if device.type in _WITHOUT_FLOAT64 else torch.float64


def wide(value: Tensor) -> Tensor:
    """The value in the widest type of its device."""
    return value.to(widest(value.device))
