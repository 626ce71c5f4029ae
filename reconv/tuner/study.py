"""The study: its settings, trials and values in one append-only file, `study.journal`, in Optuna's journal format.

What the study does next is a function of the file and the seed alone, never of timing or of the process: trials are
proposed in rounds, each from the trials of earlier rounds and a seed of its own number, and written as one line each;
the halving at a rung counts every trial that has reached it. A killed process leaves at most an incomplete last line,
which the next start removes (tests/tuner/test_study.py cuts the file at many bytes). One process at a time writes the
file: it holds the lock of the folder.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from reconv.core.errors import CheckpointError, RunLockedError, UsageError
from reconv.core.random import key
from reconv.core.text import printable
from reconv.logging.run_dir import RunLock
from reconv.storage.files import disk_errors
from reconv.tuner.space import Dimension, Param, trial_overrides

JOURNAL, LOCK = "study.journal", "lock"
_NAME = "reconv tune"
_FORMAT = 1
_STARTUP = 8  # random trials before those that are proposed from results
SEARCHES = ("tpe", "random")
_SETTINGS = "settings"  # attributes of the study
_VALUES, _FAILURE = "values", "failure"  # and of trials


def import_optuna() -> Any:
    """The module `optuna`, without its log lines; raises `UsageError` if it is not installed."""
    try:
        optuna: Any = import_module("optuna")
    except ImportError as error:
        raise UsageError(
            "reconv tune needs the package optuna", why=str(error), hint="pip install 'reconv[tune]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that determine the trials of a study; the same command must find the same ones."""

    recipe: str  # as given; the digest is that of the loaded recipe
    recipe_digest: str
    data: str | None
    space: tuple[str, ...]
    seed: int
    search: str  # tpe or random
    rungs: int
    reduction: int  # one of so many trials is continued at a rung
    round_size: int  # trials that are proposed at once

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain data."""
        return {"format": _FORMAT, **{name: getattr(self, name) for name in self.__slots__}, "space": list(self.space)}

    @property
    def points(self) -> tuple[str | None, ...]:
        """The rungs as points of a run, as --stop-at takes them; None: its end."""
        parts = [100 / self.reduction**above for above in range(self.rungs - 1, 0, -1)]
        return (*(f"{part:.6f}%" for part in parts), None)


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """A trial as the file has it."""

    number: int
    state: str  # running, complete, pruned or failed
    values: Mapping[str, Any]  # recipe fields; empty for trial 0, the recipe as it is
    params: Mapping[str, Param]
    scores: Mapping[int, float]  # by rung; larger is better
    failure: str  # empty, or why it has failed

    @property
    def last_rung(self) -> int:
        """The last rung that it has reached; -1: none."""
        return max(self.scores, default=-1)

    @property
    def score(self) -> float | None:
        """The score at its last rung."""
        return self.scores.get(self.last_rung)


class StudyFile:
    """The trials of a study and the decisions on them."""

    def __init__(self, folder: Path, settings: Settings, space: Sequence[Dimension]) -> None:
        self.folder, self.settings, self.space = folder, settings, tuple(space)
        self._optuna = import_optuna()
        path = folder / JOURNAL
        _remove_incomplete_line(path)
        with disk_errors(path):
            backend = self._optuna.storages.journal.JournalFileBackend(str(path), lock_obj=_NoLock())
        try:
            self._storage = self._optuna.storages.JournalStorage(backend)
            self._study = self._optuna.create_study(
                storage=self._storage, study_name=_NAME, direction="maximize", load_if_exists=True
            )
        except Exception as error:  # whatever reading such a line raises
            raise _broken(path, error) from error
        self._check_settings(path)
        self._check_trials(path)

    def _check_settings(self, path: Path) -> None:
        stored = self._study.user_attrs.get(_SETTINGS)
        wanted = self.settings.to_dict()
        if stored is None:
            if self._study.get_trials(deepcopy=False):
                raise UsageError(f"{path} is a study of another program", hint="choose another folder with --out DIR")
            self._study.set_user_attr(_SETTINGS, wanted)
            return
        if stored.get("format") != _FORMAT:
            raise UsageError(f"{path} was written by another version of Reconv", hint="use --out with a new folder")
        # Trials in parallel need no larger rounds than the study has.
        others = [name for name in wanted if name != "round_size" and stored.get(name) != wanted[name]]
        if others:
            lines = [f"{name}: {_shown(stored.get(name))} in the study, {_shown(wanted[name])} now" for name in others]
            raise UsageError(
                "this folder has another study",
                where=str(path),
                why="; ".join(lines),
                hint="give the same command to continue it, or choose another folder with --out DIR",
            )
        fields: dict[str, Any] = {name: stored[name] for name in wanted if name != "format"}
        self.settings = Settings(**{**fields, "space": tuple(fields["space"])})

    def _check_trials(self, path: Path) -> None:
        """Raise for trials that are not of the space: their values become settings of runs, and may name code."""
        for trial in self.trials():
            is_whole = trial.number == 0 or set(trial.params) == {d.field for d in self.space}
            is_inside = all(d.contains(trial.params[d.field]) for d in self.space if d.field in trial.params)
            values = {} if trial.number == 0 or not is_inside else trial_overrides(self.space, trial.params)
            if not (is_whole and is_inside and trial.values == values):
                raise _broken(path, f"trial {trial.number} has values that are not of the space")

    # Trials

    def trials(self) -> list[TrialRecord]:
        """All trials, by number."""
        return [_record(trial) for trial in self._study.get_trials(deepcopy=False)]

    def propose(self, last: int, defaults: Mapping[str, Param]) -> list[TrialRecord]:
        """Add trials until there are `last`, each as one line of the file; trial 0 is the recipe as it is."""
        from optuna.trial import TrialState, create_trial

        while (number := len(self._study.get_trials(deepcopy=False))) < last:
            params = dict(defaults) if number == 0 else self._sample(number)
            values = {} if number == 0 else trial_overrides(self.space, params)
            distributions = {d.field: d.distribution() for d in self.space if d.field in params}
            self._study.add_trial(
                create_trial(
                    state=TrialState.RUNNING,
                    params=params,
                    distributions=distributions,
                    user_attrs={_VALUES: values},
                )
            )
        return self.trials()

    def _sample(self, number: int) -> dict[str, Param]:
        """The parameters of a trial: a function of the trials before its round and of its number."""
        samplers = self._optuna.samplers
        seed = key(self.settings.seed, "tune", number) % 2**32
        if self.settings.search == "random":
            sampler = samplers.RandomSampler(seed=seed)
        else:
            sampler = samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP)
        memory = self._optuna.create_study(direction="maximize", sampler=sampler)
        memory.add_trials(map(_as_seen, self._study.get_trials(deepcopy=False)))
        trial = memory.ask({d.field: d.distribution() for d in self.space})
        return {d.field: trial.params[d.field] for d in self.space}

    def report(self, number: int, rung: int, score: float) -> None:
        """Record the score of a trial at a rung."""
        self._storage.set_trial_intermediate_value(self._id(number), rung, score)

    def fail(self, number: int, reason: str) -> None:
        """End a trial that has failed."""
        from optuna.trial import TrialState

        self._storage.set_trial_user_attr(self._id(number), _FAILURE, reason)
        self._storage.set_trial_state_values(self._id(number), TrialState.FAIL)

    def halve(self, rung: int, numbers: Sequence[int]) -> list[int]:
        """The trials among these that go on after a rung; the others end there.

        A trial goes on if it is among the best 1/reduction of all trials that have reached the rung, in whatever
        round. Trial 0, which all are compared with, always does, and takes no other's place.
        """
        from optuna.trial import TrialState

        trials = self.trials()
        reached = sorted((t for t in trials[1:] if rung in t.scores), key=lambda t: (-t.scores[rung], t.number))
        kept = {t.number for t in reached[: max(1, len(reached) // self.settings.reduction)]} | {0}
        for trial in trials:
            if trial.number in numbers and trial.state == "running" and trial.number not in kept:
                self._storage.set_trial_state_values(self._id(trial.number), TrialState.PRUNED, [trial.scores[rung]])
        return [number for number in numbers if number in kept]

    def complete(self, number: int) -> None:
        """End a trial that has been trained to its end."""
        from optuna.trial import TrialState

        trial = self.trials()[number]
        self._storage.set_trial_state_values(
            self._id(number), TrialState.COMPLETE, [trial.scores[self.settings.rungs - 1]]
        )

    def _id(self, number: int) -> int:
        return int(self._study.get_trials(deepcopy=False)[number]._trial_id)

    def importance(self) -> dict[str, float]:
        """Share of each field in the score at the first rung, which most trials have reached.

        By PED-ANOVA: how far the values of the better half differ from those of all. Empty for fewer than 4 trials.
        """
        from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
        from optuna.trial import TrialState, create_trial

        memory = self._optuna.create_study(direction="maximize")
        for trial in self.trials():
            if 0 in trial.scores and len(trial.params) == len(self.space):
                memory.add_trial(
                    create_trial(
                        state=TrialState.COMPLETE,
                        value=trial.scores[0],
                        params=dict(trial.params),
                        distributions={d.field: d.distribution() for d in self.space},
                    )
                )
        if len(memory.trials) < 4 or len({trial.value for trial in memory.trials}) < 2:
            return {}
        evaluator = PedAnovaImportanceEvaluator(target_quantile=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Optuna's experimental functions
            found = get_param_importances(memory, evaluator=evaluator)
        total = sum(found.values())
        return {name: value / total for name, value in found.items()} if total > 0 else {}


class _NoLock:
    """Locks nothing: the lock of the folder is held while the study is open, and is released by whatever ends it."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the folder of a study, so that no other process writes it."""
    try:
        lock = RunLock(folder / LOCK)
    except RunLockedError as error:
        raise RunLockedError(
            "the study is in use by another process", where=str(folder), why=error.why, hint="wait for it or stop it"
        ) from error
    with lock:
        yield


def _as_seen(trial: Any) -> Any:
    """A trial as the search sees it: one that has failed, as by divergence, is worse than all others."""
    from optuna.trial import TrialState, create_trial

    if trial.state != TrialState.FAIL:
        return trial
    return create_trial(state=TrialState.PRUNED, params=trial.params, distributions=trial.distributions)


def _record(trial: Any) -> TrialRecord:
    from optuna.trial import TrialState

    states = {TrialState.RUNNING: "running", TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned"}
    failure = printable(str(trial.user_attrs.get(_FAILURE, "")))
    return TrialRecord(
        trial.number,
        "failed" if failure and trial.state != TrialState.RUNNING else states.get(trial.state, "failed"),
        trial.user_attrs.get(_VALUES, {}),
        trial.params,
        dict(trial.intermediate_values),
        failure,
    )


def _remove_incomplete_line(path: Path) -> None:
    """Cut off what a killed process has left of its last line; Optuna would append to it."""
    if not path.exists():
        return
    with disk_errors(path), path.open("r+b") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:end].splitlines(), 1):
            try:
                json.loads(line)
            except ValueError as error:
                raise _broken(path, f"line {number} is not JSON: {error}") from error
        if end < len(content):
            file.truncate(end)
            os.fsync(file.fileno())


def _broken(path: Path, error: object) -> CheckpointError:
    return CheckpointError(
        "the file of the study is damaged",
        where=str(path),
        why=" ".join(str(error).split()) or type(error).__name__,
        hint="put back a copy, or start a new study with --out DIR; the runs of its trials are still there",
    )


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
