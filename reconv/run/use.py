"""Using a trained run: `evaluate` scores it in one exact pass, `predict` names what is in a picture.

Owns how a RUN (run folder, checkpoint folder or weights file) becomes a network ready to use. Refuses to know
training. Invariant: the preprocessing is the one saved with the model.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reconv.batch import Batch
from reconv.checkpoint.locate import Located, locate
from reconv.checkpoint.store import Store
from reconv.checkpoint.weights import apply, read_weights
from reconv.data.decode import decode, host_eval
from reconv.data.reader import read
from reconv.data.sources.folder import is_image_name
from reconv.device import Device, open_device
from reconv.engine.evaluate import evaluate as one_pass
from reconv.errors import CheckpointError, DataError, UsageError
from reconv.recipe.load import load
from reconv.recipe.schema import Recipe
from reconv.run import parts

PREDICT_BATCH = 64
HEADS = ("fc.weight", "classifier.weight", "classifier.1.weight", "linear.weight")  # of the networks we build
CSV_COLUMNS = ("step", "weights", "num_samples")


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The metrics of one weights file over the whole validation set."""

    path: Path
    step: int | None
    weights: str  # raw or ema
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
    located = locate(run, which="best" if best else "newest")
    if not all:
        model = open_model(located, device=device, weights=weights, recipe=recipe)
        return [_score(model, data, batch)]
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
    model = open_model(locate(run, which="best" if best else "newest"), device=device, weights=weights, recipe=recipe)
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
    if located.checkpoint is not None:
        loaded = Store(located.checkpoint.parent).load(located.checkpoint)
        saved = Recipe.model_validate(loaded.state["recipe"])
        chosen = ("ema" if "ema" in loaded.parts else "raw") if weights == "auto" else weights
        if chosen == "ema" and "ema" not in loaded.parts:
            raise CheckpointError(
                "this run has no averaged weights", where=str(located.checkpoint), then="leave --ema out"
            )
        tensors = loaded.parts["ema" if chosen == "ema" else "model"]
        names, step = tuple(loaded.state["class_names"]), int(loaded.state["step"])
        path = located.checkpoint
    else:
        if recipe is None:
            raise UsageError(
                f"{located.weights} is a bare weights file: its recipe is not known",
                then="name it with --recipe, as in --recipe resnet50",
            )
        saved = load(recipe).recipe
        tensors, chosen, step, path = read_weights(located.weights), "raw", None, located.weights
        names = tuple(str(i) for i in range(_num_classes(tensors, located.weights)))
    opened = open_device(device)
    network = parts.build_network(saved, len(names), opened)
    apply(network.model, tensors, strict=True, source=str(path))
    return Model(saved, names, network, opened, path, chosen, step)


def _num_classes(tensors: dict[str, torch.Tensor], path: Path) -> int:
    """The number of classes of a bare weights file: the rows of its one fully connected layer of the head."""
    heads = [t for name, t in tensors.items() if name in HEADS]
    if len(heads) != 1:
        raise CheckpointError(
            "no head in this weights file tells its number of classes",
            where=str(path),
            why=f"looked for {', '.join(HEADS)}",
        )
    return int(heads[0].shape[0])


def _score(model: Model, data: str | Path | None, batch: int | None) -> EvalResult:
    recipe = model.recipe
    if data is not None:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"path": str(data)})})
    source = parts.open_sources(recipe).val
    if source.class_names != model.class_names and model.step is not None:
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
    """Score each checkpoint of a run once, in order, into evaluations.csv; rows already there are kept."""
    assert located.run is not None
    file = located.run.path / "evaluations.csv"
    results = {r.step: r for r in _read_csv(file)}
    for step in Store(located.run.checkpoints).steps():
        if step in results:
            continue
        here = locate(Store(located.run.checkpoints).path(step))
        results[step] = _score(open_model(here, device=device, weights=weights, recipe=None), data, batch)
        _write_csv(file, [results[s] for s in sorted(results, key=lambda s: s or 0)])
    return [results[s] for s in sorted(results, key=lambda s: s or 0)]


def _read_csv(file: Path) -> Iterator[EvalResult]:
    if not file.exists():
        return
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            metrics = {name: float(value) for name, value in row.items() if name not in CSV_COLUMNS}
            path = file.parent / "checkpoints" / f"step-{int(row['step']):09d}"
            yield EvalResult(path, int(row["step"]), row["weights"], metrics, int(row["num_samples"]))


def _write_csv(file: Path, results: Sequence[EvalResult]) -> None:
    rows: list[dict[str, Any]] = [
        {"step": r.step, "weights": r.weights, "num_samples": r.num_samples, **r.metrics} for r in results
    ]
    temporary = file.with_suffix(".tmp")
    with temporary.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(file)


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
