"""The logger of a run: events go to `events.jsonl`, the console, the exporters and any other observer.

Events that cannot be written set `RunLogger.failure`; the loop saves after the step and then raises it
(tests/faults/test_refused_writes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from reconv.logging.console import EventHandler, FailSafeConsole, PlainConsole, make_console
from reconv.logging.event_log import EventLog
from reconv.logging.events import Event, LogMessage
from reconv.logging.exporters import ExporterSet
from reconv.logging.run_dir import RunDir, read_summary
from reconv.recipe.schema import Recipe
from reconv.storage.files import disk_error


class RunLogger:
    """Passes every event of a run to its observers; a logger without observers discards them.

    With an event log, events are written there first and observers get them with their timestamp. A log that cannot be
    written is no reason to stop in the middle of a step: `failure` keeps the error, for those who can save first.
    """

    def __init__(self, *observers: Callable[[Event], None], event_log: EventLog | None = None) -> None:
        self._observers = list(observers)
        self._event_log = event_log
        self.failure: OSError | None = None  # the first error of the event log

    def subscribe(self, observer: Callable[[Event], None]) -> None:
        """Call `observer` with every event from now on, after the observers that are already there."""
        self._observers.append(observer)

    def log(self, event: Event) -> None:
        if self._event_log is not None:
            try:
                event = self._event_log.write(event)
            except OSError as error:
                self.failure = self.failure or error
        for observer in self._observers:
            observer(event)

    def check(self) -> None:
        """Raise the error of the event log, if there was one."""
        if self.failure is not None:
            raise disk_error(Path(self.failure.filename), self.failure) from self.failure

    def info(self, text: str, step: int = 0) -> None:
        self.log(LogMessage("info", text, step))

    def warning(self, text: str, step: int = 0) -> None:
        self.log(LogMessage("warning", text, step))


@contextmanager
def open_run_logger(
    run_dir: RunDir,
    recipe: Recipe,
    *,
    rank: int = 0,
    world_size: int = 1,
    console: str | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Iterator[RunLogger]:
    """The logger of one process of a run.

    Rank 0 alone writes `events.jsonl`, the console and the exporters. With several processes, each also appends
    plain lines to `logs/rank-N.log`.
    """
    with ExitStack() as stack:
        observers = [_open_rank_log(stack, run_dir, rank).on_event] if world_size > 1 else []
        if rank > 0:
            yield RunLogger(*observers)
            return
        logger = RunLogger(*observers, event_log=stack.enter_context(EventLog(run_dir.events)))
        if on_event is not None:
            logger.subscribe(on_event)
        if console is not None:
            handler = make_console(console, run_dir.path)
            stack.callback(_finish_console, handler, run_dir)
            logger.subscribe(handler.on_event)
        exporters = ExporterSet(recipe, run_dir.path, logger.warning)
        stack.callback(exporters.close)
        logger.subscribe(exporters.on_event)
        yield logger


def _open_rank_log(stack: ExitStack, run_dir: RunDir, rank: int) -> EventHandler:
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    file = stack.enter_context((run_dir.logs / f"rank-{rank}.log").open("a", encoding="utf-8"))
    return FailSafeConsole(PlainConsole(file, run_dir.path, whole_plan=True))


def _finish_console(handler: EventHandler, run_dir: RunDir) -> None:
    """Restore the terminal, then print the result if there is one."""
    handler.close()
    if run_dir.summary.exists():
        handler.finish(read_summary(run_dir.path))
