"""The gate of squeeze-and-excitation: sigmoid(fc2(act(fc1(means)))), in one launch, and its gradients in two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from reconv.kernels.dispatch import CHANNEL_MULTIPLE
from reconv.kernels.jit.launch import launch
from reconv.kernels.ops.batch_norm import ACTIVATION_IDS
from reconv.kernels.reference import Activation
from reconv.kernels.triton import excitation as device

MAX_HIDDEN = 128
_MIN_TILE = 16  # of tensor cores
_IMAGES, _CHANNELS, _INPUTS = 16, 128, 128  # of a program's tile, forward and for the hidden gradient
_SUMMED_IMAGES, _SUMMED_CHANNELS = 64, 16  # of the tiles that are summed over images


def supports(means: Tensor, weight1: Tensor, weight2: Tensor) -> bool:
    """True if the kernels support these means [n, channels, 1, 1] and weights of 1x1 convolutions."""
    channels, hidden = means.shape[1], len(weight1)
    return (
        means.dtype in (torch.bfloat16, torch.float16)
        and channels % CHANNEL_MULTIPLE == 0
        and hidden <= MAX_HIDDEN
        and tuple(weight1.shape) == (hidden, channels, 1, 1)
        and tuple(weight2.shape) == (channels, hidden, 1, 1)
    )


def excitation_gate(
    means: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, act: Activation
) -> Tensor:
    """The factors for channels of these means, both [n, channels, 1, 1]; weights are of the same dtype."""
    gate: Tensor = _ExcitationGate.apply(means, weight1, bias1, weight2, bias2, act)  # type: ignore[no-untyped-call]
    return gate


class _ExcitationGate(Function):
    @staticmethod
    def forward(
        ctx: Any, means: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, act: Activation
    ) -> Tensor:
        (images, channels), hidden = means.shape[:2], len(weight1)
        means, weight1, weight2 = means.contiguous(), weight1.contiguous(), weight2.contiguous()
        gate = torch.empty(means.shape, dtype=means.dtype, device=means.device)
        z = torch.empty(images, _padded(hidden), dtype=torch.float32, device=means.device)
        launch(
            device.gate, (-(-images // _IMAGES), -(-channels // _CHANNELS)),
            means, weight1, bias1, weight2, bias2, z, gate, images, channels // 8, hidden,
            ACT=ACTIVATION_IDS[act], ROWS=_IMAGES, HIDDEN=_padded(hidden), BLOCK=_CHANNELS, BLOCK_K=_INPUTS,
        )  # fmt: skip
        ctx.save_for_backward(means, weight1, bias1, weight2, bias2, z, gate)
        ctx.act = act
        return gate

    @staticmethod
    def backward(ctx: Any, dgate: Tensor) -> tuple[Tensor | None, ...]:
        means, weight1, bias1, weight2, bias2, z, gate = ctx.saved_tensors
        (images, channels), hidden = means.shape[:2], len(weight1)
        dgate, dz = dgate.contiguous(), torch.empty_like(z, dtype=means.dtype)
        counts, constants = (images, channels // 8, hidden), {"ACT": ACTIVATION_IDS[ctx.act], "HIDDEN": _padded(hidden)}
        launch(
            device.hidden_gradient, (-(-images // _IMAGES),), dgate, gate, weight2, z, dz, *counts,
            ROWS=_IMAGES, BLOCK_K=_INPUTS, **constants,
        )  # fmt: skip
        gradients = [torch.empty_like(tensor) for tensor in (means, weight1, bias1, weight2, bias2)]
        launch(
            device.gradients, (-(-channels // _SUMMED_CHANNELS),),
            dgate, gate, means, weight1, z, dz, *gradients, *counts,
            ROWS=_SUMMED_IMAGES, BLOCK=_SUMMED_CHANNELS, **constants,
        )  # fmt: skip
        return *gradients, None


def _padded(hidden: int) -> int:
    """The width of a tile for the hidden channels."""
    return max(_MIN_TILE, 1 << (hidden - 1).bit_length())
