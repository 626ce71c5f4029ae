"""The composition root: the only room that chooses classes. `train`, `evaluate` and `predict` are the library."""

from reconv.inference.predict_files import FoundBox, Prediction, predict
from reconv.inference.predictor import EvalResult, evaluate
from reconv.trainer.checkpoint_average import Averaged, average
from reconv.trainer.dry_run import DryRunResult, dry_run
from reconv.trainer.training_run import RunResult, train

__all__ = [
    "Averaged",
    "DryRunResult",
    "EvalResult",
    "FoundBox",
    "Prediction",
    "RunResult",
    "average",
    "dry_run",
    "evaluate",
    "predict",
    "train",
]
