"""Reconv trains the reference convolutional networks from a recipe.

`train`, `load`, `evaluate`, `predict`, `export`, `fuse` and the classes of the API are imported when they are first
used, so `import reconv` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reconv.core.version import __version__

if TYPE_CHECKING:
    from reconv.api import (
        Callback,
        FuseReport,
        Predictor,
        Ray,
        RunInfo,
        evaluate,
        export,
        fuse,
        load,
        predict,
        train,
        unfuse,
    )

__all__ = [
    "Callback",
    "FuseReport",
    "Predictor",
    "Ray",
    "RunInfo",
    "__version__",
    "evaluate",
    "export",
    "fuse",
    "load",
    "predict",
    "train",
    "unfuse",
]


def __getattr__(name: str) -> object:
    """Import an API function when it is first used (PEP 562)."""
    if name in __all__:
        from reconv import api

        return getattr(api, name)
    raise AttributeError(f"module 'reconv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
