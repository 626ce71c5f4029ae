"""Precision: which type weights have, which type each operation computes in, and the loss scale.

Owns the named modes and the switches of torch's products. Refuses to know who steps and how a weight is rounded.
Invariant: whoever computes with a network (a step, an evaluation, a prediction, a teacher) does so inside one policy's
`autocast`, so all of them see the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from reconv.errors import UsageError
from reconv.precision.autocast import OPERATIONS, Casts, targets
from reconv.precision.policy import (
    GROWTH_INTERVAL,
    INIT_SCALE,
    MAX_SCALE,
    LossScalingPolicy,
    PrecisionPolicy,
    at_least_float32,
)

if TYPE_CHECKING:
    from reconv.recipe import schema

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
class _Form:
    """What a mode's name stands for."""

    weights: torch.dtype
    lower: torch.dtype | None = None  # of the products; None: that of the weights
    is_whole: bool = False  # every activation is in the lower type, not only what autocast chooses


_FORMS = {
    "fp64": _Form(torch.float64),
    "fp32": _Form(torch.float32),
    "tf32": _Form(torch.float32),
    "32.32": _Form(torch.float32),
    "bf16": _Form(torch.float32, torch.bfloat16),
    "fp16": _Form(torch.float32, torch.float16),
    "bf16-all": _Form(torch.float32, torch.bfloat16, is_whole=True),
    "16.32": _Form(torch.float32, torch.float16, is_whole=True),
    "16.16": _Form(torch.float16, torch.float16, is_whole=True),
}


def build_precision(section: schema.PrecisionConfig, device_kind: str) -> PrecisionPolicy:
    """The policy a recipe names, for a kind of device."""
    mode = section.mode
    _refuse_what_a_device_lacks(section, device_kind)
    if device_kind == "cuda":
        _allow_tf32(mode == "tf32")
        _allow_half_partials(section.reduced_precision_reduction != "off")
    form = _FORMS[mode]
    policy = PrecisionPolicy(
        mode,
        device_kind,
        dtype=form.weights,
        input_dtype=form.lower if form.lower is not None and form.is_whole else form.weights,
        autocast=None if form.is_whole else form.lower,
        casts=_casts(section, form),
    )
    if form.lower != torch.float16:
        return policy
    return LossScalingPolicy(policy, None if section.loss_scale == "dynamic" else float(section.loss_scale))


def _casts(section: schema.PrecisionConfig, form: _Form) -> Casts | None:
    """The types of single operations: those the mode demands, and over them those the recipe lists."""
    wanted = targets(form.lower, is_whole=form.is_whole, ops=section.ops) if form.lower is not None else {}
    return Casts(wanted) if wanted else None


def _refuse_what_a_device_lacks(section: schema.PrecisionConfig, device_kind: str) -> None:
    if section.mode == "fp64" and device_kind in ("mps", "hpu"):
        raise UsageError(f"{device_kind} has no float64", then="use precision.mode fp32, or --device cpu")
    if section.mode == "tf32" and device_kind != "cuda":
        raise UsageError(f"tf32 exists on cuda only, not on {device_kind}", then="use precision.mode fp32")
    if section.reduced_precision_reduction == "on" and device_kind != "cuda":
        raise UsageError(
            f"reduced-precision reductions exist on cuda only, not on {device_kind}",
            then="--set precision.reduced_precision_reduction=auto",
        )


def _allow_tf32(allowed: bool) -> None:
    """Set what float32 products may be; torch's default lets convolutions, but not matrices, use TF32."""
    torch.backends.cuda.matmul.fp32_precision = "tf32" if allowed else "ieee"
    torch.backends.cudnn.conv.fp32_precision = "tf32" if allowed else "ieee"  # type: ignore[attr-defined]


def _allow_half_partials(allowed: bool) -> None:
    """Set whether the parts of a long sum in a half-precision matrix product may be added in half; torch's default."""
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = allowed
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed
