"""Description of a loaded model for `/models`: its task, classes, input, results and card."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reconv.api import Predictor
from reconv.data.transforms.host import resized_shorter_side
from reconv.logging.event_log import read_event_file
from reconv.logging.events import EvalFinished
from reconv.recipe.load.adapt import CHANGED
from reconv.recipe.parts.data import PreprocessConfig


def model_info(replicas: Sequence[Predictor]) -> dict[str, Any]:
    """The description of a model, from its equal replicas."""
    predictor = replicas[0]
    preprocess = predictor.recipe.data.preprocess
    metrics = checkpoint_metrics(predictor)
    return {
        "task": predictor.recipe.task,
        "network": predictor.recipe.model.name,
        "recipe": predictor.recipe.name,
        "classes": list(predictor.classes),
        "size": preprocess.size,
        "channels": preprocess.channels,
        "step": predictor.step,
        "weights": predictor.weights,
        "devices": [replica.device.describe() for replica in replicas],
        "backend": predictor.backend.name,
        "precision": predictor.backend.precision,
        "metrics": metrics,
        "confidence": None if predictor.confidence is None else predictor.confidence.to_dict(),
        "card": model_card(predictor),
    }


def checkpoint_metrics(predictor: Predictor) -> dict[str, float]:
    """The metrics of these weights on the validation set, from the log of their run; empty where there are none."""
    log = predictor.path.parent.parent / "events.jsonl"
    if predictor.step is None or predictor.path.parent.name != "checkpoints" or not log.is_file():
        return {}
    found = [
        event
        for event in read_event_file(log).events
        if isinstance(event, EvalFinished)
        and (event.step, event.weights, event.partial) == (predictor.step, predictor.weights, False)
    ]
    return {name: value for name, value in found[-1].metrics.items() if math.isfinite(value)} if found else {}


def model_card(predictor: Predictor) -> str:
    """The model in a few sentences of plain text."""
    recipe = predictor.recipe
    parameters = sum(parameter.numel() for parameter in predictor.module.parameters())
    step = "" if predictor.step is None else f" of step {predictor.step:,}"
    lines = [
        ""
        if recipe.description.startswith(CHANGED)
        else recipe.description,  # changes may name folders of this machine
        f"{recipe.model.name} for {recipe.task}, {len(predictor.classes):,} classes, {parameters:,} parameters.",
        f"The {predictor.weights} weights{step} of {_run_name(predictor.path)}, trained with the recipe {recipe.name}.",
        f"Images are {_preprocessing(recipe.data.preprocess)}.",
    ]
    return "\n".join(line for line in lines if line)


def _run_name(path: Path) -> str:
    """The end of a run's path: not the folders of the machine that it is in."""
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    return "/".join(run.parts[-2:]) if run.name.isdecimal() else run.name


def _preprocessing(preprocess: PreprocessConfig) -> str:
    shorter, size = resized_shorter_side(preprocess), preprocess.size
    crop = (
        f"resized to {size} x {size}"
        if shorter is None
        else f"resized to a shorter side of {shorter} ({preprocess.interpolation}), center crop {size} x {size}"
    )
    return f"{'gray' if preprocess.channels == 1 else 'RGB'}, {crop}"
