"""The composition root: the only room that chooses classes. `train`, `evaluate` and `predict` are the library."""

from reconv.trainer.checkpoint_average import Averaged, average
from reconv.inference.predict import FoundBox, Prediction, predict
from reconv.trainer.dry_run import Rehearsal, rehearse
from reconv.trainer.training_run import RunResult, train
from reconv.inference.predictor import EvalResult, evaluate

__all__ = [
    "Averaged",
    "EvalResult",
    "FoundBox",
    "Prediction",
    "Rehearsal",
    "RunResult",
    "average",
    "evaluate",
    "predict",
    "rehearse",
    "train",
]
