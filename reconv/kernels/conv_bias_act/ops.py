"""A convolution with all that follows it at evaluation: bias, a sum and an activation; of a 1x1 also a gate before it.

Owns which of its forms computes it: on CUDA the fastest for tensors of these shapes, found when they are first seen.
Refuses to know networks and gradients: nothing here is differentiated. Invariant: inside the capture of a graph nothing
is tried.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from reconv.kernels.autotune import fastest, tolerance
from reconv.kernels.conv_bias_act.candidates import Candidate, ConvConfig, ConvInputs, find_candidates, torch_conv

_chosen: dict[tuple[object, ...], Candidate] = {}


def conv_bias_act(
    x: Tensor, weight: Tensor, bias: Tensor, other: Tensor | None, gate: Tensor | None, shape: ConvConfig
) -> Tensor:
    """The activation of the convolution of x (times its gate [n, channels, 1, 1]) plus bias (plus the other)."""
    given = ConvInputs(x, weight, bias, other, gate)
    if not x.is_cuda:
        return torch_conv(given, shape)
    layouts = tuple(None if t is None else (t.shape, t.stride()) for t in given)
    key = (*layouts, x.dtype, x.device, shape, tolerance(x.dtype))
    if key not in _chosen:
        if torch.cuda.is_current_stream_capturing():
            return torch_conv(given, shape)
        forms = find_candidates(given, shape)
        calls = [partial(form, given, shape) for form in forms]
        place = fastest(partial(torch_conv, given, shape), calls)
        _chosen[key] = torch_conv if place < 0 else forms[place]
    return _chosen[key](given, shape)
