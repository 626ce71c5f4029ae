"""Events of a run as lines of text for the console: one per evaluation, and repeated warnings folded."""

from __future__ import annotations

import re
from pathlib import Path

from reconv.core.text import printable
from reconv.logging import formatting as fmt
from reconv.logging.events import (
    AttemptStarted,
    BadImageSkipped,
    CheckpointSaved,
    DataWait,
    EvalFinished,
    Event,
    LogMessage,
    NonFiniteStep,
    RunEnded,
    RunPlanned,
    SlowRank,
    TrainProgress,
    WrongBits,
)

MAX_ALIKE = 3  # warnings of a kind that are printed; the others are counted
MAX_PLAN_LINES = 20  # with what is around them, a screen of 24 lines
MAX_CLASSES_WITHOUT_TOP5 = 10  # with so few classes, top-5 says little
_ROUTINE_SAVES = ("interval", "best")


class ConsoleLines:
    """Formats events as lines of text, with the state of earlier events that they need."""

    def __init__(self, run_dir: Path | None, *, whole_plan: bool = False) -> None:
        self.run_dir = run_dir
        self._whole_plan = whole_plan
        self.total_steps = 0
        self._steps_per_epoch = 0.0
        self._bottleneck = ""
        self._num_classes = 0
        self._monitored_weights = "raw"
        self._raw: EvalFinished | None = None  # waits for that of the EMA weights, to be on the same line
        self._has_saved = False
        self._num_alike: dict[str, int] = {}  # warnings so far, by kind

    @property
    def _epochs(self) -> str:
        return f"{round(self.total_steps / self._steps_per_epoch, 2) if self._steps_per_epoch else 0:g}"

    def progress(self, event: TrainProgress) -> list[str]:
        """The short parts of a progress line."""
        metrics = [f"{fmt.metric_name(name)} {fmt.metric_text(name, v)}" for name, v in event.metrics.items()]
        note = f" ({event.metrics_note})" if metrics and event.metrics_note else ""
        parts = [
            f"epoch {event.epoch:.2f}/{self._epochs}",
            f"step {event.step:,}/{self.total_steps:,}",
            f"loss {fmt.number(event.loss)}",
            *metrics[:-1],
            *(part + note for part in metrics[-1:]),
            f"lr {fmt.number(event.lr)}",
            f"{fmt.rate(event.images_per_s)} images/s",
            f"data wait {fmt.percent(event.data_wait_fraction, 0)}",
            f"memory {fmt.size(event.memory_bytes)}",
            f"ETA {fmt.clock_time(event.eta_s)}",
        ]
        return [printable(part) for part in parts]

    def lines(self, event: Event) -> list[str]:
        """The lines that an event adds above the progress line, printable."""
        return [printable(line) for line in self._all_lines(event)]

    def _all_lines(self, event: Event) -> list[str]:
        raw, self._raw = self._raw, None
        if isinstance(event, EvalFinished):
            return self._evaluation(event, raw)
        waiting = [] if raw is None else [self._evaluated(raw)]
        return [*waiting, *self._lines(event)]

    def _lines(self, event: Event) -> list[str]:
        match event:
            case AttemptStarted():
                return self._attempt(event)
            case RunPlanned():
                return self._plan(event)
            case CheckpointSaved():
                return self._saved(event)
            case NonFiniteStep():
                hint = "stopping" if event.action == "stop" else "update skipped"
                text = f"step {event.step:,}: non-finite loss or gradient (loss {fmt.number(event.loss)}); {hint}"
                return [text] if event.action == "stop" else self._fold("non-finite steps", text)
            case WrongBits():
                went_back = f"; going back to step {event.to_step:,}" if event.to_step < event.step else ""
                return [
                    f"step {event.step:,}: wrong bits on rank {event.rank} in {event.tensor} ({event.how}){went_back}"
                ]
            case BadImageSkipped():
                text = f"warning: skipped a bad {event.split} image: {event.path}: {event.reason}"
                return self._fold("bad images", text)
            case SlowRank():
                return [f"warning: {fmt.slow_rank(event)}"]
            case DataWait():
                return self._data_wait(event)
            case LogMessage(level="info"):
                return [event.text]
            case LogMessage():
                kind = re.sub(r"\d+", "0", event.text)  # the same warning about another step or number
                return self._fold(f"warnings: {kind}", f"{event.level}: {event.text}")
            case RunEnded():
                return self._folded()
            case _:
                return []

    def _attempt(self, event: AttemptStarted) -> list[str]:
        device = event.environment.get("device", "this machine")
        if event.from_step:
            return [f"attempt {event.attempt}: resuming from step {event.from_step:,} on {device}"]
        return [f"training on {device}"]

    def _plan(self, event: RunPlanned) -> list[str]:
        self.total_steps, self._steps_per_epoch = event.total_steps, event.steps_per_epoch
        self._num_classes, self._monitored_weights = event.num_classes, event.monitored_weights
        epochs = "epoch" if self._epochs == "1" else "epochs"
        length = f"{self._epochs} {epochs}, {event.total_steps:,} step{'s' * (event.total_steps != 1)}"
        size = f"{fmt.parameters(event.num_parameters, event.num_trained)}" if event.num_parameters else ""
        shown = (
            event.lines if self._whole_plan or len(event.lines) <= MAX_PLAN_LINES else event.lines[: MAX_PLAN_LINES - 1]
        )
        hidden = len(event.lines) - len(shown)
        more = [f"  {hidden} more lines: --plan prints them, the report has them"] if hidden else []
        first = f"{event.recipe}: {', '.join(part for part in (event.task, event.model, size, length) if part)}"
        report = [f"report: {self.run_dir / 'report.html'}"] if self.run_dir else []
        return [first, *(f"  {line}" for line in shown), *more, *report]

    def _data_wait(self, event: DataWait) -> list[str]:
        """Nothing if there is no bottleneck, or the same as before."""
        before, self._bottleneck = self._bottleneck, event.bottleneck
        if event.bottleneck in ("", before):
            return []
        return [fmt.data_wait(event.fraction, event.seconds, event.bottleneck, event.advice)]

    def _saved(self, event: CheckpointSaved) -> list[str]:
        """The first checkpoint, and later those with a reason of their own."""
        is_routine, self._has_saved = self._has_saved and event.reason in _ROUTINE_SAVES, True
        where = f"{self.run_dir / event.path}" if self.run_dir else event.path
        return [] if is_routine else [f"saved {where} ({fmt.size(event.num_bytes)}, {event.reason})"]

    def _fold(self, kind: str, text: str) -> list[str]:
        """The first few lines of a kind; the others are counted."""
        number = self._num_alike[kind] = self._num_alike.get(kind, 0) + 1
        if number > MAX_ALIKE:
            return []
        is_last = number == MAX_ALIKE
        return [text, "warning: more like this are counted, and listed in the report"] if is_last else [text]

    def _folded(self) -> list[str]:
        """Note on the number of lines of each kind that were not printed."""
        hidden = {kind: number - MAX_ALIKE for kind, number in self._num_alike.items() if number > MAX_ALIKE}
        return [f"not printed: {number:,} more {kind}" for kind, number in hidden.items()]

    def _evaluation(self, event: EvalFinished, raw: EvalFinished | None) -> list[str]:
        """One line for all weights of an evaluation; that of the raw ones is printed with that of the EMA weights."""
        if event.weights == "raw" and self._monitored_weights == "ema":
            self._raw = event
            return [] if raw is None else [self._evaluated(raw)]
        if raw is not None and raw.step != event.step:
            return [self._evaluated(raw), self._evaluated(event)]
        return [self._evaluated(event, raw)]

    def _evaluated(self, event: EvalFinished, raw: EvalFinished | None = None) -> str:
        text = self._metrics(event)
        if raw is not None:
            text = f"{text} (EMA), {self._metrics(raw)} (raw)"
        elif event.weights != "raw":
            text = f"{text} ({'EMA' if event.weights == 'ema' else event.weights})"
        remarks = ("  best" if event.best else "") + ("  (partial)" if event.partial else "")
        remarks += f"  {fmt.without_bad(event.skipped)}" if event.skipped else ""
        return f"validation at epoch {event.epoch:.2f}: {text}{remarks}"

    def _metrics(self, event: EvalFinished) -> str:
        has_few_classes = 0 < self._num_classes <= MAX_CLASSES_WITHOUT_TOP5
        names = [name for name in fmt.shown_metrics(event.metrics) if not (name == "top5" and has_few_classes)]
        return "  ".join(f"{fmt.metric_name(name)} {fmt.metric_text(name, event.metrics[name])}" for name in names)
