"""The result of a study: its trials, what fresh seeds say about the best one, and which recipe to keep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, variance
from typing import Any

from reconv.logging import formatting as fmt
from reconv.tuner.space import Dimension, value_text
from reconv.tuner.study import Settings, TrialRecord

_STANDARD_ERRORS = 2  # by which the best trial must be better


def describe_values(values: Mapping[str, object]) -> str:
    """The values of a trial in short."""
    return ", ".join(f"{name} {value_text(value)}" for name, value in values.items()) or "the recipe as it is"


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Results of the recipe as it is and of the best trial, with the same fresh seeds."""

    default: tuple[float, ...]
    best: tuple[float, ...]
    seeds: tuple[int, ...]
    lower_is_better: bool = False

    @property
    def is_complete(self) -> bool:
        """True if both have a spread, and no run of the best trial has failed."""
        return len(self.default) > 1 and len(self.best) == len(self.seeds)

    @property
    def gain(self) -> float:
        """Difference of the means; above 0 where the best trial is better."""
        gain = mean(self.best) - mean(self.default)
        return -gain if self.lower_is_better else gain

    @property
    def standard_error(self) -> float:
        """The standard error of the difference of the means."""
        return math.sqrt(sum(variance(values) / len(values) for values in (self.default, self.best)))

    @property
    def is_better(self) -> bool:
        """True if the best trial is better by more than two standard errors."""
        return self.is_complete and self.gain > _STANDARD_ERRORS * self.standard_error


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The trials of a study, the best one, and the recipe to keep: `folder / "best.yaml"`."""

    folder: Path
    recipe: str
    metric: str
    settings: Settings
    space: Sequence[Dimension]
    trials: Sequence[TrialRecord]
    best: int  # the number of the trial with the best value at its end
    confirmation: Confirmation | None  # None: nothing was compared
    importance: Mapping[str, float]  # of each field, as a fraction; empty for few trials
    costs: Sequence[float]  # epochs that each trial was trained for
    data: str | None = None
    command: str = ""

    @property
    def kept(self) -> int:
        """The trial whose recipe is kept; 0: the default stands."""
        return 0 if self.confirmation is not None and not self.confirmation.is_better else self.best

    @property
    def recipe_file(self) -> Path:
        """The recipe to keep."""
        return self.folder / "best.yaml"

    @property
    def report(self) -> Path:
        """The HTML page."""
        return self.folder / "report.html"

    def value_of(self, trial: TrialRecord, rung: int | None = None) -> float | None:
        """The value of the metric at a rung, by default the last one that the trial has reached."""
        score = trial.score if rung is None else trial.scores.get(rung)
        return score if score is None or not fmt.is_loss(self.metric) else -score

    def text_of(self, value: float | None) -> str:
        """A value of the metric for people."""
        return "–" if value is None else fmt.metric_text(self.metric, value)

    @property
    def verdict(self) -> str:
        """One line: which recipe to keep, and why."""
        name, best = fmt.metric_name(self.metric), self.trials[self.best]
        found = f"trial {best.number} ({describe_values(best.values)})"
        if best.number == 0:
            return f"the default stands: no trial ends better than its {name} {self.text_of(self.value_of(best))}"
        confirmed = self.confirmation
        if confirmed is None:
            return f"{found}: {name} {self.text_of(self.value_of(best))}; not compared with fresh seeds"
        if not confirmed.is_complete:
            failed = f"{len(confirmed.seeds) - len(confirmed.best)} of {len(confirmed.seeds)}"
            return f"the default stands: {failed} runs of {found} with fresh seeds have failed"
        gain, error = self._difference(confirmed.gain), self._difference(confirmed.standard_error)
        compared = f"{name} {self._mean(confirmed.best)} against {self._mean(confirmed.default)}"
        difference = f"{gain}, standard error {error}, over {len(confirmed.best)} fresh seeds"
        if confirmed.is_better:
            return f"{found} is better than the default: {compared} ({difference})"
        return f"the default stands: {found} is not better by more than two standard errors, {compared} ({difference})"

    def _mean(self, values: Sequence[float]) -> str:
        return self.text_of(mean(values))

    def _difference(self, value: float) -> str:
        """A difference of two values of the metric: in points where it is a percentage."""
        return f"{value:.4g}" if fmt.is_loss(self.metric) else f"{100 * value:.2f} points"

    @property
    def train_words(self) -> list[str]:
        """The command that trains the recipe to keep."""
        return ["reconv", "train", str(self.recipe_file), *(["--data", self.data] if self.data is not None else [])]

    @property
    def rows(self) -> tuple[list[str], list[list[str]]]:
        """The table of trials, the best first: names of columns and cells."""
        fields = [d.field for d in self.space]
        has_failures = any(trial.failure for trial in self.trials)
        note = ["failure"] if has_failures else []
        head = ["trial", "state", fmt.metric_name(self.metric), "rung", "epochs", *fields, *note]
        order = sorted(self.trials, key=lambda t: (-t.last_rung, -(t.score or 0.0) if t.scores else 0.0, t.number))
        rows = []
        for trial in order:
            values = [value_text(trial.values[name]) if name in trial.values else "as it is" for name in fields]
            rung = f"{trial.last_rung + 1} of {self.settings.rungs}"
            note = [trial.failure] if has_failures else []
            cells = [str(trial.number), trial.state, self.text_of(self.value_of(trial)), rung]
            rows.append([*cells, f"{self.costs[trial.number]:g}", *values, *note])
        return head, rows

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, for --json and study.json."""
        confirmed = self.confirmation
        return {
            "folder": str(self.folder),
            "recipe": self.recipe,
            "metric": self.metric,
            "verdict": self.verdict,
            "default_stands": self.kept == 0,
            "kept": self.kept,
            "best": self.best,
            "recipe_file": str(self.recipe_file),
            "report": str(self.report),
            "settings": self.settings.to_dict(),
            "confirmation": None
            if confirmed is None
            else {
                "seeds": list(confirmed.seeds),
                "default": list(confirmed.default),
                "best": list(confirmed.best),
                "gain": confirmed.gain if confirmed.is_complete else None,
                "standard_error": confirmed.standard_error if confirmed.is_complete else None,
                "is_better": confirmed.is_better,
            },
            "importance": dict(self.importance),
            "epochs": sum(self.costs),
            "trials": [
                {
                    "number": trial.number,
                    "state": trial.state,
                    "failure": trial.failure or None,
                    "values": dict(trial.values),
                    "rungs": {str(rung + 1): self.value_of(trial, rung) for rung in trial.scores},
                    "value": self.value_of(trial),
                    "epochs": self.costs[trial.number],
                }
                for trial in self.trials
            ],
        }
