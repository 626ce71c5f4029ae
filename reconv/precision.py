"""Precision as one policy object: which dtype, which autocast, which loss scale.

Owns casts, the loss scale and the switches for reduced float32 products. Refuses to know who steps. Invariant: the
loss scale lives on the device and no method reads it on the host; fp64, fp32, tf32 and bf16 scale by nothing at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from reconv.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from reconv.recipe import schema

FIRST_SCALE = 65536.0
LAST_SCALE = 2.0**24  # the largest float16 is 65504: beyond this a gradient above 0.004 overflows
GROWTH = 2.0
BACKOFF = 0.5
GROWTH_INTERVAL_STEPS = 2000


class Policy:
    """Casts only: parameters in one dtype, autocast to another or none."""

    def __init__(self, mode: str, device_kind: str, dtype: torch.dtype, autocast: torch.dtype | None) -> None:
        self.mode = mode
        self.dtype = dtype  # of parameters and inputs
        self._device_kind = device_kind
        self._autocast = autocast

    @property
    def loss_scale(self) -> Tensor | None:
        """The scale in use, on the device, or None where there is none."""
        return None

    @property
    def expects_overflow(self) -> bool:
        """Whether a step that is not ok is the policy's ordinary way to find its scale."""
        return False

    def model(self, model: nn.Module) -> nn.Module:
        """The network with its parameters in the policy's dtype."""
        return model.to(self.dtype)

    def autocast(self) -> AbstractContextManager[None]:
        """The context of a forward pass and its loss."""
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device_kind, self._autocast)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to differentiate."""
        return loss

    def unscale(self, grads: Sequence[Tensor]) -> None:
        """Undo the scale, in place."""

    def update(self, ok: Tensor) -> None:
        """Learn from whether the gradients were finite."""

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over what a checkpoint held."""
        expected = self.state()
        if set(state) != set(expected):
            raise CheckpointError(
                "the saved precision state is not this policy's",
                why=f"precision.mode {self.mode} saves {sorted(expected)}, the checkpoint holds {sorted(state)}",
            )
        for name, tensor in expected.items():
            tensor.copy_(state[name])


class ScaledPolicy(Policy):
    """Float16: gradients too small for the format are lifted by a scale, found by trial or given."""

    def __init__(self, device_kind: str, static_scale: float | None) -> None:
        super().__init__("fp16", device_kind, torch.float32, torch.float16)
        self._is_dynamic = static_scale is None
        first = FIRST_SCALE if static_scale is None else static_scale
        self._scale = torch.full((), first, device=device_kind)
        self._growth_steps = torch.zeros((), dtype=torch.int32, device=device_kind)

    @property
    def loss_scale(self) -> Tensor | None:
        return self._scale

    @property
    def expects_overflow(self) -> bool:
        return self._is_dynamic

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self._scale.to(loss.dtype)

    def unscale(self, grads: Sequence[Tensor]) -> None:
        if grads:
            torch._foreach_mul_(list(grads), self._scale.reciprocal())

    def update(self, ok: Tensor) -> None:
        """Halve the scale after an overflow, double it after enough finite steps in a row."""
        if not self._is_dynamic:
            return
        finite_steps = torch.where(ok, self._growth_steps + 1, 0)
        grows = finite_steps >= GROWTH_INTERVAL_STEPS
        factor = torch.where(ok, torch.where(grows, GROWTH, 1.0), BACKOFF)
        self._scale.copy_((self._scale * factor).clamp(1.0, LAST_SCALE))
        self._growth_steps.copy_(torch.where(grows, 0, finite_steps))

    def state(self) -> dict[str, Tensor]:
        return {"loss_scale": self._scale, "growth_steps": self._growth_steps}


def build_precision(section: schema.Precision, device_kind: str) -> Policy:
    """The policy a recipe names, for a kind of device."""
    mode = section.mode
    if mode == "fp64" and device_kind == "mps":
        raise UsageError("mps has no float64", then="use precision.mode fp32, or --device cpu")
    if mode == "tf32" and device_kind != "cuda":
        raise UsageError(f"tf32 exists on cuda only, not on {device_kind}", then="use precision.mode fp32")
    if device_kind == "cuda":
        _allow_tf32(mode == "tf32")
    if mode == "fp16":
        return ScaledPolicy(device_kind, None if section.loss_scale == "dynamic" else float(section.loss_scale))
    dtype = torch.float64 if mode == "fp64" else torch.float32
    return Policy(mode, device_kind, dtype, torch.bfloat16 if mode == "bf16" else None)


def _allow_tf32(allowed: bool) -> None:
    """Set what float32 products may be; torch's default lets convolutions, but not matrices, use TF32."""
    torch.backends.cuda.matmul.fp32_precision = "tf32" if allowed else "ieee"
    torch.backends.cudnn.conv.fp32_precision = "tf32" if allowed else "ieee"  # type: ignore[attr-defined]
