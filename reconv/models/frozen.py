"""Training a part of a model: all other parameters are frozen, with the batch norm statistics of frozen norms.

A norm without trained parameters behaves in training as in evaluation, whatever the model's mode.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from reconv.core.errors import UsageError
from reconv.models.architecture import ReconvModel
from reconv.models.layers.batch_norm import BatchNorm2d

NUM_LISTED = 4


@dataclass(frozen=True, slots=True)
class TrainedParameters:
    """The names of the trained parameters, and the number of trained and frozen values."""

    names: tuple[str, ...]
    num_trained: int
    num_frozen: int

    def __str__(self) -> str:
        listed = ", ".join(self.names[:NUM_LISTED])
        more = f" and {len(self.names) - NUM_LISTED} more" if len(self.names) > NUM_LISTED else ""
        return (
            f"{self.num_trained:,} parameters are trained ({listed}{more}); "
            f"{self.num_frozen:,} are frozen, with their batch norm statistics"
        )


def head_patterns(model: nn.Module) -> tuple[str, ...]:
    """Patterns of the head's parameters: those the model declares, else those of its last layer."""
    if isinstance(model, ReconvModel) and model.head_patterns:
        return model.head_patterns
    layers = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
    return (f"{layers[-1]}.*",) if layers else ()


def head_parameters(model: nn.Module) -> list[str]:
    """The names of the head's parameters."""
    patterns = head_patterns(model)
    return [name for name, _ in model.named_parameters() if any(fnmatchcase(name, pattern) for pattern in patterns)]


class FrozenBackbone:
    """The backbone of a model, frozen for a while: `unfreeze` trains what was trained before."""

    def __init__(self, model: nn.Module) -> None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        norms = [module for module in model.modules() if isinstance(module, BatchNorm2d) and not module.frozen]
        self.trained = freeze_except(model, head_patterns(model))
        self._parameters = [parameter for parameter in parameters if not parameter.requires_grad]
        self._norms = [norm for norm in norms if norm.frozen]

    def unfreeze(self) -> None:
        """Train the backbone again, and update its batch norm statistics."""
        for parameter in self._parameters:
            parameter.requires_grad_(True)
        for norm in self._norms:
            norm.frozen = False


def freeze_except(model: nn.Module, patterns: Sequence[str]) -> TrainedParameters:
    """Freeze every parameter that no pattern (such as `layer4.*`) matches, and the norms without trained parameters."""
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            close = difflib.get_close_matches(pattern, parameters, n=1, cutoff=0.0)
            raise UsageError(
                f"no parameter of the model matches {pattern}",
                where="model.trainable",
                why=f"the closest name is {', '.join(close)}",
                hint=f"use a pattern with a star, as in {head_patterns(model)[0]}",
            )
    chosen = {name for name in parameters if any(fnmatchcase(name, pattern) for pattern in patterns)}
    for name, parameter in parameters.items():
        parameter.requires_grad_(
            parameter.requires_grad and name in chosen
        )  # some models have frozen layers of their own
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    for module in model.modules():
        if isinstance(module, BatchNorm2d):
            module.frozen = not any(p.requires_grad for p in module.parameters(recurse=False))
    num_trained = sum(parameters[name].numel() for name in trained)
    return TrainedParameters(tuple(trained), num_trained, sum(p.numel() for p in parameters.values()) - num_trained)
