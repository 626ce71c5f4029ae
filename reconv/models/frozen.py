"""Networks of which only a part is trained: the rest keeps its weights and its batch norm statistics.

Owns which parameters a pattern or the head means, and the fixing of all others. Refuses to know why. Invariant: a
norm none of whose parameters is trained behaves in training as at evaluation, whoever switches the network's mode.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from reconv.errors import UsageError
from reconv.models.architecture import ReconvModel
from reconv.models.layers.batch_norm import BatchNorm2d

NUM_LISTED = 4


@dataclass(frozen=True, slots=True)
class Trained:
    """The names of the trained parameters, and how many numbers are trained and fixed."""

    names: tuple[str, ...]
    num_trained: int
    num_fixed: int

    def __str__(self) -> str:
        listed = ", ".join(self.names[:NUM_LISTED])
        more = f" and {len(self.names) - NUM_LISTED} more" if len(self.names) > NUM_LISTED else ""
        return (
            f"{self.num_trained:,} parameters are trained ({listed}{more}); "
            f"{self.num_fixed:,} are frozen, with their batch norm statistics"
        )


def head_patterns(model: nn.Module) -> tuple[str, ...]:
    """Patterns of the parameters of the head: those the network names, else the last layer that has any."""
    if isinstance(model, ReconvModel) and model.head_patterns:
        return model.head_patterns
    layers = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
    return (f"{layers[-1]}.*",) if layers else ()


def train_only(model: nn.Module, patterns: Sequence[str]) -> Trained:
    """Fix every parameter whose name no pattern (as in `layer4.*`) matches, and the norms that are then fixed whole."""
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            close = difflib.get_close_matches(pattern, parameters, n=1, cutoff=0.0)
            raise UsageError(
                f"no parameter of the network is called {pattern}",
                where="model.trainable",
                why=f"names there are such as {', '.join(close)}",
                then=f"a pattern with a star, as in {head_patterns(model)[0]}",
            )
    chosen = {name for name in parameters if any(fnmatchcase(name, pattern) for pattern in patterns)}
    for name, parameter in parameters.items():
        parameter.requires_grad_(parameter.requires_grad and name in chosen)  # some networks have fixed layers anyway
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    for module in model.modules():
        if isinstance(module, BatchNorm2d):
            module.fixed = not any(p.requires_grad for p in module.parameters(recurse=False))
    num_trained = sum(parameters[name].numel() for name in trained)
    return Trained(tuple(trained), num_trained, sum(p.numel() for p in parameters.values()) - num_trained)
