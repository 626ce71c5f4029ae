"""Model registry: `build_model(name, num_classes, seed=..., **options)`.

The same name, options and seed always give the same model with the same weights.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, get_type_hints

from torch import nn

from reconv.core.custom_code import is_import_path
from reconv.core.errors import UsageError
from reconv.models import efficientnet, fastnet, googlenet, mobilenet, resnet, ssd
from reconv.models import external as zoo
from reconv.models.architecture import AuxOutput, ReconvModel, Spec, SSDOutput
from reconv.models.init import SkipInit, init_weights

__all__ = [
    "AuxOutput",
    "ModelOption",
    "ReconvModel",
    "SSDOutput",
    "build_model",
    "init_weights",
    "model_names",
    "model_options",
    "model_spec",
    "option_names",
    "stages_of",
]

_SPECS: Mapping[str, Spec] = {
    **resnet.SPECS,
    **mobilenet.SPECS,
    **googlenet.SPECS,
    **efficientnet.SPECS,
    **fastnet.SPECS,
    **ssd.SPECS,
}


_NEEDS_NORM: Mapping[str, tuple[str, ...]] = {
    "norm_groups": ("group", "proxy"),
    "proxy_eps": ("proxy",),
    "bn_momentum": ("batch",),
}


def model_names() -> list[str]:
    """Every name that `build_model` knows, apart from timm:NAME, torchvision:NAME and import paths."""
    return list(_SPECS)


def option_names(name: str) -> list[str] | None:
    """The options of one of our models; None for a model of another package or of an unknown name."""
    return [field.name for field in fields(_SPECS[name])] if name in _SPECS else None


@dataclass(frozen=True, slots=True)
class ModelOption:
    """One option of a model."""

    name: str
    description: str
    annotation: Any
    default: object


def model_options(name: str) -> list[ModelOption]:
    """The options of one of our models with its own defaults; `num_classes` comes from the data and is left out."""
    spec = model_spec(name)
    descriptions: dict[str, str] = {}
    for kind in reversed(type(spec).__mro__[:-1]):
        descriptions |= _attribute_docstrings(kind)
    hints = get_type_hints(type(spec))
    names = [field.name for field in fields(spec) if field.name != "num_classes"]
    return [ModelOption(name, descriptions.get(name, ""), hints[name], getattr(spec, name)) for name in names]


def _attribute_docstrings(kind: type) -> dict[str, str]:
    """The strings below the fields of a class."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, below in pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            found[field.target.id] = str(ast.literal_eval(below.value))
    return found


def build_model(
    name: str,
    num_classes: int = 1000,
    *,
    seed: int = 0,
    image_shape: tuple[int, int, int] | None = None,
    **options: Any,
) -> nn.Module:
    """The model, initialized from a seed; `init_weights` initializes it again.

    `image_shape` (channels, height, width) is for custom models with lazy modules, which get their sizes from it.
    """
    model = build_uninitialized_model(name, num_classes, seed=seed, image_shape=image_shape, **options)
    # On the meta device there are no values, and sampling would import torch's compiler.
    if _is_ours(name) and next(model.parameters()).device.type != "meta":
        init_weights(model, seed)
    return model


def build_uninitialized_model(
    name: str, num_classes: int, *, seed: int, image_shape: tuple[int, int, int] | None = None, **options: Any
) -> nn.Module:
    """The model; the weights of ours may be anything until all of them are loaded. Other packages initialize theirs."""
    package, _, foreign_name = name.partition(":")
    if _is_ours(name):
        with SkipInit():
            return model_spec(name, num_classes, **options).build()
    if package in zoo.PACKAGES:
        return zoo.build_external(package, foreign_name, num_classes, options, seed)
    return zoo.build_custom(name, num_classes, options, seed, image_shape)


def _is_ours(name: str) -> bool:
    package, _, foreign_name = name.partition(":")
    return not (package in zoo.PACKAGES and foreign_name) and not is_import_path(name)


def model_spec(name: str, num_classes: int = 1000, **options: Any) -> Spec:
    """The checked spec of one of our models."""
    spec = _SPECS.get(name)
    if spec is None:
        close = difflib.get_close_matches(name, _SPECS, n=1)
        raise UsageError(
            f"there is no model called {name!r}",
            why=f"did you mean {close[0]}?" if close else "",
            hint="choose one of: "
            + ", ".join(_SPECS)
            + "; or timm:NAME, torchvision:NAME, or a custom one by import path, as in my_pkg.nets:make",
        )
    valid = [field.name for field in fields(spec)]
    unknown = sorted(set(options) - set(valid))
    if unknown:
        close = difflib.get_close_matches(unknown[0], valid, n=1)
        raise UsageError(
            f"{name} has no option {', '.join(unknown)}",
            why=f"did you mean {close[0]}?" if close else "",
            hint="its options are: " + ", ".join(valid),
        )
    chosen = {option: value for option, value in options.items() if value is not None}  # null: the model's default
    whole = replace(spec, num_classes=num_classes, **chosen)
    for option, norms in _NEEDS_NORM.items():
        if option in chosen and whole.norm not in norms:
            raise UsageError(
                f"model option {option} has no effect with norm: {whole.norm}",
                why=f"it belongs to {' and '.join(norms)}",
                hint=f"leave it out, or --set model.options.{option}=null if a recipe sets it",
            )
    return whole.with_groups()


def supports_zero_gamma(name: str, options: Mapping[str, Any]) -> bool:
    """True if a model is a ResNet whose blocks end in a norm: v2 has it before the convolutions."""
    spec = _SPECS.get(name)
    return isinstance(spec, resnet.ResNetSpec) and options.get("version", spec.version) != "v2"


def stages_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """A model's named stages; an external model is one stage."""
    return model.stages() if isinstance(model, ReconvModel) else [("network", model)]
