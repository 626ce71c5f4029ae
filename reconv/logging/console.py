"""Console output of a run: a live display on a terminal, plain lines elsewhere, JSON, or only the result.

Output is a function of the events. When the stream fails (a closed pipe, a full disk), output stops and the run
continues.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from reconv.core.errors import ExitCode, UsageError
from reconv.core.text import printable
from reconv.logging import formatting as fmt
from reconv.logging.console_lines import ConsoleLines
from reconv.logging.events import (
    BadImageSkipped,
    CheckpointSaved,
    EvalFinished,
    Event,
    LogMessage,
    NonFiniteStep,
    RunEnded,
    SlowRank,
    TrainProgress,
    WrongBits,
    encode,
)

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.console import RenderableType
    from rich.live import Live


_MIN_SECONDS = {TrainProgress.kind: 5.0, EvalFinished.kind: 1.0}  # between two lines of a log


class EventHandler(Protocol):
    """The interface of a console: receives every event of a run."""

    def on_event(self, event: Event) -> None: ...
    def finish(self, summary: Mapping[str, Any]) -> None:
        """Print the result; called when the run has ended and its report is written."""
        ...

    def close(self) -> None:
        """Restore the terminal. Can be called twice."""
        ...


def make_console(mode: str, run_dir: Path | None = None, stream: TextIO | None = None) -> EventHandler:
    """The console for a mode: auto, plan, plain, quiet or json. The report will be in `run_dir`.

    `plan` is auto with every line of the plan, of which the others print a screenful.
    """
    if mode not in ("auto", "plan", "plain", "quiet", "json"):
        raise UsageError(f"unknown console mode {mode!r}", hint="use auto, plan, plain, quiet or json")
    stream = stream or sys.stdout
    if stream is None:  # the process was started without stdout: >&-
        return FailSafeConsole(None)
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # its encoding may be ASCII
    return FailSafeConsole(_console_for(mode, run_dir, stream))


def _console_for(mode: str, run_dir: Path | None, stream: TextIO) -> EventHandler:
    match mode:
        case "json":
            return JsonConsole(stream)
        case "quiet":
            return QuietConsole(stream, run_dir)
        case "auto" | "plan" if stream.isatty() and os.environ.get("TERM") not in (None, "dumb"):
            return LiveConsole(stream, run_dir, whole_plan=mode == "plan")
        case _:
            return PlainConsole(stream, run_dir, whole_plan=mode == "plan")


class FailSafeConsole:
    """Forwards to a console until its stream fails, and is silent from then on."""

    def __init__(self, console: EventHandler | None) -> None:
        self._console = console

    def on_event(self, event: Event) -> None:
        self._forward(lambda console: console.on_event(event))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._forward(lambda console: console.finish(summary))

    def close(self) -> None:
        self._forward(lambda console: console.close())

    def _forward(self, call: Callable[[EventHandler], None]) -> None:
        if self._console is None:
            return
        try:
            call(self._console)
        except (OSError, ValueError):  # ValueError: the stream was closed
            failed, self._console = self._console, None
            with suppress(OSError, ValueError):
                failed.close()  # a live display has replaced sys.stdout


def final_lines(summary: Mapping[str, Any], run_dir: Path | None) -> list[str]:
    """The result, the path of the report if there is one, and the command to resume an unfinished run."""
    result = fmt.result(summary)
    if summary["exit_code"] != ExitCode.OK or summary["resume_command"]:
        result = f"{fmt.state(summary)} at step {summary['steps']:,} of {summary['total_steps']:,}: {result}"
    elif summary.get("stopped_early"):
        result = f"stopped early at step {summary['steps']:,} of {summary['total_steps']:,}: {result}"
    report = run_dir / summary["report"] if run_dir else None
    lines = [f"{result} · report: {report}" if report and report.exists() else result]
    if summary["resume_command"]:
        lines.append(f"to resume: {summary['resume_command']}")
    return [printable(line) for line in lines]


class JsonConsole:
    """Prints every event, and finally the summary, as one JSON object per line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def on_event(self, event: Event) -> None:
        print(encode(event, ascii_only=True), file=self._stream, flush=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        print(json.dumps({"kind": "summary", **summary}), file=self._stream, flush=True)

    def close(self) -> None:
        self._stream.flush()


class QuietConsole:
    """Prints only the result."""

    def __init__(self, stream: TextIO, run_dir: Path | None) -> None:
        self._stream = stream
        self._run_dir = run_dir

    def on_event(self, event: Event) -> None:
        """Print nothing; errors are printed where the process exits."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        for line in final_lines(summary, self._run_dir):
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        self._stream.flush()


class PlainConsole:
    """Prints one line per event, for files, pipes and terminals that cannot move the cursor.

    Of progress and evaluations that follow each other within seconds only some are printed: a short run has a short
    log. All of them are in the run's CSV files.
    """

    def __init__(self, stream: TextIO, run_dir: Path | None, *, whole_plan: bool = False) -> None:
        self._stream = stream
        self._lines = ConsoleLines(run_dir, whole_plan=whole_plan)
        self._printed_s: dict[str, float] = {}  # when a line of this kind was printed last

    def on_event(self, event: Event) -> None:
        lines = self._lines.lines(event)
        if isinstance(event, TrainProgress):
            lines.append("  ".join(self._lines.progress(event)))
        if lines and not self._is_too_soon(event):
            for line in lines:
                print(line, file=self._stream, flush=True)

    def _is_too_soon(self, event: Event) -> bool:
        """True if a routine line was printed a moment ago."""
        if not isinstance(event, TrainProgress | EvalFinished) or event.time_s is None:
            return False
        if event.step == self._lines.total_steps:
            return False
        if event.time_s - self._printed_s.get(event.kind, -math.inf) < _MIN_SECONDS[event.kind]:
            return True
        self._printed_s[event.kind] = event.time_s
        return False

    def finish(self, summary: Mapping[str, Any]) -> None:
        for line in final_lines(summary, self._lines.run_dir):
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        self._stream.flush()


class LiveConsole:
    """A live display: events scroll up, the progress bar and current metrics stay below.

    It refreshes with events and has no thread, which signals and forks could disturb.
    """

    def __init__(self, stream: TextIO, run_dir: Path | None, *, whole_plan: bool = False) -> None:
        from rich.console import Console

        class Screen(Console):
            def on_broken_pipe(self) -> None:
                raise BrokenPipeError  # rich would exit the process

        self._console: RichConsole = Screen(file=stream, highlight=False)
        self._lines = ConsoleLines(run_dir, whole_plan=whole_plan)
        self._live: Live | None = None

    def on_event(self, event: Event) -> None:
        from rich.text import Text

        style = _style(event)
        for line in self._lines.lines(event):
            self._console.print(Text(line, style))  # a style passed to print would color the live part too
        if isinstance(event, TrainProgress):
            self._show(event)
        elif isinstance(event, RunEnded):
            self.close()

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.close()
        color = {"met": "green", "finished": "green", "missed": "yellow"}.get(fmt.state(summary), "red")
        first, *rest = final_lines(summary, self._lines.run_dir)
        self._console.print(first, style=f"bold {color}", markup=False, soft_wrap=True)
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
        status.add_row(ProgressBar(total=max(1, self._lines.total_steps), completed=event.step))
        for line in _packed(self._lines.progress(event), self._console.width):
            status.add_row(Text(line, no_wrap=True, overflow="ellipsis"))
        return status


def _packed(parts: Sequence[str], width: int) -> list[str]:
    """The parts in as few lines as possible, without breaking a part."""
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]}  {part}" if lines[-1] else part
        lines = [*lines[:-1], longer] if len(longer) <= width or not lines[-1] else [*lines, part]
    return lines


def _style(event: Event) -> str:
    match event:
        case NonFiniteStep() | WrongBits():
            return "bold red"
        case LogMessage(level="warning") | BadImageSkipped() | SlowRank():
            return "yellow"
        case EvalFinished(best=True):
            return "bold"
        case CheckpointSaved():
            return "dim"
        case _:
            return ""
