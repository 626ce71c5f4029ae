"""The record of a run: typed events, one JSON object a line, appended and never changed.

Owns the vocabulary, the writer and the reader. Refuses to know who looks. Invariant: every file that can be written
can be read back, a torn last line is ignored, and a step logged twice counts as its last attempt.
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
    """Something that happened in a run; `kind` names it in the file."""

    kind: ClassVar[str] = ""
    # Unix seconds, stamped by the log. Left out of comparisons: two equal runs differ in nothing else.
    time_s: float | None = field(default=None, kw_only=True, compare=False)


@dataclass(frozen=True, slots=True)
class AttemptStarted(Event):
    """A start of the process: the first, or a resume."""

    kind: ClassVar[str] = "attempt"
    attempt: int
    from_step: int  # 0: from the beginning
    command: tuple[str, ...]
    environment: Mapping[str, Any]  # versions, device, host, threads, data fingerprint


@dataclass(frozen=True, slots=True)
class RunPlanned(Event):
    kind: ClassVar[str] = "plan"
    recipe: str
    task: str
    total_steps: int
    steps_per_epoch: float
    global_batch_size: int
    lines: tuple[str, ...]
    num_parameters: int = 0  # 0: not told
    model: str = ""
    num_devices: int = 1


@dataclass(frozen=True, slots=True)
class TrainProgress(Event):
    """A log point: sums since the last one, as means."""

    kind: ClassVar[str] = "progress"
    step: int  # steps done
    epoch: float
    loss: float
    lr: float
    metrics: Mapping[str, float]  # train metrics of the interval, e.g. top1; labelled when mixing
    metrics_note: str  # "" or "on mixed images"
    grad_norm: float
    images_per_s: float | None  # all in; None while warming up
    compute_images_per_s: float | None  # loader waits left out
    data_wait_fraction: float
    memory_bytes: int
    eta_s: float | None
    loss_scale: float | None = None


@dataclass(frozen=True, slots=True)
class EvalFinished(Event):
    kind: ClassVar[str] = "eval"
    step: int
    epoch: float
    weights: str  # raw or ema
    metrics: Mapping[str, float]  # fractions; loss too
    num_samples: int
    wall_s: float
    best: bool
    partial: bool = False
    skipped: int = 0  # images that could not be read and are in none of the metrics


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Event):
    kind: ClassVar[str] = "checkpoint"
    step: int
    path: str  # relative to the run folder
    num_bytes: int
    wall_s: float  # from its beginning until it was whole on the disk
    reason: str  # interval, best, pinned, stop, end
    stall_s: float | None = None  # of that, training stood still: copying, and waiting for the disk; None: all of it
    write_s: float | None = None  # of that, after the copy


@dataclass(frozen=True, slots=True)
class NonFiniteStep(Event):
    kind: ClassVar[str] = "non_finite"
    step: int
    loss: float
    samples: tuple[int, ...]  # indices of the step's samples in the training set
    action: str  # stop or skip


@dataclass(frozen=True, slots=True)
class BadImageSkipped(Event):
    """A file that cannot be read or decoded and is left out from here on; told once a run."""

    kind: ClassVar[str] = "bad_image"
    step: int  # steps done before it was needed
    split: str  # train or val
    index: int
    path: str
    why: str


@dataclass(frozen=True, slots=True)
class DataWait(Event):
    """How long training has waited for data in this attempt, and what it waited for."""

    kind: ClassVar[str] = "data_wait"
    step: int  # steps done
    fraction: float  # of the time spent in steps
    seconds: Mapping[str, float]  # of all workers together, by stage: disk, decode, augment, copy
    bottleneck: str = ""  # a stage; empty where there was no waiting to speak of
    advice: str = ""


@dataclass(frozen=True, slots=True)
class LogMessage(Event):
    """Something a person should know: a fallback, an ignored file, a changed setting."""

    kind: ClassVar[str] = "message"
    level: str  # info or warning
    text: str
    step: int = 0


@dataclass(frozen=True, slots=True)
class ImageLogged(Event):
    """An image in the run folder, for the report."""

    kind: ClassVar[str] = "image"
    title: str
    path: str  # relative to the run folder
    captions: tuple[str, ...] = ()
    step: int = 0
    columns: int = 0  # 0: one image; else a sheet of equal tiles, this many in a row, one caption a tile
    gap_px: int = 2  # between the tiles of a sheet
    note: str = ""  # how to read it


@dataclass(frozen=True, slots=True)
class RunEnded(Event):
    """The process is about to end, on purpose."""

    kind: ClassVar[str] = "end"
    step: int
    exit_code: int
    reason: str  # finished, preempted, diverged, ...
    wall_s: float  # of this attempt
    images: int  # trained on in this attempt
    peak_memory_bytes: int
    train_s: float = 0.0  # spent in steps, of this attempt
    wait_s: float = 0.0  # of that, waiting for data
    timed_images: int | None = None  # trained on in train_s, where the first steps are left out; None: all
    fields: Mapping[str, Any] = field(default_factory=dict)


_CLASSES: dict[str, type[Event]] = {
    cls.kind: cls
    for cls in (
        AttemptStarted,
        RunPlanned,
        TrainProgress,
        EvalFinished,
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
    """The event as one line of strict JSON, without the newline; non-finite numbers become words.

    A file name that is not UTF-8 holds lone surrogates, which no UTF-8 file takes: they are written as JSON escapes.
    """
    values = {f.name: getattr(event, f.name) for f in fields(event)}
    stamp = values.pop("time_s")
    record = {"kind": event.kind, **({} if stamp is None else {"time_s": stamp}), **values}
    line = json.dumps(_plain(record), allow_nan=False, ensure_ascii=ascii_only, separators=(",", ":"))
    return line.encode("utf-8", "backslashreplace").decode()


def decode(line: str) -> Event | None:
    """The event of a line, or None for a kind that this version does not know."""
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


# For each field of each kind of event, what turns its JSON value back into the field's type.
_READERS: dict[str, dict[str, Callable[[Any], Any]]] = {
    kind: {name: _reader(hint) for name, hint in typing.get_type_hints(cls).items() if name != "kind"}
    for kind, cls in _CLASSES.items()
}


class EventLog:
    """Appends events to a file, one write a line, so that a killed process tears at most the last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._end = self._mend()

    def write(self, event: Event) -> Event:
        """Append the event, stamped with the time, and return it as written."""
        stamped = event if event.time_s is not None else replace(event, time_s=round(time.time(), 3))
        line = (encode(stamped) + "\n").encode()
        try:
            written = os.write(self._file, line)
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        if written != len(line):  # a disk that filled up in the middle of the line
            os.ftruncate(self._file, self._end)
            raise OSError(28, os.strerror(28), str(self._path))
        self._end += len(line)
        if isinstance(event, AttemptStarted | CheckpointSaved | RunEnded):
            os.fsync(self._file)
        return stamped

    def close(self) -> None:
        """Flush to the disk and close the file; harmless when closed already."""
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

    def _mend(self) -> int:
        """Cut off a last line that a killed process left torn, and return the length of the file."""
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
    """Every event of a file in the order written; a torn last line and kinds of later versions are left out."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise UsageError(
            "there is no record of a run here", where=str(path), why="this is not a run folder", then="ls runs/*/*"
        ) from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    events = []
    for number, line in numbered:
        if number == numbered[-1][0] and not _is_record(line):
            break
        try:
            event = decode(line.decode())
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                "the record of this run is damaged",
                where=f"{path}:{number}",
                why=str(error),
                then=f"delete line {number} of the file",
            ) from error
        if event is not None:
            events.append(event)
    return events


def latest_by_step(events: Iterable[Event]) -> list[Event]:
    """The events that still hold: a resume undoes the steps after its own, and a step told twice counts once.

    Notes and ends are history and stay; an image stays until another of its title comes.
    """
    kept: dict[tuple[Any, ...], Event] = {}
    for number, event in enumerate(events):
        if isinstance(event, AttemptStarted):
            undone = [key for key, old in kept.items() if _step(old) > event.from_step]
            for key in undone:
                del kept[key]
        name = _name(event, number)
        kept.pop(name, None)
        kept[name] = event
    return list(kept.values())


def _step(event: Event) -> int:
    if isinstance(event, BadImageSkipped) and event.split == "train":
        return event.step + 1  # it was met in the step after
    return (
        event.step
        if isinstance(
            event, TrainProgress | EvalFinished | CheckpointSaved | NonFiniteStep | BadImageSkipped | DataWait
        )
        else -1
    )


def _name(event: Event, number: int) -> tuple[Any, ...]:
    """What an event is about: a later one about the same thing replaces it."""
    match event:
        case TrainProgress() | CheckpointSaved() | NonFiniteStep():
            return (event.kind, event.step)
        case EvalFinished():
            return (event.kind, event.step, event.weights)
        case BadImageSkipped():
            return (event.kind, event.split, event.index)
        case ImageLogged():
            return (event.kind, event.title)
        case RunPlanned() | DataWait():
            return (event.kind,)
        case _:
            return (event.kind, number)
