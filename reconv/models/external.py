"""Models of other packages (`timm:NAME`, `torchvision:NAME`) and your own (`my_pkg.nets:make`).

Their batch norms and dropouts are replaced by ours (`replace_layers`). The packages are imported only when such a name
is requested, and never asked for pretrained weights: nothing is downloaded here.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import parameter as parameters

from reconv.core import random as keys
from reconv.core.custom_code import accepts, check_arguments, code_errors, load_object
from reconv.core.errors import UsageError
from reconv.models.replace_layers import replace_layers

PACKAGES = ("timm", "torchvision")
_ORIGIN = "reconv_origin"
_HALF = "[0.5,0.5,0.5]"
_COLOR = f"--set data.preprocess.channels=3 --set data.preprocess.mean={_HALF} --set data.preprocess.std={_HALF}"
# Options with which a package would download weights, or read them from a file.
_WEIGHTS_OPTIONS = ("weights", "weights_backbone", "pretrained", "pretrained_backbone", "checkpoint_path")


@dataclass(frozen=True, slots=True)
class ExternalModel:
    """Origin of a model of another package or of the user."""

    where: str  # its name in the recipe
    create: Callable[[], nn.Module]
    num_classes: int | None = None  # of a package's classifier; None: a model of the user
    image_shape: tuple[int, int, int] | None = None  # gives the lazy modules of a user's model their sizes


def build_external(package: str, name: str, num_classes: int, options: Mapping[str, Any], seed: int) -> nn.Module:
    """Another package's classifier, initialized by that package from a seed, with our batch norms and dropouts."""
    module = import_package(package)
    _check_name(module, package, name)
    _check_options(package, name, options)
    arguments = {"num_classes": num_classes, **options}
    if package == "timm":
        create = module.create_model
        if "in_channels" in arguments:
            arguments["in_chans"] = arguments.pop("in_channels")
    else:
        create = module.models.get_model
        arguments["weights"] = None
    return _create(ExternalModel(f"{package}:{name}", partial(create, name, **arguments), num_classes), seed)


def build_custom(
    path: str,
    num_classes: int,
    options: Mapping[str, Any],
    seed: int,
    image_shape: tuple[int, int, int] | None = None,
) -> nn.Module:
    """The model that an import path names: a module class, a function that builds one, or a module from Python.

    Classes and functions are called with `num_classes`, the options and, if they take it, `in_channels`. A module
    keeps its weights. Lazy modules (`nn.LazyConv2d`) are initialized by a batch of black images of `image_shape`.
    """
    make = load_object(path)
    if isinstance(make, nn.Module):
        if set(options) - {"in_channels"}:
            raise UsageError(f"{path} is a finished module and takes no options", hint="leave model.options out")
        return _create(ExternalModel(path, partial(_copy_module, make), image_shape=image_shape), seed)
    if not callable(make):
        raise UsageError(f"{path} is not a model", why=f"it is {make!r}", hint="name a module class or a function")
    kept = {name: value for name, value in options.items() if name != "in_channels" or accepts(make, name)}
    arguments = {"num_classes": num_classes, **kept}
    check_arguments(make, arguments, path)
    return _create(ExternalModel(path, partial(make, **arguments), image_shape=image_shape), seed)


def reinit_external(model: nn.Module, seed: int) -> bool:
    """Initialize a model of another package or of the user again, from a seed; False if the model is not one."""
    origin = getattr(model, _ORIGIN, None)
    if not isinstance(origin, ExternalModel):
        return False
    model.load_state_dict(_create(origin, seed).state_dict())
    return True


def check_image_sizes(model: nn.Module, channels: int, sizes: Collection[int]) -> None:
    """Raise UsageError if a model of another package does not take images of one of these sizes.

    Tried on the meta device, so nothing is computed. Models of ours and models that cannot run there are not checked.
    """
    origin = getattr(model, _ORIGIN, None)
    if not isinstance(origin, ExternalModel) or origin.num_classes is None:
        return
    was_training = model.training
    for size in sorted(set(sizes)):
        try:
            with torch.no_grad():
                output = model.eval()(torch.empty(2, channels, size, size, device="meta"))
        except NotImplementedError:  # an operation that the meta device does not have
            continue
        except Exception as error:
            if "meta" in str(error):
                continue
            raise _wrong_size(origin, model, size, str(error)) from error
        if not isinstance(output, Tensor) or output.shape != (2, origin.num_classes):
            found = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise UsageError(
                f"{origin.where} is not a classifier", why=f"it returns {found} instead of logits [n, classes]"
            )
    model.train(was_training)


def _wrong_size(origin: ExternalModel, model: nn.Module, size: int, why: str) -> UsageError:
    native = native_size(model)
    sized = f"--set data.preprocess.size={native}" if native else "set another size with --set data.preprocess.size=N"
    by_option = (
        f", or --set model.options.img_size={size} if it has that option" if origin.where.startswith("timm:") else ""
    )
    return UsageError(
        f"{origin.where} does not take images of {size} x {size} pixels",
        where="data.preprocess.size",
        why=why.splitlines()[0] if why else "",
        hint=f"{sized}{by_option}",
    )


def native_size(model: nn.Module) -> int | None:
    """The image size that a model was designed for, where its package says so."""
    config = getattr(model, "default_cfg", None)  # timm's
    size = config.get("input_size") if isinstance(config, Mapping) else None
    native = size[-1] if isinstance(size, Sequence) and size else getattr(model, "image_size", None)
    return native if isinstance(native, int) else None


def _create(origin: ExternalModel, seed: int) -> nn.Module:
    """The model as its package builds it after torch.manual_seed, with our layers in place."""
    if origin.num_classes is not None and torch.get_default_device().type == "meta":
        try:
            return _create_on(torch.device("meta"), origin, seed)
        except (NotImplementedError, RuntimeError):  # its constructor reads values back
            return _create_on(torch.device("cpu"), origin, seed).to("meta")
    return _create_on(torch.device("cpu"), origin, seed)  # whatever the default device is: constructors read values


def _create_on(device: torch.device, origin: ExternalModel, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]), device, warnings.catch_warnings():
        if origin.num_classes is not None:
            warnings.simplefilter("ignore")  # of packages to their own developers
        torch.manual_seed(keys.key(seed, f"init:{origin.where}") & 0x7FFFFFFFFFFFFFFF)
        try:
            with code_errors():
                model = origin.create()
        except (TypeError, ValueError) as error:
            options = getattr(origin.create, "keywords", {})
            raise UsageError(
                f"{origin.where} cannot be built with {dict(options)}",
                why=str(error),
                hint=_COLOR if "in_chan" in str(error) else "",
            ) from error
        if not isinstance(model, nn.Module):
            raise UsageError(f"{origin.where} returns a {type(model).__name__}, not a torch.nn.Module")
        if is_lazy(model):
            _initialize_lazy_modules(model, origin)
        replace_layers(model, origin.where)
    object.__setattr__(model, _ORIGIN, origin)
    return model


def _copy_module(module: nn.Module) -> nn.Module:
    """A copy of a module, whose lazy modules may not be initialized yet; torch cannot copy their buffers."""
    memo: dict[int, Any] = {
        id(buffer): parameters.UninitializedBuffer(device=buffer.data.device, dtype=buffer.data.dtype)  # type: ignore[call-arg]
        for buffer in module.buffers()
        if parameters.is_lazy(buffer)
    }
    return copy.deepcopy(module, memo)


def is_lazy(model: nn.Module) -> bool:
    """True if a model has parameters or buffers whose shapes are not known yet."""
    return any(parameters.is_lazy(value) for value in (*model.parameters(), *model.buffers()))


def _initialize_lazy_modules(model: nn.Module, origin: ExternalModel) -> None:
    """Give lazy modules their sizes by a forward pass; those of batch norms are not changed by it."""
    if origin.image_shape is None:
        raise UsageError(
            f"{origin.where} has lazy modules, and the size of the images is not known here",
            hint="use modules with sizes, such as nn.Conv2d instead of nn.LazyConv2d",
        )
    was_training = model.training
    with torch.no_grad(), code_errors(f"the forward pass of {origin.where}, which initializes its lazy modules,"):
        model.eval()(torch.zeros(2, *origin.image_shape))
    model.train(was_training)
    left = [
        name
        for name, module in model.named_modules()
        if any(parameters.is_lazy(value) for value in module.parameters(recurse=False))
    ]
    if left:
        raise UsageError(
            f"{origin.where} has lazy modules that its forward pass does not use: {', '.join(left)}",
            why="their sizes follow from what they are called with",
            hint="remove them, or use modules with sizes",
        )


def import_package(package: str) -> ModuleType:
    """timm or torchvision; raises UsageError with what to install."""
    install = f"pip install 'reconv[{package}]', which fits torch {torch.__version__}"
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UsageError(f"{package} is not installed", why=str(error), hint=install) from error
    except (ImportError, OSError, RuntimeError) as error:  # a build for another torch fails while it loads
        raise UsageError(
            f"{package} is installed but cannot be imported",
            why=f"{str(error).splitlines()[0]}: it is probably built for another torch",
            hint=install,
        ) from error


def _check_name(module: ModuleType, package: str, name: str) -> None:
    """Raise UsageError unless the package has a classifier of this name."""
    if package == "timm":
        known = module.list_models()
        if name.partition(".")[0] in known:  # a tag, as in vit_small_patch16_224.dino, names pretrained weights
            return
    else:
        known = module.models.list_models(module=module.models)
        if name in known:
            return
        if name in module.models.list_models():
            raise UsageError(
                f"torchvision:{name} is not an image classifier that can be trained",
                where="model.name",
                why="models for detection, segmentation and video, and quantized ones, are not supported",
                hint=f"use one such as torchvision:{known[0]}" if known else "",
            )
    close = difflib.get_close_matches(name, known, n=1)
    raise UsageError(
        f"{package} has no model called {name!r}",
        where="model.name",
        why=f"did you mean {package}:{close[0]}?" if close else "",
    )


def _check_options(package: str, name: str, options: Mapping[str, Any]) -> None:
    asked = next((option for option in _WEIGHTS_OPTIONS if options.get(option)), None)
    if asked is not None:
        raise UsageError(
            f"model.options.{asked} cannot be set: models are built without pretrained weights",
            hint=f"load them with --init {package}:{name}",
        )
