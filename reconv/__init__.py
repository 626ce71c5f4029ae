"""Reconv trains the reference convolutional networks from a recipe.

Owns the library's front door: `train`, `evaluate` and `predict`, which the command line's verbs call. Refuses to
import anything until one of them is asked for. Invariant: `import reconv` costs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from reconv.inference.predict_files import predict
    from reconv.inference.predictor import evaluate
    from reconv.trainer.training_run import train

__all__ = ["__version__", "evaluate", "predict", "train"]

_LAZY = ("evaluate", "predict", "train")


def __getattr__(name: str) -> object:
    """Import the library functions when they are first used (PEP 562)."""
    if name in _LAZY:
        return getattr(import_module("reconv.api"), name)
    raise AttributeError(f"module 'reconv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
