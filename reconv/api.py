"""The Python API: `train`, `evaluate`, `predict`, `average`, `dry_run` and what they return."""

from reconv.inference.evaluate_run import evaluate
from reconv.inference.predict_files import predict
from reconv.inference.predictor import ClassScore, DetectedBox, EvalResult, Prediction, Predictor
from reconv.trainer.checkpoint_average import Averaged, average
from reconv.trainer.dry_run import DryRunResult, dry_run
from reconv.trainer.training_run import RunResult, train

__all__ = [
    "Averaged",
    "ClassScore",
    "DetectedBox",
    "DryRunResult",
    "EvalResult",
    "Prediction",
    "Predictor",
    "RunResult",
    "average",
    "dry_run",
    "evaluate",
    "predict",
    "train",
]
