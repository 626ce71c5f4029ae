"""Plain operations that the kernels are tested against; any dtype, device and layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["none", "relu", "relu6", "silu", "hardswish"]

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "hardswish": F.hardswish,
}


def batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, running_var: Tensor, eps: float, groups: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The groups of x, each normalized by its own statistics, and mean and unbiased variance [groups, 2, channels]."""
    outputs, records = [], []
    for part in x.split(list(groups)):
        count = part.numel() // part.shape[1]
        mean = part.mean((0, 2, 3))
        centered = part - mean.view(1, -1, 1, 1)
        variance = centered.square().mean((0, 2, 3))
        rstd = (variance + eps).rsqrt()
        outputs.append(centered * (rstd * weight).view(1, -1, 1, 1) + bias.view(1, -1, 1, 1))
        unbiased = variance * (count / (count - 1)) if count > 1 else running_var
        records.append(torch.stack([mean, unbiased]).detach())
    return torch.cat(outputs), torch.stack(records)
