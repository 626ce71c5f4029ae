"""`evaluate`: the metrics of a run on its validation set, for one checkpoint or for all of them."""

from __future__ import annotations

from pathlib import Path

from reconv.checkpoint.locate import LocatedWeights, locate
from reconv.checkpoint.manifest import digest as manifest_digest
from reconv.checkpoint.store import CheckpointStore
from reconv.custom_code import TrustCode
from reconv.data.dataset import Split
from reconv.errors import CheckpointError, UsageError
from reconv.inference.eval_data import ModelClasses, open_eval_set
from reconv.inference.load_model import read_saved_model
from reconv.inference.predictor import EvalResult, LogFunction, Predictor, find_model, no_log
from reconv.io.atomic import disk_errors
from reconv.report.evaluation_files import CheckpointScore, read_scores, write_scores
from reconv.report.html import write_report

_CANNOT_WRITE = "copy the run to a folder you can write to, and evaluate it there"


def evaluate(
    run: str | Path,
    *,
    data: str | Path | None = None,
    split: Split | None = None,
    device: str = "auto",
    all: bool = False,
    weights: str = "auto",
    best: bool = False,
    batch_size: int | None = None,
    samples: int | None = None,
    recipe: str | None = None,
    trust_code: TrustCode = False,
    log: LogFunction = no_log,
) -> list[EvalResult]:
    """Evaluate a run on the whole validation set; with `all`, every checkpoint in order, skipping those done before.

    `split` is `train`, `val` or `test`. Data without splits that is not the run's own is evaluated as a whole. With
    `samples`, only that many images are evaluated, and the result is marked as partial.
    """
    located = find_model(run, best, log)
    if not all:
        predictor = Predictor.from_located(
            located, weights=weights, recipe=recipe, device=device, trust_code=trust_code
        )
        return [predictor.evaluate(data, split=split, batch_size=batch_size, samples=samples, log=log)]
    for option, is_given in (("--samples", samples is not None), ("--averaged", weights == "averaged")):
        if is_given:
            raise UsageError(f"--all and {option} cannot be combined", then="omit one of them")
    if located.run is None:
        raise UsageError(f"--all needs a run directory, and {run} is not one", where=str(run))
    return _evaluate_all(
        located,
        data=data,
        split=split,
        device=device,
        weights=weights,
        batch_size=batch_size,
        trust_code=trust_code,
        log=log,
    )


def _evaluate_all(
    located: LocatedWeights,
    *,
    data: str | Path | None,
    split: Split | None,
    device: str,
    weights: str,
    batch_size: int | None,
    trust_code: TrustCode,
    log: LogFunction,
) -> list[EvalResult]:
    """Evaluate each valid checkpoint that evaluations.csv does not have yet, and update that file and the report."""
    assert located.run is not None
    folder, store = located.run.path, CheckpointStore(located.run.checkpoints)
    known = {(s.step, s.weights, s.checkpoint, s.data): s for s in read_scores(folder)}
    results: list[EvalResult] = []
    for step in store.steps():
        path = store.path(step)
        try:
            checkpoint, digest = locate(path), manifest_digest(path)
        except CheckpointError as error:
            log(f"skipped {path.name}, which cannot be used: {error.what}")
            continue
        saved = read_saved_model(checkpoint, weights=weights, recipe=None, trust_code=trust_code)
        trust_code = True  # asked once: the checkpoints of a run have one recipe
        classes = ModelClasses(saved.class_names, saved.has_class_names, saved.data_fingerprint)
        dataset = open_eval_set(saved.recipe, classes, data, split)
        key = (step, saved.weights, digest, dataset.fingerprint()[:16])
        if key not in known:
            predictor = Predictor.from_located(checkpoint, weights=weights, recipe=None, device=device, trust_code=True)
            result = predictor.evaluate(data, split=split, batch_size=batch_size, log=log)
            known[key] = CheckpointScore(*key, result.num_samples, result.metrics)
            with disk_errors(folder, _CANNOT_WRITE):
                write_scores(folder, list(known.values()))
        score = known[key]
        skipped = len(dataset) - score.num_samples
        results.append(
            EvalResult(
                path,
                step,
                score.weights,
                score.metrics,
                score.num_samples,
                skipped,
                split=split or "val",
                data=dataset.origin,
            )
        )
    with disk_errors(folder, _CANNOT_WRITE):
        write_report(folder)
    if not results:
        raise CheckpointError("no checkpoint of this run can be used", where=str(store.folder))
    return results
