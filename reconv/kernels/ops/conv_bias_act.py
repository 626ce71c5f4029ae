"""Inference convolution fused with bias, residual sum and activation; a 1x1 convolution also with a gate on its input.

On CUDA, the fastest candidate is chosen when a combination of shapes is first seen, but never during CUDA-graph
capture. Not differentiable.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from reconv.kernels.autotune import fastest, tolerance
from reconv.kernels.ops.conv_candidates import Candidate, ConvConfig, ConvInputs, find_candidates, torch_conv

_chosen: dict[tuple[object, ...], Candidate] = {}


def conv_bias_act(
    x: Tensor, weight: Tensor, bias: Tensor, other: Tensor | None, gate: Tensor | None, config: ConvConfig
) -> Tensor:
    """act(conv(x * gate) + bias + other), where gate [n, channels, 1, 1] and other are optional."""
    inputs = ConvInputs(x, weight, bias, other, gate)
    if not x.is_cuda:
        return torch_conv(inputs, config)
    layouts = tuple(None if t is None else (t.shape, t.stride()) for t in inputs)
    key = (*layouts, x.dtype, x.device, config, tolerance(x.dtype))
    if key not in _chosen:
        if torch.cuda.is_current_stream_capturing():
            return torch_conv(inputs, config)
        candidates = find_candidates(inputs, config)
        calls = [partial(candidate, inputs, config) for candidate in candidates]
        index = fastest(partial(torch_conv, inputs, config), calls)
        _chosen[key] = torch_conv if index < 0 else candidates[index]
    return _chosen[key](inputs, config)
