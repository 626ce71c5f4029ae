"""Networks of other packages (`timm:NAME`, `torchvision:NAME`) and your own (`my_pkg.nets:make`).

Their batch norms and dropouts are replaced by ours, so that no layer uses torch's global generator. The packages are
imported only when such a name is requested.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from reconv import random as keys
from reconv.custom_code import accepts, check_arguments, code_errors, load_object
from reconv.errors import UsageError
from reconv.models.layers.batch_norm import BatchNorm2d
from reconv.models.layers.dropout import DropConnect, Dropout, KeyedRandomLayer

PACKAGES = ("timm", "torchvision")
_ORIGIN = "reconv_origin"
# Attributes in which packages keep the rate of a dropout that they call as a function: there is no layer to replace.
_RATE_ATTRIBUTE = re.compile(r"(attn_|attention_|proj_|pos_|path_|head_)?drop(out|_path|_connect)?(_rate|_prob)?")
_RANDOM_NAME = re.compile(r"drop|stochastic|noise|shake|random", re.IGNORECASE)
_RANDOM_LAYERS = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d)


@dataclass(frozen=True, slots=True)
class ExternalModel:
    """How a network of another package or of the user was built."""

    where: str  # its name in the recipe
    create: Callable[[], nn.Module]


def build_external(package: str, name: str, num_classes: int, options: Mapping[str, Any], seed: int) -> nn.Module:
    """Another package's network, initialized by that package from a seed, with our batch norms and dropouts."""
    module = _import(package)
    known = module.list_models() if package == "timm" else module.models.list_models()
    if name not in known:
        raise _unknown(package, name, known)
    create = module.create_model if package == "timm" else module.models.get_model
    return _create(ExternalModel(f"{package}:{name}", partial(create, name, num_classes=num_classes, **options)), seed)


def build_custom(path: str, num_classes: int, options: Mapping[str, Any], seed: int) -> nn.Module:
    """The network that an import path names: a module class, a function that builds one, or a module from Python.

    Classes and functions are called with `num_classes`, the options and, if they take it, `in_channels`. A module
    keeps its weights.
    """
    make = load_object(path)
    if isinstance(make, nn.Module):
        if set(options) - {"in_channels"}:
            raise UsageError(f"{path} is a finished module and takes no options", then="leave model.options out")
        return _create(ExternalModel(path, partial(copy.deepcopy, make)), seed)
    if not callable(make):
        raise UsageError(f"{path} is not a network", why=f"it is {make!r}", then="name a module class or a function")
    kept = {name: value for name, value in options.items() if name != "in_channels" or accepts(make, name)}
    arguments = {"num_classes": num_classes, **kept}
    check_arguments(make, arguments, path)
    model = _create(ExternalModel(path, partial(make, **arguments)), seed)
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, BatchNorm2d):
            raise UsageError(
                f"{path} has a {type(module).__name__} ({name})",
                why="its statistics would depend on how a batch is split; only BatchNorm2d is replaced by ours",
                then="use BatchNorm2d, GroupNorm or LayerNorm",
            )
    return model


def reinit_external(model: nn.Module, seed: int) -> bool:
    """Initialize a network of another package or of the user again, from a seed; False if the model is not one."""
    origin = getattr(model, _ORIGIN, None)
    if not isinstance(origin, ExternalModel):
        return False
    model.load_state_dict(_create(origin, seed).state_dict())
    return True


def _create(origin: ExternalModel, seed: int) -> nn.Module:
    """The network as its package builds it after torch.manual_seed, with our layers in place."""
    # On the CPU whatever the default device is: constructors read values back.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(keys.key(seed, f"init:{origin.where}") & 0x7FFFFFFFFFFFFFFF)
        try:
            with code_errors():
                model = origin.create()
        except (TypeError, ValueError) as error:
            options = getattr(origin.create, "keywords", {})
            raise UsageError(f"{origin.where} cannot be built with {dict(options)}", why=str(error)) from error
        if not isinstance(model, nn.Module):
            raise UsageError(f"{origin.where} returns a {type(model).__name__}, not a torch.nn.Module")
        _replace_layers(model)
    _check_random_layers(model, origin.where)
    object.__setattr__(model, _ORIGIN, origin)
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


class BatchNormAct2d(BatchNorm2d):
    """Our batch norm followed by a dropout and an activation, in place of timm's layer of that name."""

    def __init__(self, theirs: nn.BatchNorm2d, *after: nn.Module) -> None:
        super().__init__(theirs.num_features, theirs.eps, theirs.momentum or 0.0)
        self.after = nn.Sequential(*after)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.after(super().forward(x))
        return output


def _replace_layers(parent: nn.Module) -> None:
    """Replace batch norms and dropouts by ours, recursively."""
    for name, child in list(parent.named_children()):
        _replace_layers(child)
        if isinstance(child, nn.BatchNorm2d):
            setattr(parent, name, _our_batch_norm(child))
        elif (drop := _keyed_drop(child)) is not None:
            setattr(parent, name, drop)


def _keyed_drop(theirs: nn.Module) -> nn.Module | None:
    """Our equivalent of another package's dropout layer; None if it is not a known one."""
    kind = type(theirs).__name__
    if type(theirs) is nn.Dropout:
        rate, per = theirs.p, None
    elif kind == "StochasticDepth":  # torchvision's
        rate, per = float(vars(theirs)["p"]), "batch" if vars(theirs)["mode"] == "batch" else "sample"
    elif kind == "DropPath" and vars(theirs).get("scale_by_keep", True):  # timm's
        rate, per = float(vars(theirs)["drop_prob"] or 0.0), "sample"
    else:
        return None
    if not 0 <= rate < 1:
        raise UsageError(
            f"this network has a {kind} with drop rate {rate:g}", why="a drop rate is at least 0 and below 1"
        )
    ours = Dropout(rate) if per is None else DropConnect(rate, "batch" if per == "batch" else "sample")
    return ours.train(theirs.training)


def _check_random_layers(model: nn.Module, where: str) -> None:
    """Raise UsageError for a layer that would use torch's global generator in training: resume would not be exact."""
    for name, module in model.named_modules():
        if isinstance(module, KeyedRandomLayer):
            continue
        is_leaf = next(module.children(), None) is None
        is_named = is_leaf and _RANDOM_NAME.search(type(module).__name__) is not None
        draws = isinstance(module, _RANDOM_LAYERS) or is_named
        rates = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, float) and (_RATE_ATTRIBUTE.fullmatch(key) or (draws and key in ("p", "prob")))
        }
        if any(rate > 0 for rate in rates.values()) or (draws and not rates):
            kind = type(module).__name__
            raise UsageError(
                f"{where} has a random layer of the class {kind}" + (f" ({name})" if name else ""),
                why="it uses torch's global generator, so a resumed run would differ"
                + "".join(f"; its {key} is {rate:g}" for key, rate in rates.items() if rate > 0),
                then="switch it off in model.options, as in --set model.options.dropout=0, or choose another network",
            )


def _our_batch_norm(theirs: nn.BatchNorm2d) -> nn.Module:
    """Our batch norm with the values of theirs."""
    if not (theirs.affine and theirs.track_running_stats):
        raise UsageError("this network has a batch norm without weights or running statistics, which is not supported")
    kind = type(theirs).__name__
    if kind == "BatchNorm2d":
        ours = BatchNorm2d(theirs.num_features, theirs.eps, theirs.momentum or 0.0)
    elif kind == "BatchNormAct2d":  # timm's
        ours = BatchNormAct2d(theirs, theirs.get_submodule("drop"), theirs.get_submodule("act"))
    else:
        raise UsageError(f"this network has batch norms of the class {kind}, which is not supported")
    own = {key: value for key, value in theirs.state_dict().items() if key in ours.state_dict()}
    ours.load_state_dict(own)
    return ours.train(theirs.training)
