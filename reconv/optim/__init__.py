"""Optimizers, weight-decay groups and the exponential moving average of weights.

Public are `EMA`, `FusedLAMB`, `FusedLARS` and `FusedRMSpropTF`, for anybody's loop; the other names are the trainer's.
"""

from __future__ import annotations

from reconv.optim.adamw import AdamW
from reconv.optim.clip_grad import ClipGrad
from reconv.optim.ema import ModelEma
from reconv.optim.factory import (
    build_clip_grad,
    build_optimizer,
    describe_rate_scales,
    optimizer_groups,
    rate_scales,
)
from reconv.optim.lamb import LAMB
from reconv.optim.lars import LARS
from reconv.optim.optimizer import Optimizer
from reconv.optim.param_groups import DecayGroups, decay_groups, norm_biases
from reconv.optim.rmsprop import RMSprop
from reconv.optim.sgd import SGD
from reconv.optim.stochastic_rounding import HalfPrecisionOptimizer, Rounding
from reconv.optim.torch_optimizers import EMA, FusedLAMB, FusedLARS, FusedRMSpropTF

__all__ = [
    "EMA",
    "LAMB",
    "LARS",
    "SGD",
    "AdamW",
    "ClipGrad",
    "DecayGroups",
    "FusedLAMB",
    "FusedLARS",
    "FusedRMSpropTF",
    "HalfPrecisionOptimizer",
    "ModelEma",
    "Optimizer",
    "RMSprop",
    "Rounding",
    "build_clip_grad",
    "build_optimizer",
    "decay_groups",
    "describe_rate_scales",
    "norm_biases",
    "optimizer_groups",
    "rate_scales",
]
