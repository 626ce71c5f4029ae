"""A study from its first trial to the recipe to keep: rounds of trials, halving at rungs, and fresh seeds at the end.

Trial 0 is the recipe as it is, and is always trained to its end. Every trial has its final length from the start; at a
rung it is stopped (`--stop-at`) and, if it goes on, resumed, which gives the bits of an uninterrupted run
(tests/laws/test_law_tune.py). What is in the study's file is never trained again, so that a study that was stopped or
killed is continued by the same command and ends with the same trials, values and best.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reconv.cluster.submit.preflight import check_data
from reconv.core.errors import PreemptedError, ReconvError, ResourceError, UsageError
from reconv.core.text import count
from reconv.logging import formatting as fmt
from reconv.logging.run_dir import RunDir, read_summary
from reconv.recipe.load import document
from reconv.recipe.load.identity import recipe_digest
from reconv.recipe.load.resolved import Resolved
from reconv.recipe.loader import Override, dump
from reconv.recipe.presets import preset_names
from reconv.recipe.schema import takes_only_text
from reconv.recipe.shortcuts import shortcut_overrides
from reconv.recipe.units import BatchPerDevice
from reconv.report.run_record import load_run_record
from reconv.report.summary import result_evaluations
from reconv.storage.files import disk_errors, write_atomic
from reconv.storage.object_stores.store import is_url
from reconv.trainer.stop import StopSignal, point_step
from reconv.tuner.launch import JobEnd, TrialCommand, TrialJob, TrialLauncher, make_launcher, stopping
from reconv.tuner.result import Confirmation, TuneResult, describe_values
from reconv.tuner.space import (
    check_space,
    check_trial,
    default_params,
    default_space,
    parse_space,
)
from reconv.tuner.study import JOURNAL, SEARCHES, Settings, StudyFile, TrialRecord, import_optuna, locked_folder

BEST, RESULT, REPORT, CONFIRM = "best.yaml", "study.json", "report.html", "confirm"
_TRIAL_SETTINGS = (("save.keep_last", 1), ("save.keep_best", False))  # a trial is continued from its last checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """A study, as it was asked for."""

    recipe: str
    overrides: Sequence[Override] = ()
    data: str | None = None
    space: Sequence[str] = ()  # empty: the default of the recipe
    trials: int = 20
    seed: int = 0
    search: str = "tpe"
    rungs: int = 3
    reduction: int = 3
    parallel: int = 1
    confirm: int = 3  # fresh seeds
    out: Path | None = None
    device: str = "auto"
    trust_code: bool = False
    target: str | None = None  # slurm or ray
    submit: Mapping[str, Any] = field(default_factory=dict)  # the options of that target
    command: Sequence[str] = ()

    def check(self) -> None:
        """Raise `UsageError` for numbers that make no study."""
        least = {"trials": 2, "rungs": 1, "reduction": 2, "parallel": 1, "confirm": 0}
        for name, number in least.items():
            if getattr(self, name) < number:
                raise UsageError(f"--{name} must be at least {number}, not {getattr(self, name)}")
        if self.search not in SEARCHES:
            raise UsageError(f"--search must be one of {', '.join(SEARCHES)}, not {self.search!r}")
        if self.confirm == 1:
            raise UsageError(
                "one seed says nothing about the spread of the result", hint="--confirm 3, or --confirm 0 for none"
            )


class Tuner:
    """Runs a study; `log` gets a line for people whenever a trial has reached a rung."""

    def __init__(self, options: TuneOptions, log: Callable[[str], None], launcher: TrialLauncher | None = None) -> None:
        options.check()
        import_optuna()
        self._options, self._log = options, log
        texts = options.space or default_space(options.recipe, options.overrides)
        self._space = parse_space(texts)
        data = () if options.data is None else (("data.path", options.data, "--data"),)
        self._resolved = check_space(options.recipe, [*options.overrides, *data], self._space)
        _check_rungs(self._resolved)
        check_data(self._resolved)
        self.folder = (options.out or Path("runs") / f"{self._resolved.recipe.name}-tune").absolute()
        trial_settings = [(f, v, "tune") for f, v in _TRIAL_SETTINGS if f not in {n for n, *_ in options.overrides}]
        self._command = TrialCommand(
            recipe=_recipe_word(options.recipe),
            overrides=[*options.overrides, *trial_settings],
            data=_data_word(options.data),
            device=options.device,
            trust_code=options.trust_code,
        )
        self._launcher = launcher or make_launcher(self._command, options.target, options.submit)
        self._metric = ""
        if not options.space:
            log(f"space: {', '.join(texts)}")

    def run(self) -> TuneResult:
        """Search, confirm, and write the result; raises `PreemptedError` if it was asked to stop."""
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        if RunDir(self.folder).is_run():
            raise UsageError(f"{self.folder} contains a run", hint="choose another folder with --out DIR")
        with locked_folder(self.folder):
            _check_new_folder(self.folder)
            self._study = StudyFile(self.folder, self._settings(), self._space)
            with StopSignal() as self._stop, stopping(self._launcher):
                self._search()
                best = self._best()
                confirmation = self._confirm(best)
            return self._write(best, confirmation)

    def _settings(self) -> Settings:
        options = self._options
        return Settings(
            recipe=self._resolved.recipe.name,
            recipe_digest=recipe_digest(dump(self._resolved.recipe)),
            data=_data_word(options.data),
            space=tuple(map(str, self._space)),
            seed=options.seed,
            search=options.search,
            rungs=options.rungs,
            reduction=options.reduction,
            round_size=max(options.reduction ** (options.rungs - 1), options.parallel),
        )

    # Search

    def _search(self) -> None:
        study, total = self._study, self._options.trials
        defaults = default_params(self._resolved, self._space)
        for first in range(0, total, study.settings.round_size):
            last = min(first + study.settings.round_size, total)
            study.propose(last, defaults)
            for rung, point in enumerate(study.settings.points):
                self._train_rung(range(first, last), rung, point)
                undecided = [t.number for t in self._running(first, last) if t.last_rung == rung]
                if point is None:
                    for number in undecided:
                        study.complete(number)
                else:
                    kept = study.halve(rung, undecided)
                    if undecided:
                        self._log(f"{len(kept)} of {count(len(undecided), 'trial')} go on after rung {rung + 1}")
            self._check_any_value()

    def _running(self, first: int, last: int) -> list[TrialRecord]:
        return [t for t in self._study.trials()[first:last] if t.state == "running"]

    def _train_rung(self, numbers: range, rung: int, point: str | None) -> None:
        """Train the trials that have not reached a rung to it, and record their values."""
        jobs: dict[Path, tuple[int, TrialJob]] = {}
        for trial in self._running(numbers.start, numbers.stop):
            if trial.failure or (problem := self._problem(trial)):
                self._fail(trial.number, trial.failure or problem)
            elif rung not in trial.scores:
                job = TrialJob(self.run_of(trial.number), trial.values, point)
                if not self._record(trial.number, rung, job):
                    jobs[job.run] = (trial.number, job)

        def on_end(job: TrialJob, end: JobEnd) -> None:
            number = jobs[job.run][0]
            if end.code != 0:
                self._fail(number, end.reason)
            elif not self._record(number, rung, job):
                self._fail(number, "it has not been evaluated; see evaluate.every")

        self._train([job for _, job in jobs.values()], on_end)

    def _problem(self, trial: TrialRecord) -> str:
        """Contradiction in a trial's values, if it has not been started yet."""
        if trial.scores or not trial.values:
            return ""
        return check_trial(self._options.recipe, self._options.overrides, trial.values)

    def _record(self, number: int, rung: int, job: TrialJob) -> bool:
        """Record the value of a run at a rung, if it has been there."""
        found = value_at(job.run, job.stop_at)
        if found is None:
            return False
        metric, value = found
        if not math.isfinite(value):
            self._fail(number, f"{fmt.metric_name(metric)} is {fmt.number(value)}")
            return True
        self._study.report(number, rung, -value if fmt.is_loss(metric) else value)
        where = "at its end" if job.stop_at is None else f"at rung {rung + 1}"
        values = describe_values(self._study.trials()[number].values)
        self._log(f"trial {number} {where}: {fmt.metric_name(metric)} {fmt.metric_text(metric, value)} ({values})")
        self._metric = metric
        return True

    def _fail(self, number: int, reason: str) -> None:
        self._study.fail(number, reason)
        values = describe_values(self._study.trials()[number].values)
        self._log(f"trial {number} failed: {reason} ({values})")

    def _check_any_value(self) -> None:
        """Raise if every trial so far has failed: the others would, too."""
        trials = self._study.trials()
        if any(trial.scores for trial in trials):
            return
        log = self.run_of(trials[0].number) / "logs"
        raise ResourceError(
            f"all of {count(len(trials), 'trial')} have failed",
            where=str(log),
            why=trials[0].failure,
            hint=f"train the recipe as it is first, then delete {self.folder} or choose another --out",
        )

    def _train(self, jobs: Sequence[TrialJob], on_end: Callable[[TrialJob, JobEnd], None]) -> None:
        """Train jobs, several at once."""
        waiting, running = deque(jobs), dict[Path, TrialJob]()
        while waiting or running:
            if self._stop.requested:
                raise PreemptedError(
                    "the study was stopped", where=str(self.folder), hint="the same command continues it"
                )
            while waiting and len(running) < self._options.parallel:
                job = waiting.popleft()
                self._launcher.start(job)
                running[job.run] = job
            for run, end in self._launcher.poll().items():
                on_end(running.pop(run), end)

    def run_of(self, number: int) -> Path:
        """The run directory of a trial."""
        return self.folder / str(number)

    # Result

    def _best(self) -> TrialRecord:
        complete = [t for t in self._study.trials() if t.state == "complete"]
        if not complete:
            raise ResourceError(
                "no trial was trained to its end", where=str(self.folder), hint="see the failures in its runs' logs"
            )
        return max(complete, key=lambda trial: (trial.score or 0.0, -trial.number))

    def _confirm(self, best: TrialRecord) -> Confirmation | None:
        """Train the best trial and the recipe as it is with fresh seeds; None where there is nothing to compare."""
        default = self._study.trials()[0]
        if best.number == 0 or default.state != "complete" or not self._options.confirm:
            return None
        first = self._resolved.recipe.seed + 1
        seeds = range(first, first + self._options.confirm)
        jobs = {
            (trial.number, seed): TrialJob(
                self.folder / CONFIRM / f"trial-{trial.number}-seed-{seed}", {**trial.values, "seed": seed}, None
            )
            for seed in seeds
            for trial in (default, best)
        }
        self._log(f"training trial {best.number} and the recipe as it is with {len(seeds)} fresh seeds")

        def on_end(job: TrialJob, end: JobEnd) -> None:
            if end.code != 0:
                self._log(f"{job.run.name} failed: {end.reason}")

        self._train([job for job in jobs.values() if value_at(job.run, None) is None], on_end)
        found = {name: value_at(job.run, None) for name, job in jobs.items()}
        values = {
            number: tuple(found[number, seed][1] for seed in seeds if found[number, seed] is not None)  # type: ignore[index]
            for number in (0, best.number)
        }
        return Confirmation(
            values[0], values[best.number], tuple(seeds), lower_is_better=fmt.is_loss(self._metric_of())
        )

    def _metric_of(self) -> str:
        """The metric of the study: that of a value in it, also after a start that trained nothing."""
        if not self._metric:
            for trial in self._study.trials():
                if trial.scores and (found := value_at(self.run_of(trial.number), self._study.settings.points[0])):
                    self._metric = found[0]
                    break
        return self._metric

    def _write(self, best: TrialRecord, confirmation: Confirmation | None) -> TuneResult:
        """Write the recipe to keep, the result as JSON and the page."""
        from reconv.tuner.page import render_study

        result = TuneResult(
            folder=self.folder,
            recipe=self._resolved.recipe.name,
            metric=self._metric_of(),
            settings=self._study.settings,
            space=self._space,
            trials=tuple(self._study.trials()),
            best=best.number,
            confirmation=confirmation,
            importance=self._study.importance(),
            costs=tuple(_epochs(self.run_of(t.number)) for t in self._study.trials()),
            data=self._command.data,
            command=shlex.join(self._options.command),
        )
        kept = result.trials[result.kept]
        with disk_errors(self.folder):
            write_atomic(self.folder / BEST, self._recipe_text(result, kept))
            write_atomic(self.folder / RESULT, json.dumps(result.to_dict(), indent=2, allow_nan=False) + "\n")
            write_atomic(self.folder / REPORT, render_study(result, (self.folder / BEST).read_text()))
        return result

    def _recipe_text(self, result: TuneResult, kept: TrialRecord) -> str:
        """The recipe to keep, as a file that extends the one that was tuned."""
        overrides = [(name, value) for name, value, _ in self._options.overrides] + list(kept.values.items())
        tree: dict[str, Any] = {
            "extends": self._command.recipe,
            "name": f"{result.recipe}-tuned",
            "description": f"{result.recipe}, tuned: {describe_values(kept.values)}",
        }
        for name, value in overrides:
            *sections, leaf = name.split(".")
            node = tree
            for part in sections:
                node = node.setdefault(part, {})
            node[leaf] = _plain(name, value)
        command = [f"# command: {result.command}"] if result.command else []
        return "\n".join(["# Found by `reconv tune`.", *command, f"# {result.verdict}", document.write(tree)])


def value_at(run: Path, stop_at: str | None) -> tuple[str, float] | None:
    """The metric and value of a run at the first evaluation at a point or later; None if it has not been there.

    A run that has gone further has the same value there. Without a point it is the result of the finished run.
    """
    if not RunDir(run).events.exists():
        return None
    record = load_run_record(run)
    metric, evaluations = result_evaluations(record)
    if metric is None or record.plan is None:
        return None
    if stop_at is not None:
        step = point_step(stop_at, record.plan.total_steps, record.plan.steps_per_epoch)
        reached = next((e for e in evaluations if e.step >= step), None)
        if reached is not None:
            return metric, reached.metrics[metric]
    with suppress(ReconvError, OSError, ValueError):
        if RunDir(run).is_finished():  # also earlier than planned, by early_stopping
            value = read_summary(run).get("value")
            return metric, math.nan if value is None else float(value)
    return None


def _epochs(run: Path) -> float:
    """The number of epochs that a trial was trained for."""
    with suppress(ReconvError, OSError, ValueError):
        record = load_run_record(run)
        return round(record.epoch(record.steps), 4)
    return 0.0


def _check_new_folder(folder: Path) -> None:
    """Raise if a new study would take the runs in a folder for those of its trials."""
    if (folder / JOURNAL).exists():
        return
    run = next(
        (run for run in sorted([*folder.glob("[0-9]*"), *folder.glob(f"{CONFIRM}/*")]) if RunDir(run).is_run()), None
    )
    if run is not None:
        raise UsageError(
            f"{folder} has no study, but the run {run.relative_to(folder)}",
            why="a study takes the runs in its folder for those of its trials",
            hint="choose another folder with --out DIR",
        )


def _check_rungs(resolved: Resolved) -> None:
    """Raise if a run cannot be compared, or continued, at a rung."""
    if resolved.recipe.evaluate.every == "off":
        raise UsageError("a run without evaluations cannot be tuned", hint="set evaluate.every, as in 1ep")
    if resolved.recipe.save.every == "off":
        raise UsageError("a run without checkpoints cannot be tuned", hint="set save.every, as in 1ep")


def _recipe_word(recipe: str) -> str:
    """The recipe as the runs of the study are given it, and as the recipe to keep extends it."""
    return recipe if recipe in preset_names() else str(Path(recipe).expanduser().absolute())


def _data_word(data: str | None) -> str | None:
    return data if data is None or is_url(data) else str(Path(data).expanduser().absolute())


def _plain(name: str, value: object) -> Any:
    """An override's value as YAML has it."""
    if isinstance(value, BatchPerDevice):
        return value.size * value.num_devices
    if isinstance(value, str) and not takes_only_text(name):
        return document.read_value(value)
    return value


def run_study(options: TuneOptions, log: Callable[[str], None] = lambda text: None) -> TuneResult:
    """Run or continue a study."""
    return Tuner(options, log).run()


def tune(
    recipe: str | Path | None = None,
    *,
    data: str | Path | None = None,
    space: Mapping[str, str | Sequence[Any]] | Sequence[str] = (),
    trials: int = 20,
    seed: int = 0,
    search: str = "tpe",
    rungs: int = 3,
    reduction: int = 3,
    parallel: int = 1,
    confirm: int = 3,
    epochs: float | None = None,
    batch_size: int | None = None,
    lr: float | str | None = None,
    workers: int | None = None,
    model: str | None = None,
    init: str | Path | None = None,
    freeze: bool = False,
    overrides: Mapping[str, Any] | Sequence[Override] = (),
    out: str | Path | None = None,
    device: str = "auto",
    trust_code: bool = False,
    log: Callable[[str], None] | None = None,
) -> TuneResult:
    """Search fields of a recipe for better values, as `reconv tune` does, and return the trials and the recipe to keep.

    `space` has a range or choices for each field, as in `{"schedule.lr": "1e-3:1e-1:log", "optimizer.name": ["sgd",
    "lars"]}`; by default rate and weight decay are searched. Trials are runs in processes of their own, in the folder
    `out`; the same call continues a study that was stopped or killed. `overrides` sets other fields of the recipe,
    and `log` gets a line for people at every rung. Without a recipe `finetune` derives the settings from the data.
    """
    if recipe is None and data is None:
        raise UsageError("tune needs a recipe or data", hint="reconv.tune('quickstart')")
    if model is not None and not isinstance(model, str):
        raise UsageError(
            "tune takes a network by its name or import path",
            why="trials are processes of their own",
            hint="model='NAME'",
        )
    shortcuts = {
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "workers": workers,
        "model": model,
        "init": None if init is None else str(init),
        "freeze": freeze,
    }
    more = [(f, v, "overrides") for f, v in overrides.items()] if isinstance(overrides, Mapping) else list(overrides)
    options = TuneOptions(
        recipe="finetune" if recipe is None else str(recipe),
        overrides=[*shortcut_overrides(shortcuts, 1, "keyword"), *more],
        data=None if data is None else str(data),
        space=[_space_text(f, v) for f, v in space.items()] if isinstance(space, Mapping) else list(space),
        trials=trials,
        seed=seed,
        search=search,
        rungs=rungs,
        reduction=reduction,
        parallel=parallel,
        confirm=confirm,
        out=None if out is None else Path(out),
        device=device,
        trust_code=trust_code,
    )
    return run_study(options, log or (lambda text: None))


def _space_text(field: str, values: str | Sequence[Any]) -> str:
    """A dimension as --space writes it."""
    if isinstance(values, str):
        return f"{field}={values}"
    return f"{field}={'|'.join(v if isinstance(v, str) else json.dumps(v) for v in values)}"
