"""Custom losses: a function or a module of logits and targets, whose reduction is none, a mean or a sum.

Training needs sums over samples, so that micro-batches and ranks give the same gradients. A reduction that can be
switched off is; one that cannot is recognized by calling the loss with an example batch and with its rows.

A loss that gives no value per sample is recognized before the run starts, and refused where ranks or micro-batches
would change the result (tests/laws/test_law_own_code.py).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from reconv.core import random as keys
from reconv.core.custom_code import build_object, code_errors
from reconv.core.errors import UsageError

LossFunction = Callable[[Tensor, Tensor], Any]
Example = tuple[Tensor, Tensor]  # logits and targets of a few samples
Reduction = Literal["none", "mean", "sum"]

_REDUCED: Mapping[str, Reduction] = {"mean": "mean", "sum": "sum", "batchmean": "sum"}  # what is done inside a sample
_TOLERANCE = 1e-4  # relative, of a loss in float32


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """The sum of a custom loss over the samples of a batch."""

    name: str
    function: LossFunction
    per_sample: Reduction = "none"  # what turns the elements of a sample into its loss
    returns: Reduction = "none"  # what the function returns for a batch: a loss per sample, or one number
    note: str = ""  # for the log: how a reduction was changed

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of logits [n, classes] and targets: class indices [n], or probabilities [n, classes]."""
        with code_errors(self.name):
            losses = self.function(logits, targets)
        if self.returns != "none" and isinstance(losses, Tensor) and losses.ndim == 0:
            return losses * len(logits) if self.returns == "mean" else losses
        if self.per_sample != "none" and isinstance(losses, Tensor) and losses.ndim > 1:
            elements = losses.flatten(1)
            losses = elements.mean(dim=1) if self.per_sample == "mean" else elements.sum(dim=1)
        if not isinstance(losses, Tensor) or losses.shape != (len(logits),):
            found = f"a tensor {list(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
            raise UsageError(
                f"{self.name} returns {found} for {len(logits)} samples",
                where="loss.name",
                why="the loss of every sample is needed: sums over micro-batches and processes are made from them",
                hint="return one loss per sample [n], as with reduction='none'",
            )
        return losses.sum()

    @property
    def module(self) -> nn.Module | None:
        """The loss as a module, if it has parameters or buffers, which belong into checkpoints."""
        function = self.function
        return function if isinstance(function, nn.Module) and function.state_dict() else None


def build_custom_loss(
    name: str,
    options: Mapping[str, Any],
    device: torch.device,
    example: Example | None = None,
    seed: int = 0,
) -> CustomLoss:
    """The loss that an import path names: a function, or a class that is called with the options.

    An object from Python is copied, and parameters are initialized from the seed. Without an example a loss that
    returns one number for a batch is refused when it is called.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keys.key(seed, f"init:{name}") & 0x7FFFFFFFFFFFFFFF)
        function = build_object(name, options, "a loss")
    if not callable(function):
        raise UsageError(f"{name} is not a loss", where="loss.name", why=f"it is {function!r}")
    _check_options(function, options, name)
    if isinstance(function, nn.Module):
        function = copy.deepcopy(function).to(device)
    if example is None:
        unreduced, reduction = _without_reduction(function)
        return CustomLoss(name, unreduced, _REDUCED.get(reduction, "none"), note=_switched(name, reduction))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return _recognize(name, function, (example[0].to(device), example[1].to(device)))


def example_batch(num_classes: int, targets: Literal["index", "probabilities", "labels"]) -> Example:
    """Logits and targets of six samples as a loss gets them, the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, num_classes, generator=generator)
    if targets == "index":
        return logits, torch.arange(6) % num_classes
    values = torch.rand(6, num_classes, generator=generator)
    return logits, values.round() if targets == "labels" else values / values.sum(dim=1, keepdim=True)


def _recognize(name: str, function: LossFunction, example: Example) -> CustomLoss:
    """The loss with its reduction switched off, or recognized as a mean or a sum over samples."""
    as_given, (unreduced, reduction) = function, _without_reduction(function)
    if reduction:
        loss = CustomLoss(name, unreduced, _REDUCED[reduction])
        with code_errors(name):
            before, losses = as_given(*example), unreduced(*example)
        if losses.ndim > 0:
            total = loss(*example)
            expected = total if reduction == "sum" else total / len(example[0])
            is_same = torch.allclose(before.to(total.dtype), expected, rtol=_TOLERANCE)
            return CustomLoss(name, unreduced, _REDUCED[reduction], note=_switched(name, reduction, is_same))
        function = unreduced  # what it returns is still one number: it reduces its elements itself
    with code_errors(name):
        value = function(*example)
    if not isinstance(value, Tensor) or value.ndim > 0:
        CustomLoss(name, function)(*example)  # raises if that is not one loss per sample
        return CustomLoss(name, function)
    returns = _reduction_of(name, function, value, example)
    note = f"{name} returns the {returns} over a batch: gradients are those of the mean over the global batch"
    return CustomLoss(name, function, returns=returns, note=note)


def _reduction_of(name: str, function: LossFunction, value: Tensor, example: Example) -> Reduction:
    """True if one number for a batch is the mean or the sum of those for its rows."""
    with code_errors(f"{name}, called with one sample,"):
        rows = torch.stack([function(*(part[i : i + 1] for part in example)) for i in range(len(example[0]))])
    for returns, expected in (("mean", rows.mean()), ("sum", rows.sum())):
        if torch.allclose(value, expected, rtol=_TOLERANCE):
            return "mean" if returns == "mean" else "sum"
    raise UsageError(
        f"{name} returns one number for a batch that is neither the mean nor the sum over its samples",
        where="loss.name",
        why="micro-batches and processes would change what is trained",
        hint="return one loss per sample [n], as with reduction='none'",
    )


def _without_reduction(function: LossFunction) -> tuple[LossFunction, str]:
    """The loss without its reduction, and that reduction; empty if there is none to switch off.

    Losses of torch have an attribute or, functions, an argument `reduction`; so have most losses of others.
    """
    unreduced: Any = copy.deepcopy(function) if isinstance(function, nn.Module) else copy.copy(function)
    parts = list(unreduced.modules()) if isinstance(unreduced, nn.Module) else [unreduced]
    reducing = [part for part in parts if getattr(part, "reduction", None) in _REDUCED]
    if reducing:
        reduction = str(reducing[0].reduction)
        for part in reducing:
            part.reduction = "none"
        return unreduced, reduction
    try:
        parameter = inspect.signature(function).parameters.get("reduction")
    except (TypeError, ValueError):  # builtins have none
        return function, ""
    if parameter is None or parameter.default not in _REDUCED:
        return function, ""
    unreduced = partial(cast(Callable[..., Any], function), reduction="none")
    return unreduced, str(parameter.default)


def _switched(name: str, reduction: str, is_same: bool = True) -> str:
    """The note for the log about a reduction that was switched off; empty if there was none."""
    if not reduction:
        return ""
    note = f"{name}: reduction={reduction!r} is now 'none': losses are summed and divided by the global batch size"
    return note if is_same else f"{note}, not by the weights of the samples that {name} divides by"


def _check_options(function: object, options: Mapping[str, Any], name: str) -> None:
    """Raise if a function that is bound to its options does not take them beside logits and targets."""
    if not (options and isinstance(function, partial)):
        return
    try:
        signature = inspect.signature(function.func)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, None, **options)
    except TypeError as error:
        raise UsageError(
            f"{name} cannot be called with logits, targets and {', '.join(options)}",
            where="loss.options",
            why=f"{error}; its arguments are {signature}",
            hint="correct the options of the loss in the recipe",
        ) from error
