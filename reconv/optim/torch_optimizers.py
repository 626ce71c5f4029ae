"""LARS, LAMB and TensorFlow's RMSprop as ordinary torch optimizers, and the average of weights, for anybody's loop.

Each step updates all parameters of a group by a few launches. Parameter groups, schedulers, `GradScaler`, state dicts
and closures are torch's. The arithmetic is that of the trainer's optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from reconv.core.errors import UsageError
from reconv.optim.adamw import EXP_AVG, EXP_AVG_SQ
from reconv.optim.ema import ModelEma
from reconv.optim.lamb import lamb_update
from reconv.optim.lars import lars_update
from reconv.optim.optimizer import STEP, ParamGroup
from reconv.optim.rmsprop import SQUARE, RMSpropRule
from reconv.optim.sgd import MOMENTUM

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class _GroupOptimizer(Optimizer):
    """Base class: state tensors beside each parameter, and an update of parameters with one device and dtype."""

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay"):
            if not (isinstance(defaults[name], Tensor) or (math.isfinite(defaults[name]) and defaults[name] >= 0)):
                raise ValueError(f"{name} is {defaults[name]}, which is not a number from 0 on")
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for options in self.param_groups:
            alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for parameter in options["params"]:
                if parameter.grad is not None:
                    alike.setdefault((parameter.device, parameter.dtype), []).append(parameter)
            for (device, _), params in alike.items():
                group = self._param_group(params, options)
                self._update(group, options["lr"], torch.ones((), dtype=torch.bool, device=device), options)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned; counters go to the device of their parameter, too."""
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            if STEP in state:
                state[STEP] = state[STEP].to(parameter.device, torch.float32)

    def _param_group(self, params: list[Tensor], options: Mapping[str, Any]) -> ParamGroup:
        initial = self._initial_state(options)
        for parameter in params:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise UsageError(f"{type(self).__name__} takes no sparse gradients")
            if hasattr(parameter, "placements"):
                raise UsageError(
                    f"{type(self).__name__} takes no sharded parameters",
                    why="its update needs whole layers, and fully_shard leaves each rank a part of them",
                    hint="wrap the model in DistributedDataParallel",
                )
            state = self.state[parameter]
            for kind, value in initial.items():
                if kind not in state:
                    counter = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    state[kind] = counter if kind == STEP else torch.full_like(parameter, value)
        tensors = {kind: [self.state[p][kind] for p in params] for kind in initial}
        grads = [p.grad for p in params if p.grad is not None]
        decay = options["weight_decay"]
        return ParamGroup(params, grads, tensors, is_decayed=decay > 0, weight_decay=decay, lr_scale=1.0)

    def _initial_state(self, options: Mapping[str, Any]) -> dict[str, float]:
        """The kinds of state tensors, and what they are filled with at first."""
        raise NotImplementedError

    def _update(self, group: ParamGroup, lr: float | Tensor, ok: Tensor, options: Mapping[str, Any]) -> None:
        raise NotImplementedError


def _implementation(group: ParamGroup) -> Literal["fused", "foreach"]:
    return "fused" if group.params[0].is_cuda else "foreach"


class FusedLARS(_GroupOptimizer):
    """LARS (You, Gitman and Ginsburg, 2017): SGD with momentum and a trust ratio for every layer.

    r = trust_coefficient * |w| / (|g| + decay * |w| + eps), or 1 where either norm is 0;
    v = momentum * v + lr * r * (g + decay * w); w -= v. Groups with weight_decay 0 have r = 1: norms and biases.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, {**defaults, "trust_coefficient": trust_coefficient, "eps": eps})

    def _initial_state(self, options: Mapping[str, Any]) -> dict[str, float]:
        return {MOMENTUM: 0.0} if options["momentum"] else {}

    def _update(self, group: ParamGroup, lr: float | Tensor, ok: Tensor, options: Mapping[str, Any]) -> None:
        lars_update(
            group,
            lr,
            ok,
            momentum=options["momentum"],
            nesterov=options["nesterov"],
            trust_coefficient=options["trust_coefficient"],
            epsilon=options["eps"],
            implementation=_implementation(group),
        )


class FusedLAMB(_GroupOptimizer):
    """LAMB (You et al., 2020): Adam with a trust ratio for every layer, as NVIDIA and timm have it.

    u = Adam's direction + decay * w; r = |w| / |u|, or 1 where either norm is 0; w -= lr * r * u. Groups with
    weight_decay 0 have r = 1. Clip gradients before the step, as both do: `torch.nn.utils.clip_grad_norm_`.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _initial_state(self, options: Mapping[str, Any]) -> dict[str, float]:
        return {EXP_AVG: 0.0, EXP_AVG_SQ: 0.0, STEP: 0.0}

    def _update(self, group: ParamGroup, lr: float | Tensor, ok: Tensor, options: Mapping[str, Any]) -> None:
        lamb_update(group, lr, ok, betas=tuple(options["betas"]), epsilon=options["eps"])


class FusedRMSpropTF(_GroupOptimizer):
    """RMSprop as in TensorFlow: the mean square starts at 1, epsilon is inside the root, lr is applied before momentum.

    g += decay * w; s = alpha * s + (1 - alpha) * g * g; v = momentum * v + lr * g / sqrt(s + eps); w -= v.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        *,
        alpha: float = 0.9,
        eps: float = 1e-10,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "alpha": alpha, "eps": eps, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def _initial_state(self, options: Mapping[str, Any]) -> dict[str, float]:
        return {SQUARE: 1.0} | ({MOMENTUM: 0.0} if options["momentum"] else {})

    def _update(self, group: ParamGroup, lr: float | Tensor, ok: Tensor, options: Mapping[str, Any]) -> None:
        rule = RMSpropRule("tensorflow", options["alpha"], options["eps"], options["momentum"], _implementation(group))
        rule(group, lr, ok)


class EMA:
    """The exponential moving average of a model's weights and buffers; `ema.model` is evaluated with them.

    After each optimizer step: average = d * average + (1 - d) * weights, with d = decay, or with warmup the smaller one
    of that and (1 + step) / (10 + step). On a GPU all weights are one launch.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999, *, warmup: bool = True) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay is {decay}, which is not in [0, 1)")
        self._average = ModelEma(model, decay, warmup)
        self._step = 0

    @property
    def model(self) -> nn.Module:
        """A copy of the model with the averaged weights, in eval mode."""
        return self._average.model

    def update(self) -> None:
        """Move the average towards the model's weights: call it after each optimizer step."""
        ok = next(
            (torch.ones((), dtype=torch.bool, device=p.device) for p in self.model.parameters()), torch.tensor(True)
        )
        self._average.update(self._average.weight_at(self._step), ok)
        self._step += 1

    def state_dict(self) -> dict[str, Any]:
        """The averaged tensors, and the number of updates."""
        return {"step": self._step, "model": self._average.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._average.load_state_dict(state["model"])
        self._step = int(state["step"])
