"""Networks of other packages by name: `timm:NAME` and `torchvision:NAME`, where the package is installed.

Owns the call and the exchange of layers that the engine must drive. Refuses to know weights: they are loaded like any
others. Invariant: nothing of this is imported until such a name is asked for.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from reconv import keys
from reconv.errors import UsageError
from reconv.models.layers import BatchNorm2d
from reconv.models.noise import Dropout

PACKAGES = ("timm", "torchvision")


def build_foreign(package: str, name: str, num_classes: int, options: Mapping[str, Any]) -> nn.Module:
    """Another package's network, with its plain batch norms and dropouts replaced by ours."""
    module = _import(package)
    known = module.list_models() if package == "timm" else module.models.list_models()
    if name not in known:
        raise _unknown(package, name, known)
    create = module.create_model if package == "timm" else module.models.get_model
    torch.manual_seed(keys.key(0, f"init:{package}:{name}") & 0x7FFFFFFFFFFFFFFF)
    try:
        model: nn.Module = create(name, num_classes=num_classes, **options)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{package}:{name} cannot be built with {dict(options)}", why=str(error)) from error
    _exchange_layers(model)
    return model


def _import(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{package} is not installed",
            why=str(error),
            then=f"pip install {package}, in a version made for torch {torch.__version__}",
        ) from error
    except (ImportError, OSError, RuntimeError) as error:  # a build for another torch fails while it loads
        raise UsageError(
            f"{package} is installed but cannot be imported",
            why=str(error).splitlines()[0],
            then=f"install the version made for torch {torch.__version__}",
        ) from error


def _unknown(package: str, name: str, known: Sequence[str]) -> UsageError:
    close = difflib.get_close_matches(name, known, n=1)
    return UsageError(
        f"{package} has no model called {name!r}", why=f"did you mean {package}:{close[0]}?" if close else ""
    )


class BatchNormThen(BatchNorm2d):
    """Our batch norm with what another package does to its output: a drop, an activation."""

    def __init__(self, theirs: nn.BatchNorm2d, *after: nn.Module) -> None:
        super().__init__(theirs.num_features, theirs.eps, theirs.momentum or 0.0)
        self.after = nn.Sequential(*after)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.after(super().forward(x))
        return output


def _exchange_layers(model: nn.Module) -> None:
    """Put our batch norm and dropout where torch's stand, so that groups, gates and keys hold there too."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, _our_norm(child))
            elif type(child) is nn.Dropout:
                setattr(parent, name, Dropout(child.p))


def _our_norm(theirs: nn.BatchNorm2d) -> nn.Module:
    """Our batch norm with the values of another."""
    if not (theirs.affine and theirs.track_running_stats):
        raise UsageError("this network has a batch norm without weights or running statistics, which is not supported")
    kind = type(theirs).__name__
    if kind == "BatchNorm2d":
        ours = BatchNorm2d(theirs.num_features, theirs.eps, theirs.momentum or 0.0)
    elif kind == "BatchNormAct2d":  # timm's
        ours = BatchNormThen(theirs, theirs.get_submodule("drop"), theirs.get_submodule("act"))
    else:
        raise UsageError(f"this network has batch norms of the class {kind}, which is not supported")
    own = {key: value for key, value in theirs.state_dict().items() if key in ours.state_dict()}
    ours.load_state_dict(own)
    return ours.train(theirs.training)
