"""Typed events of a run, and each as one line of JSON."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from reconv.logging.json_lines import (
    encodable,
    field_readers,
    parse_record,
)
from reconv.storage.bounded import real_path


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
    environment: Mapping[str, Any]  # versions, device, host, threads


@dataclass(frozen=True, slots=True)
class DataFingerprint(Event):
    """Digests of the datasets; an event of its own, as hashing may take longer than the start of an attempt."""

    kind: ClassVar[str] = "data_fingerprint"
    train: str
    val: str


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
    few_val_images: Mapping[str, int] = field(default_factory=dict)  # of classes with fewer than 10 of them


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
    confidence: Mapping[str, Any] = field(default_factory=dict)  # the calibration, where it was fitted


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
    replaced: tuple[int, ...] = ()  # steps whose checkpoints were due while another one was being written


@dataclass(frozen=True, slots=True)
class NonFiniteStep(Event):
    kind: ClassVar[str] = "non_finite"
    step: int
    loss: float
    samples: tuple[int, ...]  # the step's indices into the training set
    action: str  # stop or skip


@dataclass(frozen=True, slots=True)
class WrongBits(Event):
    """`engine.verify` has found bits that hardware got wrong; the run goes back to an earlier state."""

    kind: ClassVar[str] = "wrong_bits"
    step: int  # steps done before
    rank: int
    tensor: str
    how: str  # at rest, replay, other rank, ranks, image or checkpoint
    to_step: int  # the steps that are still valid


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
    """Seconds that training has waited for data in this attempt, by stage of the pipeline."""

    kind: ClassVar[str] = "data_wait"
    step: int  # steps done
    fraction: float  # of the time spent in steps
    seconds: Mapping[str, float]  # of all workers together, by stage: disk, decode, augment, copy
    bottleneck: str = ""  # the slowest stage; empty if training hardly waited
    advice: str = ""


@dataclass(frozen=True, slots=True)
class SlowRank(Event):
    """A rank that all others wait for: for 20 seconds it has needed much more time for itself than the median rank."""

    kind: ClassVar[str] = "slow_rank"
    step: int  # steps done
    rank: int
    host: str
    wait_s: float  # per step, for its data
    forward_s: float  # per step; 0 where steps are captured as CUDA graphs
    median_s: float  # of all ranks: both together
    step_s: float


@dataclass(frozen=True, slots=True)
class LogMessage(Event):
    """A message to the user: a fallback, an ignored file, a changed setting."""

    kind: ClassVar[str] = "message"
    level: str  # info or warning
    text: str
    step: int = 0


IMAGE_FORMATS = ("PNG", "JPEG")  # of images of a run; for others Pillow may start programs (Ghostscript for EPS)


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
    classes: tuple[str, ...] = ()  # the class of each tile, to filter them by

    def file(self, run_dir: Path) -> Path:
        """The image file; raises FileNotFoundError if there is none inside the run directory."""
        path = real_path(run_dir / self.path)
        if not path.is_relative_to(real_path(run_dir)) or not path.is_file():
            raise FileNotFoundError(errno.ENOENT, "no such image in the run directory", self.path)
        return path


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
    startup_s: float | None = None  # from the start of the process to the end of the first step
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds since the start of the process, by phase


_CLASSES: dict[str, type[Event]] = {
    cls.kind: cls
    for cls in (
        AttemptStarted,
        DataFingerprint,
        RunPlanned,
        TrainProgress,
        EvalFinished,
        ScalarLogged,
        CheckpointSaved,
        NonFiniteStep,
        WrongBits,
        BadImageSkipped,
        DataWait,
        SlowRank,
        LogMessage,
        ImageLogged,
        RunEnded,
    )
}
_READERS = {kind: field_readers(cls) for kind, cls in _CLASSES.items()}


def encode(event: Event, *, ascii_only: bool = False) -> str:
    """The event as one line of strict JSON without the newline; non-finite numbers become strings.

    A file name that is not UTF-8 contains lone surrogates, which UTF-8 cannot encode: they are written as JSON escapes.
    """
    values = {f.name: getattr(event, f.name) for f in fields(event)}
    stamp = values.pop("time_s")
    record = {"kind": event.kind, **({} if stamp is None else {"time_s": stamp}), **values}
    line = json.dumps(encodable(record), allow_nan=False, ensure_ascii=ascii_only, separators=(",", ":"))
    return line.encode("utf-8", "backslashreplace").decode()


def decode(line: str) -> Event | None:
    """The event in a line, or None for a kind that this version does not know."""
    return event_of(parse_record(line.encode()))


def event_of(record: Mapping[str, Any]) -> Event | None:
    """The event of a record; raises ValueError where a field is missing or of another type."""
    kind = record.get("kind")
    if not isinstance(kind, str):
        raise ValueError("an event has no kind")
    cls = _CLASSES.get(kind)
    if cls is None:
        return None
    readers = _READERS[cls.kind]
    values = {name: readers[name](value) for name, value in record.items() if name in readers}
    try:
        return cls(**values)
    except TypeError as error:
        raise ValueError(str(error)) from error
