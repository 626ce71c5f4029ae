"""`evaluate`: the metrics of a run on its validation set, for one checkpoint or for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reconv.build.checks import check_machine_has
from reconv.build.saved_model import ModelClasses, read_saved_model
from reconv.checkpoint.locate import LocatedWeights, locate
from reconv.checkpoint.manifest import digest as manifest_digest
from reconv.checkpoint.store import CheckpointStore
from reconv.core.confidence import ConfidenceCalibration
from reconv.core.custom_code import CodeConsent, OtherCodeError, TrustCode
from reconv.core.errors import CheckpointError, UsageError
from reconv.data.dataset import Split
from reconv.device import device_kind
from reconv.distributed.environment import must_launch, read_launch_env
from reconv.distributed.process_group import ProcessGroup
from reconv.distributed.shared_work import joined_ranks
from reconv.inference.backends.base import BackendName, LogFunction, Precision, no_log
from reconv.inference.eval_data import open_eval_set
from reconv.inference.model_evaluation import EvalResult
from reconv.inference.prediction_rows import PredictionRows, check_rows_file
from reconv.inference.predictor import Predictor, find_model
from reconv.report.evaluation_files import CheckpointScore, read_scores, write_confidence, write_scores
from reconv.report.html import write_report
from reconv.storage.files import disk_errors
from reconv.storage.work_journal import remove_journal

_JOURNAL = ".evaluating"  # in the run directory, until all checkpoints are evaluated
_CANNOT_WRITE = "copy the run to a folder you can write to, and evaluate it there"


@dataclass(frozen=True, slots=True)
class EvalArgs:
    """Arguments of an evaluation; other processes get them pickled."""

    run: str | Path
    data: str | Path | None
    split: Split | None
    device: str
    all: bool
    weights: str
    best: bool
    batch_size: int | None
    samples: int | None
    per_class: bool
    recipe: str | None
    backend: BackendName
    precision: Precision
    calibration: str | Path | None
    trust_code: CodeConsent
    journal_dir: Path | None  # where the finished batches of a checkpoint are kept; None: nowhere
    predictions: Path | None = None  # where a row for each image is written
    coverage: float | None = None  # of prediction sets to fit and keep in the run


def evaluate(
    run: str | Path,
    *,
    data: str | Path | None = None,
    split: Split | None = None,
    device: str = "auto",
    devices: int | None = None,
    all: bool = False,
    weights: str = "auto",
    best: bool = False,
    batch_size: int | None = None,
    samples: int | None = None,
    per_class: bool = False,
    recipe: str | None = None,
    backend: BackendName = "auto",
    precision: Precision = "auto",
    calibration: str | Path | None = None,
    trust_code: TrustCode = False,
    journal_dir: Path | None = None,
    predictions: str | Path | None = None,
    calibrate: bool = False,
    coverage: float = 0.9,
    log: LogFunction = no_log,
) -> list[EvalResult]:
    """Evaluate a run on the whole validation set; with `all`, every checkpoint in order, skipping those done before.

    `split` is `train`, `val` or `test`. Data without splits that is not the run's own is evaluated as a whole. With
    `samples`, only that many images are evaluated, and the result is marked as partial. With `per_class`, the result
    has an `analysis` by class. Several `devices` share the images, with the result of one; `log` must then be a
    function that can be imported. `backend="eager"` repeats an evaluation made during training bit for bit.
    `predictions` is a .csv or .parquet file to write: path, target, prediction, score, loss and split of each image.
    With `calibrate`, temperature and prediction sets of `coverage` are fitted on the images and kept in the run: from
    then on its predictions and exports use them. In `journal_dir` finished batches are kept, so that the same call
    continues after a kill; delete it when the result is stored. With `all` they are kept in the run directory.
    """
    consent = CodeConsent.of(trust_code)
    args = EvalArgs(
        run, data, split, device, all, weights, best, batch_size, samples, per_class, recipe, backend, precision,
        calibration, consent, journal_dir, None if predictions is None else Path(predictions),
        coverage if calibrate else None,
    )  # fmt: skip
    if args.predictions is not None:
        check_rows_file(args.predictions)
    if calibrate and not 0.5 <= coverage < 1:
        raise UsageError(f"coverage is {coverage:g}", why="it is a fraction from 0.5 to less than 1", hint="0.9")
    if not must_launch(devices, read_launch_env()):
        return _evaluate(args, log)
    assert devices is not None
    from reconv.distributed.launcher import launch  # imports torch's launcher, which a single process does not need

    check_machine_has(devices, device)
    located = find_model(run, best, log)
    read_saved_model(located, weights=weights, recipe=recipe, trust_code=consent)  # asks for trust where it must
    return launch(devices, _evaluate, args, log)


def _evaluate(args: EvalArgs, log: LogFunction) -> list[EvalResult]:
    """Evaluate in this process, one of those that share the images."""
    with joined_ranks(device_kind(args.device)) as process_group:
        if process_group.world_size > 1:
            args = replace(args, trust_code=args.trust_code.without_question())  # not in every process
            log = log if process_group.is_rank0 else no_log
            process_group.on_rank0(
                lambda: bool(find_model(args.run, args.best, no_log, loads=False))
            )  # where it must be downloaded
        located = find_model(args.run, args.best, log, loads=not args.all)
        if args.all:
            _check_all(args, located)
            assert located.run is not None
            located.run.check_links()
            return _evaluate_all(args, located, process_group, log)
        return [_evaluate_one(args, located, process_group, log)]


def _evaluate_one(args: EvalArgs, located: LocatedWeights, process_group: ProcessGroup, log: LogFunction) -> EvalResult:
    if args.coverage is not None:
        _check_calibrate(args, located)
    predictor = Predictor.from_located(
        located,
        weights=args.weights,
        recipe=args.recipe,
        device=args.device,
        backend=args.backend,
        precision=args.precision,
        calibration=args.calibration,
        trust_code=args.trust_code,
        launch_env=process_group.launch_env,
        log=log,
    )
    result = predictor.evaluate(
        args.data,
        split=args.split,
        batch_size=args.batch_size,
        samples=args.samples,
        per_class=args.per_class,
        process_group=process_group,
        journal_dir=args.journal_dir,
        rows=args.predictions is not None,
        coverage=args.coverage,
        log=log,
    )
    if result.confidence is not None:
        calibration = result.confidence
        process_group.on_rank0(lambda: _write_confidence(calibration, result, located))
    if args.predictions is not None and result.rows is not None:
        file, rows = args.predictions, result.rows
        process_group.on_rank0(lambda: _write_rows(file, rows, located))
    return result


def _check_calibrate(args: EvalArgs, located: LocatedWeights) -> None:
    """Refuse weights that belong to no run, and images that the network was trained on."""
    if located.run is None or located.checkpoint is None:
        raise UsageError(
            f"--calibrate needs a run, and {args.run} is not one",
            where=str(args.run),
            why="temperature and prediction sets are kept in the run's folder",
            hint="weights files that a run has written have those of its end",
        )
    located.run.check_links()
    if args.split == "train":
        raise UsageError("--calibrate needs images that the network was not trained on", hint="omit --split train")


def _write_confidence(calibration: ConfidenceCalibration, result: EvalResult, located: LocatedWeights) -> None:
    """Keep what was fitted in the run."""
    assert located.run is not None and result.step is not None
    with disk_errors(located.run.path, _CANNOT_WRITE):
        write_confidence(located.run.path, result.step, result.weights, calibration)


def _write_rows(file: Path, rows: PredictionRows, located: LocatedWeights) -> None:
    """Write the rows; the report of the run links a file in its folder."""
    rows.write(file)
    if located.run is not None and file.absolute().parent == located.run.path.absolute():
        _write_report(located.run.path)


def _check_all(args: EvalArgs, located: LocatedWeights) -> None:
    """Refuse what cannot be combined with `all`: its results are kept in a file of metrics."""
    given = {
        "--samples": args.samples is not None,
        "--averaged": args.weights == "averaged",
        "--per-class": args.per_class,
        "--predictions": args.predictions is not None,
        "--calibrate": args.coverage is not None,
    }
    for option in (option for option, is_given in given.items() if is_given):
        raise UsageError(f"--all and {option} cannot be combined", hint="omit one of them")
    if located.run is None:
        raise UsageError(f"--all needs a run directory, and {args.run} is not one", where=str(args.run))


def _evaluate_all(
    args: EvalArgs, located: LocatedWeights, process_group: ProcessGroup, log: LogFunction
) -> list[EvalResult]:
    """Evaluate each valid checkpoint that evaluations.csv does not have yet, and update that file and the report."""
    assert located.run is not None
    folder, store = located.run.path, CheckpointStore(located.run.checkpoints)
    scores = process_group.on_rank0(lambda: read_scores(folder))
    known = {(s.step, s.weights, s.checkpoint, s.data): s for s in scores}
    results: list[EvalResult] = []
    args = replace(args, journal_dir=folder / _JOURNAL)
    for step in process_group.on_rank0(store.steps):
        path = store.path(step)
        try:
            checkpoint, digest = locate(path, loads=True), manifest_digest(path)
            saved = read_saved_model(checkpoint, weights=args.weights, recipe=None, trust_code=args.trust_code)
        except OtherCodeError as error:
            log(f"skipped {path.name}: {error.what} ({error.why})")
            continue
        except CheckpointError as error:
            is_deleted = not path.exists()  # by retention, if the run is still training
            reason = "was deleted meanwhile" if is_deleted else f"cannot be used: {error.what}"
            log(f"skipped {path.name}, which {reason}")
            continue
        classes = ModelClasses(saved.class_names, saved.has_class_names, saved.data_fingerprint, saved.display_names)
        dataset = open_eval_set(saved.recipe, classes, args.data, args.split)
        key = (step, saved.weights, digest, dataset.fingerprint()[:16])
        wall_s = None
        if key not in known:
            result = _evaluate_one(replace(args, recipe=None), checkpoint, process_group, log)
            known[key], wall_s = CheckpointScore(*key, result.num_samples, result.metrics), result.wall_s
            process_group.on_rank0(lambda: _write_scores(folder, list(known.values())))
        score = known[key]
        results.append(
            EvalResult(
                path,
                step,
                score.weights,
                score.metrics,
                score.num_samples,
                skipped=len(dataset) - score.num_samples,
                split=args.split or "val",
                data=dataset.origin,
                wall_s=wall_s,
            )
        )
    if process_group.is_rank0:
        remove_journal(folder / _JOURNAL)
    process_group.on_rank0(lambda: _write_report(folder))
    if not results:
        raise CheckpointError("no checkpoint of this run can be used", where=str(store.folder))
    return results


def _write_scores(folder: Path, scores: Sequence[CheckpointScore]) -> None:
    with disk_errors(folder, _CANNOT_WRITE):
        write_scores(folder, scores)


def _write_report(folder: Path) -> None:
    with disk_errors(folder, _CANNOT_WRITE):
        write_report(folder)
