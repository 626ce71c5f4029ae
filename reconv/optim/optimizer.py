"""The base of our optimizers: parameters in decay groups, state tensors beside them, and updates gated on the device.

Unlike torch.optim, `step` takes the learning rate and a boolean tensor `ok`: a step that is not ok changes nothing, and
the host never has to read `ok`. Many tensors are updated in few kernel launches, by foreach operations or torch's fused
kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from reconv.core.errors import CheckpointError
from reconv.optim.param_groups import DecayGroups, RateScale

if TYPE_CHECKING:
    from reconv.optim.vendor_sgd import SGDClass
    from reconv.recipe.parts.optimizer import OptimizerConfig

STEP = "step"
_UNSCALED = RateScale()
_OFFLOAD_CHUNK_BYTES = 64 << 20  # of one kind of state, on the device at a time


class Optimizer(Protocol):
    """The interface of an optimizer."""

    def step(self, lr: float | Tensor, ok: Tensor) -> None: ...
    def zero_grad(self) -> None: ...
    def grads(self) -> list[Tensor]: ...
    def params_with_grad(self) -> Mapping[str, Tensor]: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """Parameters that have a gradient and are updated alike; all lists are in the same order."""

    params: list[Tensor]
    grads: list[Tensor]
    state_tensors: dict[str, list[Tensor]]  # by kind: momentum, mean square
    is_decayed: bool
    weight_decay: float  # 0 if not decayed
    lr_scale: float

    def scale_lr(self, lr: float | Tensor) -> float | Tensor:
        """The learning rate of this group."""
        return lr if self.lr_scale == 1 else lr * self.lr_scale


@dataclass(frozen=True, slots=True)
class OptimizerSetup:
    """The settings of a recipe, and the parameters that are optimized."""

    section: OptimizerConfig
    groups: DecayGroups
    rate_scales: Mapping[str, RateScale]
    alpha: float | None  # RMSprop's, from the plan
    sgd: str | SGDClass  # the device's fastest implementation: "fused", "foreach", or a vendor's class

    @property
    def is_on_cuda(self) -> bool:
        return all(p.is_cuda for p in (*self.groups.decay.values(), *self.groups.no_decay.values()))


class BaseOptimizer:
    """Base class: parameters by name, and for each of them one state tensor per kind (momentum, mean square).

    A state tensor keeps its parameter's shape, dtype and strides: the fused CPU kernels walk memory and silently
    compute garbage when strides differ. An optimizer that counts steps has a counter for each parameter, as in torch:
    a parameter that gets its first gradient late starts at 1.
    """

    def __init__(
        self,
        groups: DecayGroups,
        initial: Mapping[str, float],
        *,
        weight_decay: float,
        rate_scales: Mapping[str, RateScale] | None = None,
        counts_steps: bool = False,
    ) -> None:
        """`initial` has the initial value of each kind of state; `rate_scales` are of parameters with other rates."""
        self._weight_decay = weight_decay
        self._rate_scales = rate_scales or {}
        self._groups = [(groups.decay, True), (groups.no_decay, False)]
        self._state_tensors = {
            kind: {
                name: torch.full_like(parameter, value, requires_grad=False)
                for parameters, _ in self._groups
                for name, parameter in parameters.items()
            }
            for kind, value in initial.items()
        }
        if counts_steps:
            self._state_tensors[STEP] = {
                name: torch.zeros((), dtype=torch.float32, device=p.device) for name, p in groups.all().items()
            }
        self._offloaded_from: torch.device | None = None  # None: state is on the device of the parameters

    @classmethod
    def from_recipe(cls, setup: OptimizerSetup) -> BaseOptimizer:
        """The optimizer with a recipe's settings."""
        raise NotImplementedError

    def step(self, lr: float | Tensor, ok: Tensor) -> None:
        """Update every parameter that has a gradient, or none if not ok."""
        raise NotImplementedError

    def offload(self) -> None:
        """Keep the state in host memory; it is copied to the device and back for each update, chunk by chunk."""
        tensors = [tensor for by_name in self._state_tensors.values() for tensor in by_name.values()]
        self._offloaded_from = tensors[0].device if tensors else None
        for by_name in self._state_tensors.values():
            for name, tensor in by_name.items():
                host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
                by_name[name] = host.copy_(tensor)

    def grads(self) -> list[Tensor]:
        """The gradients that exist."""
        return [p.grad for parameters, _ in self._groups for p in parameters.values() if p.grad is not None]

    def params_with_grad(self) -> dict[str, Tensor]:
        """The parameters that have a gradient, by name, in the order of `grads`."""
        return {name: p for parameters, _ in self._groups for name, p in parameters.items() if p.grad is not None}

    def zero_grad(self) -> None:
        for parameters, _ in self._groups:
            for parameter in parameters.values():
                parameter.grad = None

    def param_groups(self) -> Iterator[ParamGroup]:
        """The parameters that have gradients, by weight decay and learning rate."""
        for parameters, is_decayed in self._groups:
            by_scale: dict[RateScale, list[str]] = {}
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    by_scale.setdefault(self._rate_scales.get(name, _UNSCALED), []).append(name)
            for scale, all_names in by_scale.items():
                weight_decay = self._weight_decay / scale.decay_divisor if is_decayed else 0.0
                for names in [all_names] if self._offloaded_from is None else _chunks(all_names, parameters):
                    params = [parameters[name] for name in names]
                    grads = [p.grad for p in params if p.grad is not None]
                    stored = {kind: [tensors[name] for name in names] for kind, tensors in self._state_tensors.items()}
                    on_device = {kind: [self._to_device(t) for t in tensors] for kind, tensors in stored.items()}
                    yield ParamGroup(list(params), grads, on_device, is_decayed, weight_decay, scale.lr)
                    if self._offloaded_from is not None:
                        for kind, tensors in stored.items():
                            for host, updated in zip(tensors, on_device[kind], strict=True):
                                host.copy_(updated, non_blocking=True)

    def _to_device(self, tensor: Tensor) -> Tensor:
        """A state tensor on the device of the parameters, with the same strides."""
        if self._offloaded_from is None:
            return tensor
        return torch.empty_like(tensor, device=self._offloaded_from, pin_memory=False).copy_(tensor, non_blocking=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Every state tensor as KIND.PARAMETER."""
        return {f"{kind}.{name}": t for kind, tensors in self._state_tensors.items() for name, t in tensors.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy saved state into place, keeping our strides."""
        expected = self.state_dict()
        if set(state) != set(expected):
            missing, unexpected = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
            raise CheckpointError(
                "the optimizer state in the checkpoint does not match the model",
                why=f"missing: {missing[:3]}, unexpected: {unexpected[:3]}",
            )
        for name, tensor in expected.items():
            if tensor.shape != state[name].shape:
                raise CheckpointError(
                    f"the saved optimizer state {name} has shape {tuple(state[name].shape)}, not {tuple(tensor.shape)}"
                )
            tensor.copy_(state[name])


def _chunks(names: Sequence[str], parameters: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """The names in chunks that fit into the offload buffer, at least one each."""
    chunk: list[str] = []
    for name in names:
        if chunk and sum(parameters[n].nbytes for n in (*chunk, name)) > _OFFLOAD_CHUNK_BYTES:
            yield chunk
            chunk = []
        chunk.append(name)
    if chunk:
        yield chunk


def scaled(tensors: Sequence[Tensor], factor: float | Tensor) -> list[Tensor]:
    """Every tensor times a number or a scalar tensor."""
    factor = factor.to(tensors[0].dtype) if isinstance(factor, Tensor) else factor
    return list(torch._foreach_mul(list(tensors), factor))


def copy_if_ok(new: Sequence[Tensor], old: Sequence[Tensor], ok: Tensor) -> None:
    """Copy new values over old ones in place, or keep the old ones if not ok, without a device-to-host read."""
    if old and old[0].is_cuda and all(n.stride() == o.stride() for n, o in zip(new, old, strict=True)):
        # One where() for all: hundreds of small ones took a twentieth of an EfficientNet's step on an H200.
        chosen = torch.where(ok, _concatenated(new), _concatenated(old)).split([o.numel() for o in old])
        torch._foreach_copy_([_storage_order(o) for o in old], list(chosen))
        return
    torch._foreach_copy_(list(old), [torch.where(ok, n, o) for n, o in zip(new, old, strict=True)])


def _concatenated(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([_storage_order(t) for t in tensors])


def _storage_order(tensor: Tensor) -> Tensor:
    """A flat view of a dense tensor in memory order, whatever its layout."""
    return tensor.as_strided((tensor.numel(),), (1,))


def fused_sgd(
    params: list[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: list[Tensor],
    lr: float | Tensor,
    weight_decay: float,
    ok: Tensor,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> None:
    """Weight decay, momentum and step, in place; changes nothing if not ok."""
    torch._fused_sgd_(
        params,
        [match_strides(g, p) for g, p in zip(grads, params, strict=True)],
        momentum_buffers,
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr.float() if isinstance(lr, Tensor) else lr,
        dampening=0.0,
        nesterov=nesterov,
        maximize=maximize,
        is_first_step=False,
        grad_scale=None,
        found_inf=_found_inf(ok),  # the kernel's gate for loss scaling serves as ours
    )


def fused_lerp(values: list[Tensor], targets: Sequence[Tensor], weight: float | Tensor, ok: Tensor) -> None:
    """values += weight * (targets - values), in place: gradient ascent with a weight decay of 1."""
    fused_sgd(values, targets, [], weight, 1.0, ok, maximize=True)


def fused_adamw(
    params: list[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    lr: float | Tensor,
    weight_decay: float,
    ok: Tensor,
    *,
    betas: tuple[float, float],
    epsilon: float,
) -> None:
    """AdamW, in place; changes nothing if not ok. `steps` has a float32 counter for each parameter."""
    found_inf = _found_inf(ok)
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        params,
        [match_strides(g, p) for g, p in zip(grads, params, strict=True)],
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        lr=_kernel_lr(lr, params[0]),
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=epsilon,
        amsgrad=False,
        maximize=False,
        grad_scale=None,
        found_inf=found_inf,
    )
    torch._foreach_sub_(steps, [found_inf] * len(steps))


def _found_inf(ok: Tensor) -> Tensor:
    """1.0 if not ok, else 0.0: negated and cast in one kernel launch."""
    return torch.logical_not(ok, out=torch.empty_like(ok, dtype=torch.float32))


def _kernel_lr(lr: float | Tensor, like: Tensor) -> float | Tensor:
    """The learning rate for a kernel: on CUDA in float32, so that an eager step equals a captured one."""
    if not like.is_cuda:
        return lr
    return lr.float() if isinstance(lr, Tensor) else float(np.float32(lr))


def match_strides(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor with the strides of another, copied only if they differ in a dimension larger than 1."""
    dims = zip(like.shape, tensor.stride(), like.stride(), strict=True)
    if all(size == 1 or own == other for size, own, other in dims):
        return tensor
    return torch.empty_like(like).copy_(tensor)
