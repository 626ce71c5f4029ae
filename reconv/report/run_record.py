"""A run directory as data, for the summary and the report: events by kind, attempts, recipe and evaluation files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from reconv.core.errors import RecipeError
from reconv.logging.event_log import latest_by_step, read_event_file
from reconv.logging.events import (
    AttemptStarted,
    BadImageSkipped,
    CheckpointSaved,
    DataFingerprint,
    DataWait,
    EvalFinished,
    Event,
    ImageLogged,
    LogMessage,
    NonFiniteStep,
    RunEnded,
    RunPlanned,
    ScalarLogged,
    SlowRank,
    TrainProgress,
)
from reconv.logging.run_dir import is_run_file
from reconv.report.evaluation_files import (
    CheckpointScore,
    read_classification_analysis,
    read_detection_analysis,
    read_scores,
)
from reconv.storage.bounded import real_path

E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the process and what it did; if it was killed, what it had logged by then."""

    start: AttemptStarted
    end: RunEnded | None  # None: killed, or still running
    last_step: int
    wall_s: float
    images: int
    timed_images: int  # trained on in train_s
    train_s: float
    wait_s: float
    peak_memory_bytes: int


_TABLES = (".csv", ".parquet")


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Everything in a run directory; events that a later attempt replaced are excluded."""

    folder: Path
    recipe: Mapping[str, Any]
    recipe_text: str
    plan: RunPlanned | None
    data_fingerprint: DataFingerprint | None
    attempts: tuple[Attempt, ...]
    progress: tuple[TrainProgress, ...]  # by step
    evaluations: tuple[EvalFinished, ...]
    scalars: tuple[ScalarLogged, ...]  # logged by callbacks
    checkpoints: tuple[CheckpointSaved, ...]
    non_finite: tuple[NonFiniteStep, ...]
    bad_images: tuple[BadImageSkipped, ...]
    images: tuple[ImageLogged, ...]
    messages: tuple[LogMessage, ...]
    data_wait: DataWait | None
    slow_ranks: tuple[SlowRank, ...]
    scores: tuple[CheckpointScore, ...]  # of `reconv eval --all`
    classification: Mapping[str, Any] | None = None  # analysis of a classifier's last evaluation
    detection: Mapping[str, Any] | None = None  # of a detector's
    tables: tuple[str, ...] = ()  # names of CSV and Parquet files beside the report
    problems: tuple[str, ...] = ()  # what of the files is left out, as messages
    unverified_lines: tuple[int, ...] = ()  # numbers of the lines that are left out
    num_unchecked: int = 0  # lines that have no checksum
    label_parts: int = 2  # of the path that are its label

    @property
    def label(self) -> str:
        """The run's name among others: the last parts of its path, as in quickstart/1."""
        return "/".join(real_path(self.folder).parts[-self.label_parts :]).replace("//", "/")

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.plan.recipe if self.plan else str(self.recipe.get("name", "run"))

    @property
    def title(self) -> str:
        """The recipe's name, marked if options or data changed what the recipe of this name is."""
        is_changed = str(self.recipe.get("description", "")).startswith("changed: ")
        return f"{self.name}, changed" if is_changed else self.name

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        return self.attempts[-1].last_step if self.attempts else 0

    @property
    def end(self) -> RunEnded | None:
        """The end of the last attempt, if it was logged."""
        return self.attempts[-1].end if self.attempts else None

    def epoch(self, step: int) -> float:
        """The step as a number of epochs."""
        return step / self.plan.steps_per_epoch if self.plan and self.plan.steps_per_epoch > 0 else float(step)


def load_run_record(run_dir: Path) -> RunRecord:
    """Read a run directory."""
    file = read_event_file(run_dir / "events.jsonl")
    events = file.events
    problems = file.problems()
    kept = latest_by_step(events)
    text, recipe = _read_recipe(run_dir / "recipe.yaml")
    plan = next(iter(_events_of_type(kept, RunPlanned)), None)
    return RunRecord(
        folder=run_dir,
        recipe=recipe,
        recipe_text=text,
        plan=plan,
        data_fingerprint=next(iter(_events_of_type(kept, DataFingerprint)), None),
        attempts=tuple(_attempts(events, plan.global_batch_size if plan else 0)),
        progress=tuple(sorted(_events_of_type(kept, TrainProgress), key=lambda e: e.step)),
        evaluations=tuple(sorted(_events_of_type(kept, EvalFinished), key=lambda e: (e.step, e.weights))),
        scalars=tuple(sorted(_events_of_type(kept, ScalarLogged), key=lambda e: e.step)),
        checkpoints=tuple(sorted(_events_of_type(kept, CheckpointSaved), key=lambda e: e.step)),
        non_finite=tuple(sorted(_events_of_type(kept, NonFiniteStep), key=lambda e: e.step)),
        bad_images=tuple(sorted(_events_of_type(kept, BadImageSkipped), key=lambda e: (e.step, e.split, e.index))),
        images=tuple(_events_of_type(kept, ImageLogged)),
        tables=tuple(sorted(p.name for p in run_dir.glob("*.[cp]*") if p.suffix in _TABLES and is_run_file(p.name))),
        messages=tuple(_events_of_type(kept, LogMessage)),
        data_wait=next(iter(_events_of_type(kept, DataWait)), None),
        slow_ranks=tuple(_events_of_type(kept, SlowRank)),
        scores=tuple(read_scores(run_dir, problems.append)),
        classification=read_classification_analysis(run_dir, problems.append),
        detection=read_detection_analysis(run_dir, problems.append),
        problems=tuple(problems),
        unverified_lines=tuple(sorted((*file.damaged, *file.unreadable))),
        num_unchecked=len(file.unchecked),
    )


def with_distinct_labels(records: Sequence[RunRecord]) -> list[RunRecord]:
    """The records with labels long enough to tell their run directories apart."""
    folders = {real_path(record.folder) for record in records}
    longest = max((len(folder.parts) for folder in folders), default=2)
    is_distinct = (n for n in range(2, longest + 1) if len({folder.parts[-n:] for folder in folders}) == len(folders))
    label_parts = next(is_distinct, 2)
    return [replace(record, label_parts=label_parts) for record in records]


def _events_of_type(events: Sequence[Event], event_type: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, event_type)]


def _read_recipe(path: Path) -> tuple[str, Mapping[str, Any]]:
    if not os.path.lexists(path):
        return "", {}
    from reconv.recipe.load import document as yaml_document

    text = yaml_document.read_file(path)
    document = yaml_document.read(text)
    if document.broken:
        problem = document.problems[0]
        raise RecipeError("the recipe is not valid YAML", where=f"{path}:{problem.line}", why=problem.text)
    return text, document.tree


def _attempts(events: Sequence[Event], global_batch_size: int) -> list[Attempt]:
    """The attempts of a run."""
    starts = [number for number, event in enumerate(events) if isinstance(event, AttemptStarted)]
    stops = [*starts[1:], len(events)]
    return [_attempt(events[start:stop], global_batch_size) for start, stop in zip(starts, stops, strict=False)]


def _attempt(events: Sequence[Event], global_batch_size: int) -> Attempt:
    start = events[0]
    assert isinstance(start, AttemptStarted)
    end = next(iter(_events_of_type(events, RunEnded)), None)
    progress = _events_of_type(events, TrainProgress)
    steps = [start.from_step, *(e.step for e in events if isinstance(e, TrainProgress | CheckpointSaved))]
    last_step = end.step if end else max(steps)
    peak_memory_bytes = max([end.peak_memory_bytes if end else 0, *(e.memory_bytes for e in progress)])
    timed_images, train_s, wait_s = _timed(start.from_step, progress, global_batch_size)
    if end and end.train_s > 0 and (end.timed_images is not None or not timed_images):
        timed_images = end.images if end.timed_images is None else end.timed_images
        train_s, wait_s = end.train_s, end.wait_s
    return Attempt(
        start=start,
        end=end,
        last_step=last_step,
        wall_s=end.wall_s if end else _logged_s(events),
        images=end.images if end else (last_step - start.from_step) * global_batch_size,
        timed_images=timed_images,
        train_s=train_s,
        wait_s=wait_s,
        peak_memory_bytes=peak_memory_bytes,
    )


def _timed(from_step: int, progress: Sequence[TrainProgress], global_batch_size: int) -> tuple[int, float, float]:
    """Images, seconds and seconds of waiting, computed from the logged rates."""
    images, train_s, wait_s, last = 0, 0.0, 0.0, from_step
    for event in progress:
        interval_images = (event.step - last) * global_batch_size
        last = event.step
        if event.images_per_s:
            seconds = interval_images / event.images_per_s
            images, train_s, wait_s = (
                images + interval_images,
                train_s + seconds,
                wait_s + seconds * event.data_wait_fraction,
            )
    return images, train_s, wait_s


def _logged_s(events: Sequence[Event]) -> float:
    """The time between the first and the last event of an attempt."""
    stamps = [event.time_s for event in events if event.time_s is not None]
    return max(stamps) - min(stamps) if stamps else 0.0
