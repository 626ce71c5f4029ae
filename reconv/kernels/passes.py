"""What a network at evaluation does to images beside convolving them, in one pass each.

Owns which tensors kernels take for it; others are computed plainly. Refuses to know networks and gradients: nothing
here is differentiated. Invariant: the values of the plain operations, a NaN too.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from reconv.kernels import fused
from reconv.kernels.window import Window


def largest(x: Tensor, side: int, stride: int, pad: int, ceil: bool) -> Tensor:
    """The largest value of each window of images."""
    if fused.available(x):
        from reconv.kernels.max_pool import max_pool_values

        return max_pool_values(x, Window(side, stride, pad, ceil))
    return F.max_pool2d(x, side, stride, pad, ceil_mode=ceil)
