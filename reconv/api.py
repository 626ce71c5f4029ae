"""The Python API: `train`, `load`, `evaluate`, `predict`, `export`, `average`, `dry_run`, `fuse`, and their results."""

from reconv.exporters.run import ExportResult, export
from reconv.inference.evaluate_run import evaluate
from reconv.inference.image_reader import ImageSample
from reconv.inference.model_evaluation import EvalResult
from reconv.inference.predict_files import predict
from reconv.inference.predictions import ClassScore, DetectedBox, Prediction, PredictionList
from reconv.inference.predictor import Predictor, load
from reconv.kernels.fuse_report import FuseReport
from reconv.kernels.public_fuse import fuse, unfuse
from reconv.trainer.callbacks.checkpoint_average import AveragedWeights, average
from reconv.trainer.callbacks.custom import Callback, RunInfo
from reconv.trainer.dry_run import DryRunResult, dry_run
from reconv.trainer.python_api import train
from reconv.trainer.run_result import RunResult
from reconv.trainer.training_run import TrainingRun

__all__ = [
    "AveragedWeights",
    "Callback",
    "ClassScore",
    "DetectedBox",
    "DryRunResult",
    "EvalResult",
    "ExportResult",
    "FuseReport",
    "ImageSample",
    "Prediction",
    "PredictionList",
    "Predictor",
    "RunInfo",
    "RunResult",
    "TrainingRun",
    "average",
    "dry_run",
    "evaluate",
    "export",
    "fuse",
    "load",
    "predict",
    "train",
    "unfuse",
]
