"""What a person sees while a run goes on: a live display on a terminal, plain lines elsewhere.

Owns the words and their layout on a terminal. Refuses to know the engine and the run folder's files: it is told
events. Invariant: what it shows is a function of the events; nothing it does changes the run, and a screen that is
gone (a closed pipe, a full disk) is given up while the run goes on.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from reconv.errors import ExitCode, UsageError
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
    TrainProgress,
    encode,
)

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.console import RenderableType
    from rich.live import Live


class EventHandler(Protocol):
    """Someone who is told everything that happens in a run."""

    def on_event(self, event: Event) -> None: ...
    def finish(self, summary: Mapping[str, Any]) -> None:
        """Say the result, once the run has ended and its report is written."""
        ...

    def close(self) -> None:
        """Give the terminal back; harmless when called twice."""
        ...


def make_console(mode: str, run_dir: Path | None = None, stream: TextIO | None = None) -> EventHandler:
    """The observer for a mode (auto, plain, quiet, json); `run_dir` is where the report will be."""
    if mode not in ("auto", "plain", "quiet", "json"):
        raise UsageError(f"there is no console mode {mode!r}", then="choose auto, plain, quiet or json")
    screen = stream or sys.stdout
    if screen is None:  # the process was started without one: >&-
        return FailSafeConsole(None)
    if isinstance(screen, io.TextIOWrapper):
        screen.reconfigure(errors="backslashreplace")  # it may take ASCII alone
    return FailSafeConsole(_observer(mode, run_dir, screen))


def _observer(mode: str, run_dir: Path | None, stream: TextIO) -> EventHandler:
    match mode:
        case "json":
            return JsonConsole(stream)
        case "quiet":
            return QuietConsole(stream, run_dir)
        case "auto" if stream.isatty() and os.environ.get("TERM") not in (None, "dumb"):
            return LiveConsole(stream, run_dir)
        case _:
            return PlainConsole(stream, run_dir)


class FailSafeConsole:
    """Passes everything on until the screen fails for the first time, and is silent from then on."""

    def __init__(self, screen: EventHandler | None) -> None:
        self._screen = screen

    def on_event(self, event: Event) -> None:
        self._tell(lambda screen: screen.on_event(event))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._tell(lambda screen: screen.finish(summary))

    def close(self) -> None:
        self._tell(lambda screen: screen.close())

    def _tell(self, say: Callable[[EventHandler], None]) -> None:
        if self._screen is None:
            return
        try:
            say(self._screen)
        except (OSError, ValueError):  # ValueError: the stream was closed
            lost, self._screen = self._screen, None
            with suppress(OSError, ValueError):
                lost.close()  # a live display has put itself in the place of sys.stdout


def final_lines(summary: Mapping[str, Any], run_dir: Path | None) -> list[str]:
    """The last thing said: the result, the report if it could be written, and how to go on if there is more to do."""
    result = fmt.result(summary)
    if summary["exit_code"] != ExitCode.OK:
        result = f"{fmt.state(summary)} at step {summary['steps']:,} of {summary['total_steps']:,}: {result}"
    elif summary.get("stopped_early"):
        result = f"ended early at step {summary['steps']:,} of {summary['total_steps']:,}: {result}"
    report = run_dir / summary["report"] if run_dir else None
    lines = [f"{result} · report: {report}" if report and report.exists() else result]
    if summary["resume_command"] and summary["exit_code"] != ExitCode.OK:
        lines.append(f"to go on: {summary['resume']}")
    return lines


class JsonConsole:
    """Every event, and at last the summary, as a JSON object a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def on_event(self, event: Event) -> None:
        print(encode(event, ascii_only=True), file=self._stream, flush=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        print(json.dumps({"kind": "summary", **summary}), file=self._stream, flush=True)

    def close(self) -> None:
        self._stream.flush()


class QuietConsole:
    """Nothing but the result."""

    def __init__(self, stream: TextIO, run_dir: Path | None) -> None:
        self._stream = stream
        self._run_dir = run_dir

    def on_event(self, event: Event) -> None:
        """Errors are told by whoever ends the process; nothing else is worth breaking the silence."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        for line in final_lines(summary, self._run_dir):
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        self._stream.flush()


class PlainConsole:
    """One line a log point, for files, pipes and terminals that cannot move their cursor."""

    def __init__(self, stream: TextIO, run_dir: Path | None) -> None:
        self._stream = stream
        self._told = ConsoleLines(run_dir)

    def on_event(self, event: Event) -> None:
        for line in self._told.lines(event):
            print(line, file=self._stream, flush=True)
        if isinstance(event, TrainProgress):
            print("  ".join(self._told.progress(event)), file=self._stream, flush=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        for line in final_lines(summary, self._told.run_dir):
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        self._stream.flush()


class LiveConsole:
    """A live display: what is past scrolls up, the state of the run stays below.

    It refreshes when told something and has no thread of its own, so a signal or a fork never meets one.
    """

    def __init__(self, stream: TextIO, run_dir: Path | None) -> None:
        from rich.console import Console

        class Screen(Console):
            def on_broken_pipe(self) -> None:
                raise BrokenPipeError  # rich would end the process

        self._console: RichConsole = Screen(file=stream, highlight=False)
        self._told = ConsoleLines(run_dir)
        self._live: Live | None = None

    def on_event(self, event: Event) -> None:
        from rich.text import Text

        style = _style(event)
        for line in self._told.lines(event):
            self._console.print(Text(line, style))  # a style given to print would colour the live part too
        if isinstance(event, TrainProgress):
            self._show(event)
        elif isinstance(event, RunEnded):
            self.close()

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.close()
        colour = {"met": "green", "finished": "green", "missed": "yellow"}.get(fmt.state(summary), "red")
        first, *rest = final_lines(summary, self._told.run_dir)
        self._console.print(first, style=f"bold {colour}", markup=False, soft_wrap=True)
        for line in rest:
            self._console.print(line, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, event: TrainProgress) -> None:
        from rich.live import Live

        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(self._status(event), refresh=True)

    def _status(self, event: TrainProgress) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        status = Table.grid(expand=True)
        status.add_row(ProgressBar(total=max(1, self._told.total_steps), completed=event.step))
        for line in _packed(self._told.progress(event), self._console.width):
            status.add_row(Text(line, no_wrap=True, overflow="ellipsis"))
        return status


def _packed(parts: Sequence[str], width: int) -> list[str]:
    """The parts in as few lines as they fit into, none broken in two."""
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]}  {part}" if lines[-1] else part
        lines = [*lines[:-1], longer] if len(longer) <= width or not lines[-1] else [*lines, part]
    return lines


def _style(event: Event) -> str:
    match event:
        case NonFiniteStep():
            return "bold red"
        case LogMessage(level="warning") | BadImageSkipped():
            return "yellow"
        case EvalFinished(best=True):
            return "bold"
        case CheckpointSaved():
            return "dim"
        case _:
            return ""


class ConsoleLines:
    """What the events have said so far, and the lines that follow from it."""

    def __init__(self, run_dir: Path | None) -> None:
        self.run_dir = run_dir
        self.total_steps = 0
        self._steps_per_epoch = 0.0
        self._bottleneck = ""

    @property
    def _epochs(self) -> str:
        """How many the run has."""
        return f"{round(self.total_steps / self._steps_per_epoch, 2) if self._steps_per_epoch else 0:g}"

    def progress(self, event: TrainProgress) -> list[str]:
        """The parts of a log point, each short."""
        metrics = [f"{fmt.metric_name(name)} {fmt.metric_text(name, v)}" for name, v in event.metrics.items()]
        note = f" ({event.metrics_note})" if metrics and event.metrics_note else ""
        return [
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

    def lines(self, event: Event) -> list[str]:
        """What an event adds to the lines that stay."""
        match event:
            case AttemptStarted():
                return self._attempt(event)
            case RunPlanned():
                return self._plan(event)
            case EvalFinished():
                return [self._evaluated(event)]
            case CheckpointSaved():
                where = f"{self.run_dir / event.path}" if self.run_dir else event.path
                return [f"saved {where} ({fmt.size(event.num_bytes)}, {event.reason})"]
            case NonFiniteStep():
                then = "stopping" if event.action == "stop" else "update skipped"
                return [f"step {event.step:,}: loss {fmt.number(event.loss)} or a gradient is not finite; {then}"]
            case BadImageSkipped():
                return [f"warning: left out an image ({event.split}): {event.path}: {event.why}"]
            case DataWait():
                return self._waited(event)
            case LogMessage():
                return [f"{event.level}: {event.text}" if event.level != "info" else event.text]
            case _:
                return []

    def _attempt(self, event: AttemptStarted) -> list[str]:
        device = event.environment.get("device", "this machine")
        going_on = f"attempt {event.attempt}, going on from step {event.from_step:,}, " if event.from_step else ""
        return [f"{going_on}on {device}"]

    def _plan(self, event: RunPlanned) -> list[str]:
        self.total_steps, self._steps_per_epoch = event.total_steps, event.steps_per_epoch
        length = f"{self._epochs} epochs, {event.total_steps:,} steps"
        size = f"{fmt.big(event.num_parameters)} parameters" if event.num_parameters else ""
        first = f"{event.recipe}: {', '.join(part for part in (event.task, event.model, size, length) if part)}"
        report = [f"report: {self.run_dir / 'report.html'}"] if self.run_dir else []
        return [first, *(f"  {line}" for line in event.lines), *report]

    def _waited(self, event: DataWait) -> list[str]:
        """Nothing where there is nothing to do about it, or where the same was said before."""
        before, self._bottleneck = self._bottleneck, event.bottleneck
        if event.bottleneck in ("", before):
            return []
        return [fmt.waiting(event.fraction, event.seconds, event.bottleneck, event.advice)]

    def _evaluated(self, event: EvalFinished) -> str:
        metrics = "  ".join(
            f"{fmt.metric_name(name)} {fmt.metric_text(name, event.metrics[name])}"
            for name in dict.fromkeys((*fmt.HEADLINES, *(event.metrics if len(event.metrics) < 5 else ())))
            if name in event.metrics
        )
        weights = "" if event.weights == "raw" else f" ({event.weights})"
        marks = ("  best" if event.best else "") + ("  (partial)" if event.partial else "")
        marks += f"  {fmt.without_bad(event.skipped)}" if event.skipped else ""
        return f"evaluated at epoch {event.epoch:.2f}{weights}: {metrics}{marks}"
