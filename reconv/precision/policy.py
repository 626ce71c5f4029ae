"""Precision as one policy object: which dtype, which autocast, which loss scale.

Owns casts and the loss scale. Refuses to know who steps. Invariant: the loss scale lives on the device and no method
reads it on the host; policies without float16 scale by nothing at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from reconv.errors import CheckpointError
from reconv.precision.autocast import Casts
from reconv.precision.cast_weights import JointWeightCast, weights_of_products

INIT_SCALE = 65536.0
MAX_SCALE = 2.0**24  # the largest float16 is 65504: beyond this a gradient above 0.004 overflows
GROWTH = 2.0
BACKOFF = 0.5
GROWTH_INTERVAL = 2000
HALVES = (torch.float16, torch.bfloat16)


def at_least_float32(model: nn.Module) -> nn.Module:
    """A network that is not trained, with parameters that hold averages too; a policy's casts make halves of them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    return model


class PrecisionPolicy:
    """Casts only: parameters in one dtype, products in another or the same."""

    def __init__(
        self,
        mode: str,
        device_kind: str,
        *,
        dtype: torch.dtype,
        input_dtype: torch.dtype,
        autocast: torch.dtype | None = None,
        casts: Casts | None = None,
    ) -> None:
        self.mode = mode
        self.dtype = dtype  # of parameters
        self.input_dtype = input_dtype  # of images
        self._device_kind = device_kind
        self._autocast = autocast
        self._casts = casts
        self._together: list[nn.Parameter] = []

    @property
    def compute_dtype(self) -> torch.dtype:
        """What most activations are kept in."""
        return self._autocast or self.input_dtype

    @property
    def loss_scale(self) -> Tensor | None:
        """The scale in use, on the device, or None where there is none."""
        return None

    @property
    def expects_overflow(self) -> bool:
        """Whether a step that is not ok is the policy's ordinary way to find its scale."""
        return False

    def cast_model(self, model: nn.Module) -> nn.Module:
        """The network with its parameters in the policy's dtype.

        Buffers never become halves: running statistics move by less than half a step of such a type, and would stall.
        """
        if self.dtype not in HALVES:
            return model.to(self.dtype)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self.dtype)
        return model

    def autocast(self) -> AbstractContextManager[None]:
        """The context of a forward pass."""
        if self._casts is not None:
            return self._with_casts(self._casts)
        if self._autocast is None:
            return nullcontext()
        if self._together:
            return self._with_casts(JointWeightCast(self._together, self._autocast))
        return torch.autocast(self._device_kind, self._autocast)

    def cast_weights_jointly(self, model: nn.Module) -> None:
        """From now on cast this network's weights all at once, where autocast would cast each by itself."""
        if self._autocast is not None and self._casts is None:
            self._together = weights_of_products(model)

    @contextmanager
    def _with_casts(self, casts: Casts | JointWeightCast) -> Iterator[None]:
        with torch.autocast(self._device_kind, self._autocast, enabled=self._autocast is not None), casts:
            yield

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to differentiate."""
        return loss

    def unscale(self, grads: Sequence[Tensor]) -> None:
        """Undo the scale, in place."""

    def update(self, ok: Tensor) -> None:
        """Learn from whether the gradients were finite."""

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint must hold."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what a checkpoint held."""
        expected = self.state_dict()
        if set(state) != set(expected):
            raise CheckpointError(
                "the saved precision state is not this policy's",
                why=f"precision.mode {self.mode} saves {sorted(expected)}, the checkpoint holds {sorted(state)}",
            )
        for name, tensor in expected.items():
            tensor.copy_(state[name])


class LossScalingPolicy(PrecisionPolicy):
    """Float16: gradients too small for the format are lifted by a scale, found by trial or given."""

    def __init__(self, plain: PrecisionPolicy, static_scale: float | None) -> None:
        super().__init__(
            plain.mode,
            plain._device_kind,
            dtype=plain.dtype,
            input_dtype=plain.input_dtype,
            autocast=plain._autocast,
            casts=plain._casts,
        )
        device_kind = plain._device_kind
        self._is_dynamic = static_scale is None
        first = INIT_SCALE if static_scale is None else static_scale
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
        grows = finite_steps >= GROWTH_INTERVAL
        factor = torch.where(ok, torch.where(grows, GROWTH, 1.0), BACKOFF)
        self._scale.copy_((self._scale * factor).clamp(1.0, MAX_SCALE))
        self._growth_steps.copy_(torch.where(grows, 0, finite_steps))

    def state_dict(self) -> dict[str, Tensor]:
        return {"loss_scale": self._scale, "growth_steps": self._growth_steps}
