"""Typed events of a run, and `events.jsonl`: one JSON object per line, append-only.

A line cut short by a crash is ignored. A step that was logged by two attempts counts as the later one has it.
"""

from __future__ import annotations

import json
import math
import os
import time
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from reconv.errors import CheckpointError, UsageError


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a run; `kind` is its name in the file."""

    kind: ClassVar[str] = ""
    # Unix seconds, set by the event log. Not compared: the events of two equal runs differ in nothing else.
    time_s: float | None = field(default=None, kw_only=True, compare=False)


@dataclass(frozen=True, slots=True)
class AttemptStarted(Event):
    """The process has started, for the first time or to resume."""

    kind: ClassVar[str] = "attempt"
    attempt: int
    from_step: int  # 0: from scratch
    command: tuple[str, ...]
    environment: Mapping[str, Any]  # versions, device, host, threads, data fingerprint


@dataclass(frozen=True, slots=True)
class RunPlanned(Event):
    """The plan that the recipe resolves to."""

    kind: ClassVar[str] = "plan"
    recipe: str
    task: str
    total_steps: int
    steps_per_epoch: float
    global_batch_size: int
    lines: tuple[str, ...]  # the plan as text
    num_parameters: int = 0  # 0: unknown
    model: str = ""
    num_devices: int = 1
    num_trained: int | None = None  # of the parameters; the others are frozen for the whole run. None: unknown
    num_classes: int = 0  # 0: unknown
    monitored_weights: str = "raw"  # whose metrics count: ema where there are EMA weights
    loss_note: str = ""  # what the training loss includes, and the validation loss does not


@dataclass(frozen=True, slots=True)
class TrainProgress(Event):
    """Training metrics: means over the steps since the last event of this kind."""

    kind: ClassVar[str] = "train"
    step: int  # steps done
    epoch: float
    loss: float
    lr: float
    metrics: Mapping[str, float]  # of the training images, such as top1
    metrics_note: str  # "" or "on mixed images"
    grad_norm: float
    images_per_s: float | None  # None during the first steps, which are not timed
    compute_images_per_s: float | None  # without the time spent waiting for data
    data_wait_fraction: float
    memory_bytes: int
    eta_s: float | None
    loss_scale: float | None = None


@dataclass(frozen=True, slots=True)
class EvalFinished(Event):
    """The metrics of one set of weights on the validation set."""

    kind: ClassVar[str] = "eval"
    step: int
    epoch: float
    weights: str  # raw, ema or averaged
    metrics: Mapping[str, float]  # fractions, and the loss
    num_samples: int
    wall_s: float
    best: bool  # so far
    partial: bool = False  # only a part of the validation set was evaluated
    skipped: int = 0  # images that could not be read; they are not part of the metrics


@dataclass(frozen=True, slots=True)
class ScalarLogged(Event):
    """A number that a callback of the user has logged."""

    kind: ClassVar[str] = "scalar"
    step: int
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Event):
    kind: ClassVar[str] = "checkpoint"
    step: int
    path: str  # relative to the run directory
    num_bytes: int
    wall_s: float  # until it was complete on disk
    reason: str  # interval, best, keep_at, stop, end
    stall_s: float | None = None  # of that, the time training was blocked; None: all of it
    write_s: float | None = None  # of that, the time to write the files


@dataclass(frozen=True, slots=True)
class NonFiniteStep(Event):
    kind: ClassVar[str] = "non_finite"
    step: int
    loss: float
    samples: tuple[int, ...]  # the step's indices into the training set
    action: str  # stop or skip


@dataclass(frozen=True, slots=True)
class BadImageSkipped(Event):
    """A file cannot be read or decoded and is skipped from now on; logged once per run."""

    kind: ClassVar[str] = "bad_image"
    step: int  # steps done before the file was needed
    split: str  # train or val
    index: int
    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class DataWait(Event):
    """How long training has waited for data in this attempt, and for which stage of the pipeline."""

    kind: ClassVar[str] = "data_wait"
    step: int  # steps done
    fraction: float  # of the time spent in steps
    seconds: Mapping[str, float]  # of all workers together, by stage: disk, decode, augment, copy
    bottleneck: str = ""  # the slowest stage; empty if training hardly waited
    advice: str = ""


@dataclass(frozen=True, slots=True)
class LogMessage(Event):
    """A message to the user: a fallback, an ignored file, a changed setting."""

    kind: ClassVar[str] = "message"
    level: str  # info or warning
    text: str
    step: int = 0


@dataclass(frozen=True, slots=True)
class ImageLogged(Event):
    """An image was written to the run directory, for the report."""

    kind: ClassVar[str] = "image"
    title: str
    path: str  # relative to the run directory
    captions: tuple[str, ...] = ()
    step: int = 0
    columns: int = 0  # 0: one image; else the columns of a grid of equal tiles, one caption per tile
    gap_px: int = 2  # between the tiles of a grid
    note: str = ""  # explains the image


@dataclass(frozen=True, slots=True)
class RunEnded(Event):
    """The process is about to exit in an orderly way."""

    kind: ClassVar[str] = "end"
    step: int
    exit_code: int
    reason: str  # finished, preempted, diverged, ...
    wall_s: float  # of this attempt
    images: int  # trained on in this attempt
    peak_memory_bytes: int
    train_s: float = 0.0  # of this attempt, spent in timed steps
    wait_s: float = 0.0  # of that, waiting for data
    timed_images: int | None = None  # trained on in train_s; None: all
    fields: Mapping[str, Any] = field(default_factory=dict)  # added to summary.json


_CLASSES: dict[str, type[Event]] = {
    cls.kind: cls
    for cls in (
        AttemptStarted,
        RunPlanned,
        TrainProgress,
        EvalFinished,
        ScalarLogged,
        CheckpointSaved,
        NonFiniteStep,
        BadImageSkipped,
        DataWait,
        LogMessage,
        ImageLogged,
        RunEnded,
    )
}
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(event: Event, *, ascii_only: bool = False) -> str:
    """The event as one line of strict JSON without the newline; non-finite numbers become strings.

    A file name that is not UTF-8 contains lone surrogates, which UTF-8 cannot encode: they are written as JSON escapes.
    """
    values = {f.name: getattr(event, f.name) for f in fields(event)}
    stamp = values.pop("time_s")
    record = {"kind": event.kind, **({} if stamp is None else {"time_s": stamp}), **values}
    line = json.dumps(_plain(record), allow_nan=False, ensure_ascii=ascii_only, separators=(",", ":"))
    return line.encode("utf-8", "backslashreplace").decode()


def decode(line: str) -> Event | None:
    """The event in a line, or None for a kind that this version does not know."""
    record = json.loads(line)
    cls = _CLASSES.get(record["kind"])
    if cls is None:
        return None
    readers = _READERS[cls.kind]
    return cls(**{name: readers[name](value) for name, value in record.items() if name in readers})


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _number(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def _numbers(value: Any) -> Any:
    return {key: _number(item) for key, item in value.items()}


def _same(value: Any) -> Any:
    return value


def _reader(hint: Any) -> Callable[[Any], Any]:
    if hint is float or float in typing.get_args(hint):
        return _numbers if typing.get_origin(hint) is Mapping else _number
    return tuple if typing.get_origin(hint) is tuple else _same


# For each field of each kind of event, the function from its JSON value to its value.
_READERS: dict[str, dict[str, Callable[[Any], Any]]] = {
    kind: {name: _reader(hint) for name, hint in typing.get_type_hints(cls).items() if name != "kind"}
    for kind, cls in _CLASSES.items()
}


class EventLog:
    """Appends events to a file, one write per line, so that a killed process damages at most the last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._end = self._repair()

    def write(self, event: Event) -> Event:
        """Append the event with the current time, and return it as written."""
        stamped = event if event.time_s is not None else replace(event, time_s=round(time.time(), 3))
        line = (encode(stamped) + "\n").encode()
        try:
            written = os.write(self._file, line)
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        if written != len(line):  # the disk is full
            os.ftruncate(self._file, self._end)
            raise OSError(28, os.strerror(28), str(self._path))
        self._end += len(line)
        if isinstance(event, AttemptStarted | CheckpointSaved | RunEnded):
            os.fsync(self._file)
        return stamped

    def close(self) -> None:
        """Flush to disk and close the file. Can be called twice."""
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _repair(self) -> int:
        """Remove a last line that a killed process left incomplete, and return the length of the file."""
        content = self._path.read_bytes()
        lines = content.splitlines(keepends=True)
        if not lines:
            return 0
        if not _is_record(lines[-1]):
            os.ftruncate(self._file, len(content) - len(lines[-1]))
            return len(content) - len(lines[-1])
        if not content.endswith(b"\n"):
            os.write(self._file, b"\n")
            return len(content) + 1
        return len(content)


def _is_record(line: bytes) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and "kind" in record


def read_events(path: Path) -> list[Event]:
    """The events of a file, without an incomplete last line and kinds of later versions."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise UsageError(
            "this is not a run directory", where=str(path), why="it has no events.jsonl", then="ls runs/*/*"
        ) from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    events = []
    for number, line in numbered:
        if number == numbered[-1][0] and not _is_record(line):
            break
        try:
            event = decode(line.decode())
        except TypeError as error:  # fields that are missing or unknown
            raise CheckpointError(
                "this version of Reconv cannot read the event log of this run",
                where=f"{path}:{number}",
                why="its fields are not those of this version: another version may have written it",
                then="read the run with the version that wrote it",
            ) from error
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                "the event log of this run is damaged",
                where=f"{path}:{number}",
                why=str(error),
                then=f"delete line {number} of the file",
            ) from error
        if event is not None:
            events.append(event)
    return events


def latest_by_step(events: Iterable[Event]) -> list[Event]:
    """The events that are still valid: a resume discards the steps after its own, and a step counts once.

    Messages and ends are kept; an image is replaced by the next one with its title.
    """
    kept: dict[tuple[Any, ...], Event] = {}
    for number, event in enumerate(events):
        if isinstance(event, AttemptStarted):
            discarded = [key for key, old in kept.items() if _step(old) > event.from_step]
            for key in discarded:
                del kept[key]
        key = _key(event, number)
        kept.pop(key, None)
        kept[key] = event
    return list(kept.values())


def _step(event: Event) -> int:
    if isinstance(event, BadImageSkipped) and event.split == "train":
        return event.step + 1  # the step that needed it
    return (
        event.step
        if isinstance(
            event,
            TrainProgress | EvalFinished | ScalarLogged | CheckpointSaved | NonFiniteStep | BadImageSkipped | DataWait,
        )
        else -1
    )


def _key(event: Event, number: int) -> tuple[Any, ...]:
    """A later event with the same key replaces an earlier one."""
    match event:
        case TrainProgress() | CheckpointSaved() | NonFiniteStep():
            return (event.kind, event.step)
        case EvalFinished():
            return (event.kind, event.step, event.weights)
        case ScalarLogged():
            return (event.kind, event.step, event.name)
        case BadImageSkipped():
            return (event.kind, event.split, event.index)
        case ImageLogged():
            return (event.kind, event.title)
        case RunPlanned() | DataWait():
            return (event.kind,)
        case _:
            return (event.kind, number)
