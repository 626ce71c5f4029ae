"""Precision policies: which dtypes and which autocast a model runs with, the loss scale, and the dtype of sums.

Training, evaluation, prediction and teachers all run inside a policy's `autocast`, so that they see the same numbers.
The loss scale lives on the device and is never read by the host.

Batch norm statistics, losses, EMA and optimizer state are never below float32 (tests/precision).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from reconv.core.errors import CheckpointError
from reconv.precision.autocast import CastOps
from reconv.precision.cast_weights import CastWeightsOnce, castable_weights

# As in torch.amp.GradScaler.
INIT_SCALE = 65536.0
MAX_SCALE = 2.0**24  # the largest float16 is 65504: beyond this a gradient above 0.004 overflows
GROWTH_FACTOR = 2.0
BACKOFF_FACTOR = 0.5
GROWTH_INTERVAL = 2000  # steps
HALF_DTYPES = (torch.float16, torch.bfloat16)
WITHOUT_FLOAT64 = ("mps", "hpu")


def accumulate_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which sums are accumulated on a device: float64, or float32 where the device has no float64."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def to_accumulate_dtype(value: Tensor) -> Tensor:
    """The value in the accumulate dtype of its device."""
    return value.to(accumulate_dtype(value.device))


def at_least_float32(model: nn.Module) -> nn.Module:
    """Convert half-precision parameters to float32, in place, so that they can hold an average."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    return model


class PrecisionPolicy:
    """Parameters in one dtype, matrix products in another or the same; no loss scaling."""

    def __init__(
        self,
        mode: str,
        device_kind: str,
        *,
        dtype: torch.dtype,
        input_dtype: torch.dtype,
        autocast_dtype: torch.dtype | None = None,
        cast_ops: CastOps | None = None,
    ) -> None:
        self.mode = mode
        self.dtype = dtype  # of parameters
        self.input_dtype = input_dtype  # of images
        self._device_kind = device_kind
        self._autocast_dtype = autocast_dtype
        self._cast_ops = cast_ops
        self._weights_cast_once: list[nn.Parameter] = []

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of most activations."""
        return self._autocast_dtype or self.input_dtype

    @property
    def loss_scale(self) -> Tensor | None:
        """The loss scale, on the device, or None without loss scaling."""
        return None

    @property
    def expects_overflow(self) -> bool:
        """True if a step that is not ok is a normal part of finding the loss scale."""
        return False

    def cast_model(self, model: nn.Module) -> nn.Module:
        """The model with its parameters in the policy's dtype.

        Buffers are never cast to half precision: updates of running statistics are smaller than its spacing.
        """
        if self.dtype not in HALF_DTYPES:
            return model.to(self.dtype)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self.dtype)
        return model

    def autocast(self) -> AbstractContextManager[None]:
        """The context of a forward pass."""
        if self._cast_ops is not None:
            return self._with_mode(self._cast_ops)
        if self._autocast_dtype is None:
            return nullcontext()
        if self._weights_cast_once:
            return self._with_mode(CastWeightsOnce(self._weights_cast_once, self._autocast_dtype))
        return torch.autocast(self._device_kind, self._autocast_dtype)

    def cast_weights_once(self, model: nn.Module) -> None:
        """From now on cast all weights of this model together in each pass, where autocast would cast each alone."""
        if self._autocast_dtype is not None and self._cast_ops is None:
            self._weights_cast_once = castable_weights(model)

    @contextmanager
    def _with_mode(self, mode: CastOps | CastWeightsOnce) -> Iterator[None]:
        dtype = self._autocast_dtype
        with torch.autocast(self._device_kind, dtype, enabled=dtype is not None), mode:
            yield

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss

    def unscale(self, grads: Sequence[Tensor]) -> None:
        """Divide the gradients by the loss scale, in place."""

    def update(self, ok: Tensor) -> None:
        """Adjust the loss scale, given whether the gradients were finite."""

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        expected = self.state_dict()
        if set(state) != set(expected):
            raise CheckpointError(
                "the checkpoint was saved with another precision.mode",
                why=f"{self.mode} saves {sorted(expected)}, but the checkpoint holds {sorted(state)}",
            )
        for name, tensor in expected.items():
            if tensor.shape != state[name].shape:
                raise CheckpointError(
                    f"the saved {name} has shape {tuple(state[name].shape)}, not {tuple(tensor.shape)}"
                )
            tensor.copy_(state[name])


class LossScalingPolicy(PrecisionPolicy):
    """Float16 with a static or dynamic loss scale, which keeps small gradients from underflowing."""

    def __init__(self, base: PrecisionPolicy, static_scale: float | None) -> None:
        super().__init__(
            base.mode,
            base._device_kind,
            dtype=base.dtype,
            input_dtype=base.input_dtype,
            autocast_dtype=base._autocast_dtype,
            cast_ops=base._cast_ops,
        )
        self._is_dynamic = static_scale is None
        initial = INIT_SCALE if static_scale is None else static_scale
        self._scale = torch.full((), initial, device=base._device_kind)
        self._growth_steps = torch.zeros((), dtype=torch.int32, device=base._device_kind)

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
        """Halve the scale after an overflow, double it after GROWTH_INTERVAL finite steps in a row."""
        if not self._is_dynamic:
            return
        finite_steps = torch.where(ok, self._growth_steps + 1, 0)
        grows = finite_steps >= GROWTH_INTERVAL
        factor = torch.where(ok, torch.where(grows, GROWTH_FACTOR, 1.0), BACKOFF_FACTOR)
        self._scale.copy_((self._scale * factor).clamp(1.0, MAX_SCALE))
        self._growth_steps.copy_(torch.where(grows, 0, finite_steps))

    def state_dict(self) -> dict[str, Tensor]:
        return {"loss_scale": self._scale, "growth_steps": self._growth_steps}
