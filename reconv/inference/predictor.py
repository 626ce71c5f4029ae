"""Using a trained run: it is opened as a model, and `evaluate` scores it in one exact pass.

Owns the pass. Refuses to know training, images of no data set (predict) and how a RUN becomes a network (saved).
Invariant: the preprocessing is the one saved with the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from reconv.checkpoint.locate import Located, locate
from reconv.checkpoint.manifest import digest as manifest_digest
from reconv.checkpoint.store import Store
from reconv.data.dataset import Dataset
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.device import Device, open_device
from reconv.errors import CheckpointError, DataError, UsageError
from reconv.inference.evaluate import InferenceStep
from reconv.inference.evaluate import evaluate as one_pass
from reconv.inference.load_model import build_saved, find_weights, read_saved
from reconv.io.atomic import disk_errors
from reconv.metrics.coco_eval import INSTALL, can_score_coco
from reconv.recipe.schema import Recipe
from reconv.report.html import write_report
from reconv.report.scores import CheckpointScore, read_scores, write_scores
from reconv.trainer.build import loaders as parts
from reconv.trainer.build.datasets import open_datasets, part_of, refuse_unread_path
from reconv.trainer.build.network import Network

Tell = Callable[[str], None]  # told what a person should know besides the result


def silent(text: str) -> None:
    """Nobody asked."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The metrics of one weights file over the whole validation set."""

    path: Path
    step: int | None
    weights: str  # raw, ema or averaged
    metrics: dict[str, float]
    num_samples: int
    skipped: int = 0  # images that could not be read and are in none of the metrics
    partial: bool = False  # not all of the validation set was scored


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A network ready to use, and what was saved with it."""

    recipe: Recipe
    class_names: tuple[str, ...]
    network: Network
    device: Device
    path: Path
    weights: str
    step: int | None
    class_ids: tuple[int, ...] = ()  # a detector's: the numbers its data had for the classes


def evaluate(
    run: str | Path,
    *,
    data: str | Path | None = None,
    device: str = "auto",
    all: bool = False,
    weights: str = "auto",
    best: bool = False,
    batch: int | None = None,
    samples: int | None = None,
    recipe: str | None = None,
    tell: Tell = silent,
) -> list[EvalResult]:
    """Score a run on the whole validation set, once; `all` scores every checkpoint in order, skipping those done.

    With `samples` only so many of the set are scored, and the result says that it is partial.
    """
    located = find_model(run, best, tell)
    if not all:
        model = open_model(located, device=device, weights=weights, recipe=recipe)
        return [_score(model, data, batch, tell, samples)]
    if samples is not None:
        raise UsageError("--all scores the whole validation set, --samples a part of it", then="leave one out")
    if weights == "averaged":
        raise UsageError("--averaged is one set of weights, --all scores every checkpoint", then="leave one out")
    if located.run is None:
        raise UsageError(f"--all needs a run folder, and {run} is not one", where=str(run))
    return _score_every_checkpoint(located, data=data, device=device, weights=weights, batch=batch, tell=tell)


def find_model(run: str | Path, best: bool, tell: Tell) -> Located:
    """What RUN means; checkpoints that had to be passed over are told."""
    located = find_weights(run, "best" if best else "newest").located
    for path, reason in located.skipped:
        tell(f"{path.name} is not usable ({reason}); fell back")
    return located


def open_model(located: Located, *, device: str, weights: str, recipe: str | None) -> LoadedModel:
    """The network of a run, a checkpoint or a weights file, on the device."""
    saved = read_saved(located, weights=weights, recipe=recipe)
    opened = open_device(device)
    network = build_saved(saved, saved.recipe, opened)
    where = (saved.path, saved.weights, saved.step)
    return LoadedModel(saved.recipe, saved.class_names, network, opened, *where, class_ids=saved.class_ids)


def _score(
    model: LoadedModel, data: str | Path | None, batch: int | None, tell: Tell, samples: int | None = None
) -> EvalResult:
    recipe = model.recipe
    whole = _validation_set(recipe, data)
    source = part_of(whole, samples)
    theirs, known = model.class_names, model.step is not None  # bare weights only have a number of classes
    if len(source.class_names) != len(theirs) or (known and source.class_names != theirs):
        raise DataError(
            "the classes of this data are not the ones the model was trained on",
            where=source.origin,
            why=f"{len(source.class_names)} classes here, {len(model.class_names)} in the model",
        )
    if recipe.task == "detection" and not can_score_coco():
        tell(f"the 12 COCO numbers are not told: {INSTALL}")
    task = parts.build_task(recipe, source, model.device)
    faults = BadSamples(recipe.data.bad_images.limit, lambda fault: tell(f"left out {fault.path}: {fault.why}"))
    loader = parts.eval_loader(recipe, source, model.device, batch or recipe.evaluate.batch, faults=faults)
    prepare = parts.eval_prepare(recipe, model.network)
    step = InferenceStep(model.network.model, prepare, model.network.precision, recipe.evaluate.tta)
    evaluator = one_pass(step, task.metrics(), loader)
    skipped = len(faults.known("val"))
    return EvalResult(
        model.path,
        model.step,
        model.weights,
        evaluator.compute(),
        evaluator.num_samples,
        skipped,
        partial=len(source) < len(whole),
    )


def _score_every_checkpoint(
    located: Located,
    *,
    data: str | Path | None,
    device: str,
    weights: str,
    batch: int | None,
    tell: Tell,
) -> list[EvalResult]:
    """Score each valid checkpoint of a run once, in order, into evaluations.csv and its curve; rows there stay."""
    assert located.run is not None
    folder, store = located.run.path, Store(located.run.checkpoints)
    known = {(s.step, s.weights, s.checkpoint, s.data): s for s in read_scores(folder)}
    results: list[EvalResult] = []
    for step in store.steps():
        path = store.path(step)
        try:
            here, digest = locate(path), manifest_digest(path)
        except CheckpointError as error:
            tell(f"{path.name} is not usable and was left out: {error.what}")
            continue
        saved = read_saved(here, weights=weights, recipe=None)
        source = _validation_set(saved.recipe, data)
        key = (step, saved.weights, digest, source.fingerprint()[:16])
        if key not in known:
            result = _score(open_model(here, device=device, weights=weights, recipe=None), data, batch, tell)
            known[key] = CheckpointScore(*key, result.num_samples, result.metrics)
            with disk_errors(folder, "copy the run to a folder of yours and score it there"):
                write_scores(folder, list(known.values()))
        score = known[key]
        skipped = len(source) - score.num_samples
        results.append(EvalResult(path, step, score.weights, score.metrics, score.num_samples, skipped))
    with disk_errors(folder, "copy the run to a folder of yours and score it there"):
        write_report(folder)
    if not results:
        raise CheckpointError("no checkpoint of this run is usable", where=str(store.folder))
    return results


def _validation_set(recipe: Recipe, data: str | Path | None) -> Dataset:
    """The whole of it, whatever part the run itself looked at."""
    recipe = recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"samples": None})})
    refuse_unread_path(recipe, data)
    if data is not None:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"path": str(data)})})
    return open_datasets(recipe).val
