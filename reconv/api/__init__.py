"""The Python API: `train`, `tune`, `load`, `evaluate`, `predict`, `export`, `average`, `dry_run`, and their results;
for any training loop `fuse`, `build_model`, `ImageLoader` and `Checkpointer`.

Each name is imported when it is first used, so that a server loads no trainer and a trainer no exporter.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reconv.api.run_result import RunResult
    from reconv.api.training import train
    from reconv.build.image_loader import ImageLoader
    from reconv.checkpoint.checkpointer import Checkpointer
    from reconv.cluster.launch import Launch
    from reconv.cluster.ray import Ray
    from reconv.exporters.run import ExportResult, export
    from reconv.inference.evaluate_run import evaluate
    from reconv.inference.image_reader import ImageSample
    from reconv.inference.model_evaluation import EvalResult
    from reconv.inference.predict import predict
    from reconv.inference.predictions import ClassScore, DetectedBox, Prediction, PredictionList
    from reconv.inference.predictor import Predictor, load
    from reconv.kernels.standalone import FuseReport, fuse, unfuse
    from reconv.models import build_model
    from reconv.trainer.callbacks.checkpoint_average import AveragedWeights, average
    from reconv.trainer.callbacks.custom import Callback, RunInfo
    from reconv.trainer.dry_run import DryRunResult, dry_run
    from reconv.trainer.run import TrainingRun
    from reconv.tuner.result import TuneResult
    from reconv.tuner.tune import tune

_MODULES = {
    "api.run_result": ("RunResult",),
    "api.training": ("train",),
    "build.image_loader": ("ImageLoader",),
    "checkpoint.checkpointer": ("Checkpointer",),
    "cluster.ray": ("Ray",),
    "cluster.launch": ("Launch",),
    "exporters.run": ("ExportResult", "export"),
    "inference.evaluate_run": ("evaluate",),
    "inference.predict": ("predict",),
    "inference.image_reader": ("ImageSample",),
    "inference.model_evaluation": ("EvalResult",),
    "inference.predictions": ("ClassScore", "DetectedBox", "Prediction", "PredictionList"),
    "inference.predictor": ("Predictor", "load"),
    "kernels.standalone": ("FuseReport", "fuse", "unfuse"),
    "models": ("build_model",),
    "trainer.callbacks.checkpoint_average": ("AveragedWeights", "average"),
    "trainer.callbacks.custom": ("Callback", "RunInfo"),
    "trainer.dry_run": ("DryRunResult", "dry_run"),
    "trainer.run": ("TrainingRun",),
    "tuner.result": ("TuneResult",),
    "tuner.tune": ("tune",),
}
_MODULE_OF = {name: f"reconv.{module}" for module, names in _MODULES.items() for name in names}

__all__ = [
    "AveragedWeights",
    "Callback",
    "Checkpointer",
    "ClassScore",
    "DetectedBox",
    "DryRunResult",
    "EvalResult",
    "ExportResult",
    "FuseReport",
    "ImageLoader",
    "ImageSample",
    "Launch",
    "Prediction",
    "PredictionList",
    "Predictor",
    "Ray",
    "RunInfo",
    "RunResult",
    "TrainingRun",
    "TuneResult",
    "average",
    "build_model",
    "dry_run",
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
    """Import a name of the API when it is first used (PEP 562)."""
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'reconv.api' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
