"""The record of a run: typed events, one JSON object a line, appended and never changed.

Owns the vocabulary, the writer and the reader. Refuses to know who looks. Invariant: every file that can be written
can be read back, a torn last line is ignored, and a step logged twice counts as its last attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a run; `kind` names it in the file."""

    kind: ClassVar[str] = ""


@dataclass(frozen=True, slots=True)
class Attempt(Event):
    """A start of the process: the first, or a resume."""

    kind: ClassVar[str] = "attempt"
    attempt: int
    from_step: int  # 0: from the beginning
    command: tuple[str, ...]
    environment: Mapping[str, Any]  # versions, device, host, threads, data fingerprint


@dataclass(frozen=True, slots=True)
class Planned(Event):
    kind: ClassVar[str] = "plan"
    recipe: str
    task: str
    total_steps: int
    steps_per_epoch: float
    global_batch: int
    lines: tuple[str, ...]
    parameters: int


@dataclass(frozen=True, slots=True)
class Progress(Event):
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
class Evaluated(Event):
    kind: ClassVar[str] = "eval"
    step: int
    epoch: float
    weights: str  # raw or ema
    metrics: Mapping[str, float]  # fractions; loss too
    num_samples: int
    wall_s: float
    best: bool
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Saved(Event):
    kind: ClassVar[str] = "save"
    step: int
    path: str  # relative to the run folder
    num_bytes: int
    wall_s: float
    reason: str  # interval, best, pinned, stop, end


@dataclass(frozen=True, slots=True)
class NonFiniteStep(Event):
    kind: ClassVar[str] = "nonfinite"
    step: int
    loss: float
    samples: tuple[int, ...]  # indices of the step's samples in the training set
    action: str  # stop or skip


@dataclass(frozen=True, slots=True)
class Noted(Event):
    """Something a person should know: a fallback, an ignored file, a changed setting."""

    kind: ClassVar[str] = "note"
    level: str  # info or warning
    text: str
    step: int = 0


@dataclass(frozen=True, slots=True)
class Pictured(Event):
    """A picture in the run folder, for the report."""

    kind: ClassVar[str] = "picture"
    title: str
    path: str  # relative to the run folder
    captions: tuple[str, ...] = ()
    step: int = 0


@dataclass(frozen=True, slots=True)
class Ended(Event):
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
    fields: Mapping[str, Any] = field(default_factory=dict)
