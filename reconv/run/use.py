"""Using a trained run: `evaluate` scores it in one exact pass, `predict` names what is in a picture.

Owns one exact pass and the naming of pictures. Refuses to know training, and how a RUN becomes a network (saved).
Invariant: the preprocessing is the one saved with the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from reconv.batch import Batch
from reconv.checkpoint.locate import Located, locate
from reconv.checkpoint.store import Store
from reconv.data.decode import decode, host_eval
from reconv.data.reader import read
from reconv.data.sources.folder import is_image_name
from reconv.device import Device, open_device
from reconv.engine.evaluate import evaluate as one_pass
from reconv.errors import DataError, UsageError
from reconv.recipe.schema import Recipe
from reconv.report.html import write_report
from reconv.report.scores import CheckpointScore, read_scores, write_scores
from reconv.run import parts
from reconv.run.saved import build_saved, find_weights, read_saved

PREDICT_BATCH = 64


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The metrics of one weights file over the whole validation set."""

    path: Path
    step: int | None
    weights: str  # raw, ema or averaged
    metrics: dict[str, float]
    num_samples: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a picture shows, best guess first."""

    path: Path
    labels: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Model:
    """A network ready to use, and what was saved with it."""

    recipe: Recipe
    class_names: tuple[str, ...]
    network: parts.Network
    device: Device
    path: Path
    weights: str
    step: int | None


def evaluate(
    run: str | Path,
    *,
    data: str | Path | None = None,
    device: str = "auto",
    all: bool = False,
    weights: str = "auto",
    best: bool = False,
    batch: int | None = None,
    recipe: str | None = None,
) -> list[EvalResult]:
    """Score a run on the whole validation set, once; `all` scores every checkpoint in order, skipping those done."""
    located = find_weights(run, "best" if best else "newest").located
    if not all:
        model = open_model(located, device=device, weights=weights, recipe=recipe)
        return [_score(model, data, batch)]
    if weights == "averaged":
        raise UsageError("--averaged is one set of weights, --all scores every checkpoint", then="leave one out")
    if located.run is None:
        raise UsageError(f"--all needs a run folder, and {run} is not one", where=str(run))
    return _score_every_checkpoint(located, data=data, device=device, weights=weights, batch=batch)


def predict(
    run: str | Path,
    paths: Sequence[str | Path],
    *,
    top: int = 5,
    device: str = "auto",
    weights: str = "auto",
    best: bool = False,
    recipe: str | None = None,
) -> list[Prediction]:
    """Name what each picture (or every picture in each folder) shows."""
    files = [file for path in paths for file in _pictures(Path(path))]
    located = find_weights(run, "best" if best else "newest").located
    model = open_model(located, device=device, weights=weights, recipe=recipe)
    prepare = parts.eval_prepare(model.recipe, model.network)
    model.network.model.eval()
    results: list[Prediction] = []
    for start in range(0, len(files), PREDICT_BATCH):
        chunk = files[start : start + PREDICT_BATCH]
        batch = _batch_of_pictures(chunk, model)
        with torch.inference_mode(), model.network.precision.autocast():
            logits = model.network.model(prepare(batch, 0)["images"])
        scores, classes = logits.double().softmax(dim=1).topk(min(top, logits.shape[1]))
        for file, row, names in zip(chunk, scores.tolist(), classes.tolist(), strict=True):
            labels = tuple((model.class_names[c], score) for c, score in zip(names, row, strict=True))
            results.append(Prediction(file, labels))
    return results


def open_model(located: Located, *, device: str, weights: str, recipe: str | None) -> Model:
    """The network of a run, a checkpoint or a weights file, on the device."""
    saved = read_saved(located, weights=weights, recipe=recipe)
    opened = open_device(device)
    network = build_saved(saved, saved.recipe, opened)
    return Model(saved.recipe, saved.class_names, network, opened, saved.path, saved.weights, saved.step)


def _score(model: Model, data: str | Path | None, batch: int | None) -> EvalResult:
    recipe = model.recipe
    if data is not None:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"path": str(data)})})
    source = parts.open_sources(recipe).val
    theirs, known = model.class_names, model.step is not None  # bare weights only have a number of classes
    if len(source.class_names) != len(theirs) or (known and source.class_names != theirs):
        raise DataError(
            "the classes of this data are not the ones the model was trained on",
            where=str(parts.data_path(recipe)),
            why=f"{len(source.class_names)} classes here, {len(model.class_names)} in the model",
        )
    task = parts.build_task(recipe, len(model.class_names))
    loader = parts.eval_loader(recipe, source, model.device, batch or recipe.evaluate.batch)
    evaluator = one_pass(
        model.network.model,
        task,
        task.evaluator(),
        loader,
        parts.eval_prepare(recipe, model.network),
        model.network.precision,
    )
    return EvalResult(model.path, model.step, model.weights, evaluator.result(), evaluator.num_samples)


def _score_every_checkpoint(
    located: Located, *, data: str | Path | None, device: str, weights: str, batch: int | None
) -> list[EvalResult]:
    """Score each checkpoint of a run once, in order, into evaluations.csv and its curve; rows already there stay."""
    assert located.run is not None
    folder, store = located.run.path, Store(located.run.checkpoints)
    scores = {score.step: score for score in read_scores(folder)}
    for step in store.steps():
        if step not in scores:
            model = open_model(locate(store.path(step)), device=device, weights=weights, recipe=None)
            result = _score(model, data, batch)
            scores[step] = CheckpointScore(step, result.weights, result.num_samples, result.metrics)
            write_scores(folder, list(scores.values()))
    write_report(folder)
    return [
        EvalResult(store.path(score.step), score.step, score.weights, score.metrics, score.num_samples)
        for _, score in sorted(scores.items())
    ]


def _pictures(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and is_image_name(file.name))
        if not files:
            raise DataError("no picture in this folder", where=str(path))
        return files
    if not path.exists():
        raise DataError("no such picture", where=str(path))
    return [path]


def _batch_of_pictures(files: Sequence[Path], model: Model) -> Batch:
    preprocess = model.recipe.data.preprocess
    images = [torch.tensor(host_eval(decode(read(file), preprocess.channels, str(file)), preprocess)) for file in files]
    rows = torch.arange(len(files))
    batch = Batch({"images": torch.stack(images), "indices": rows, "targets": rows * 0}, rows, (len(files),))
    return batch.map(model.device.move)
