"""The composition root: the only room that chooses classes. `train`, `evaluate` and `predict` are the library."""

from reconv.run.average import Averaged, average
from reconv.run.predict import FoundBox, Prediction, predict
from reconv.run.rehearse import Rehearsal, rehearse
from reconv.run.train import RunResult, train
from reconv.run.use import EvalResult, evaluate

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
