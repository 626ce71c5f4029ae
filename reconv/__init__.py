"""Reconv trains the reference convolutional networks from a recipe.

`train`, `load`, `evaluate`, `predict`, `export`, `fuse` and the classes of the API are imported when they are first
used, so `import reconv` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reconv.core.version import __version__

if TYPE_CHECKING:
    from reconv.exporters.run import export
    from reconv.inference.evaluate_run import evaluate
    from reconv.inference.predict_files import predict
    from reconv.inference.predictor import Predictor, load
    from reconv.kernels.fuse_report import FuseReport
    from reconv.kernels.public_fuse import fuse, unfuse
    from reconv.trainer.callbacks.custom import Callback, RunInfo
    from reconv.trainer.python_api import train

# In these modules: `fuse` needs nothing of training or prediction, which take longer to import.
_LIGHT = {
    "FuseReport": "reconv.kernels.fuse_report",
    "fuse": "reconv.kernels.public_fuse",
    "unfuse": "reconv.kernels.public_fuse",
}
_LAZY = ("Callback", "Predictor", "RunInfo", "evaluate", "export", "load", "predict", "train")

__all__ = [
    "Callback",
    "FuseReport",
    "Predictor",
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
    if name in _LAZY or name in _LIGHT:
        from importlib import import_module

        return getattr(import_module(_LIGHT.get(name, "reconv.api")), name)
    raise AttributeError(f"module 'reconv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
