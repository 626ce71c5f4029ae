"""Numeric precision: the dtype of weights and of each operation, and loss scaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from reconv.core.errors import UsageError
from reconv.precision.autocast import OPERATIONS, CastOps, op_dtypes
from reconv.precision.policy import (
    GROWTH_INTERVAL,
    INIT_SCALE,
    MAX_SCALE,
    WITHOUT_FLOAT64,
    LossScalingPolicy,
    PrecisionPolicy,
    at_least_float32,
)

if TYPE_CHECKING:
    from reconv.recipe.parts.precision import PrecisionConfig

__all__ = [
    "GROWTH_INTERVAL",
    "INIT_SCALE",
    "MAX_SCALE",
    "OPERATIONS",
    "LossScalingPolicy",
    "PrecisionPolicy",
    "at_least_float32",
    "build_precision",
]


@dataclass(frozen=True, slots=True)
class _Mode:
    weights: torch.dtype
    low_precision: torch.dtype | None = None  # of matrix products; None: that of the weights
    casts_all: bool = False  # all activations are in low precision, not only those that torch.autocast chooses


_MODES = {
    "fp64": _Mode(torch.float64),
    "fp32": _Mode(torch.float32),
    "tf32": _Mode(torch.float32),
    "32.32": _Mode(torch.float32),
    "bf16": _Mode(torch.float32, torch.bfloat16),
    "fp16": _Mode(torch.float32, torch.float16),
    "bf16-all": _Mode(torch.float32, torch.bfloat16, casts_all=True),
    "16.32": _Mode(torch.float32, torch.float16, casts_all=True),
    "16.16": _Mode(torch.float16, torch.float16, casts_all=True),
}


def build_precision(section: PrecisionConfig, device_kind: str) -> PrecisionPolicy:
    """The policy of a recipe on a kind of device; also sets torch's global switches for CUDA matrix products."""
    check_precision(section, device_kind)
    if device_kind == "cuda":
        _allow_tf32(section.mode == "tf32")
        _allow_reduced_precision_reduction(section.reduced_precision_reduction != "off")
    mode = _MODES[section.mode]
    policy = PrecisionPolicy(
        section.mode,
        device_kind,
        dtype=mode.weights,
        input_dtype=mode.low_precision if mode.low_precision is not None and mode.casts_all else mode.weights,
        autocast_dtype=None if mode.casts_all else mode.low_precision,
        cast_ops=_cast_ops(section, mode),
    )
    if mode.low_precision != torch.float16:
        return policy
    return LossScalingPolicy(policy, None if section.loss_scale == "dynamic" else float(section.loss_scale))


def _cast_ops(section: PrecisionConfig, mode: _Mode) -> CastOps | None:
    """Casts of single operations: those of the mode, overridden by those that the recipe lists."""
    if mode.low_precision is None:
        return None
    dtypes = op_dtypes(mode.low_precision, casts_all=mode.casts_all, ops=section.ops)
    return CastOps(dtypes) if dtypes else None


def check_precision(section: PrecisionConfig, device_kind: str) -> None:
    """Refuse a precision that the device does not have."""
    if section.mode == "fp64" and device_kind in WITHOUT_FLOAT64:
        raise UsageError(f"{device_kind} has no float64", hint="use precision.mode fp32, or --device cpu")
    if section.mode == "tf32" and device_kind != "cuda":
        raise UsageError(f"tf32 exists on cuda only, not on {device_kind}", hint="--set precision.mode=fp32")
    if section.reduced_precision_reduction == "on" and device_kind != "cuda":
        raise UsageError(
            f"reduced-precision reductions exist on cuda only, not on {device_kind}",
            hint="--set precision.reduced_precision_reduction=auto",
        )


def _allow_tf32(allowed: bool) -> None:
    """Set it for matrix products and convolutions alike; torch allows it for convolutions only."""
    torch.backends.cuda.matmul.fp32_precision = "tf32" if allowed else "ieee"
    torch.backends.cudnn.conv.fp32_precision = "tf32" if allowed else "ieee"  # type: ignore[attr-defined]


def _allow_reduced_precision_reduction(allowed: bool) -> None:
    """True if partial sums of half-precision matrix products may be added in half precision, torch's default."""
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = allowed
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed
