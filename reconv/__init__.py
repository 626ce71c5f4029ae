"""Reconv trains the reference convolutional networks from a recipe.

Public is what `__all__` lists here and in `reconv.api`, the optimizers that `reconv.optim` calls public, and the errors
of `reconv.core.errors`; everything else may change without notice. All of it is imported when it is first used, so
`import reconv` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reconv.core.version import __version__

if TYPE_CHECKING:
    from reconv import optim as optim
    from reconv.api import (
        Callback,
        Checkpointer,
        FuseReport,
        ImageLoader,
        Launch,
        Predictor,
        Ray,
        RunInfo,
        build_model,
        evaluate,
        export,
        fuse,
        load,
        predict,
        train,
        tune,
        unfuse,
    )

__all__ = [
    "Callback",
    "Checkpointer",
    "FuseReport",
    "ImageLoader",
    "Launch",
    "Predictor",
    "Ray",
    "RunInfo",
    "__version__",
    "build_model",
    "evaluate",
    "export",
    "fuse",
    "load",
    "predict",
    "train",
    "tune",
    "unfuse",
]


def __getattr__(name: str) -> object:
    """Import an API function when it is first used (PEP 562)."""
    if name == "optim":
        from importlib import import_module

        return import_module("reconv.optim")
    if name in __all__:
        from reconv import api

        return getattr(api, name)
    raise AttributeError(f"module 'reconv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
