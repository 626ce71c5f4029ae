"""Where a run's events go: the record, the screen and other observers from rank 0; a log of its own from every rank.

Owns who is told. Refuses to know what the events say. Invariant: one process alone writes the record and has the
screen.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from reconv.checkpoint.run_dir import RunDir
from reconv.distributed.process_group import ProcessGroup
from reconv.logging.console import EventHandler, make_console
from reconv.logging.events import Event, EventLog
from reconv.logging.exporters import ExporterSet
from reconv.recipe.schema import Recipe
from reconv.report.summary import read_summary
from reconv.trainer.protocols import Emit


def open_run_logger(
    stack: ExitStack,
    folder: RunDir,
    recipe: Recipe,
    process_group: ProcessGroup,
    console: str | None,
    on_event: Callable[[Event], None] | None,
) -> Emit:
    """The function that every event of this process goes through, until the stack is unwound."""
    observers: list[Callable[[Event], None]] = []
    if process_group.size > 1:
        observers.append(_rank_log(stack, folder, process_group.rank).on_event)
    if not process_group.is_rank0:
        return _to_all(observers)
    log = stack.enter_context(EventLog(folder.events))
    if on_event is not None:
        observers.append(on_event)
    if console is not None:
        screen = make_console(console, folder.path)
        stack.callback(_say_result, screen, folder)
        observers.append(screen.on_event)
    tell = _to_all(observers)

    def emit(event: Event) -> None:
        tell(log.write(event))

    records = ExporterSet(recipe, folder.path, emit)
    stack.callback(records.close)
    observers.append(records.on_event)
    return emit


def _to_all(observers: list[Callable[[Event], None]]) -> Emit:
    def tell(event: Event) -> None:
        for observe in observers:
            observe(event)

    return tell


def _rank_log(stack: ExitStack, folder: RunDir, rank: int) -> EventHandler:
    """The plain lines of one process, appended to its own file."""
    folder.logs.mkdir(parents=True, exist_ok=True)
    file = stack.enter_context((folder.logs / f"rank-{rank}.log").open("a", encoding="utf-8"))
    return make_console("plain", folder.path, file)


def _say_result(screen: EventHandler, folder: RunDir) -> None:
    """Give the terminal back with the result on it, however the run ended."""
    screen.close()
    if folder.summary.exists():
        screen.finish(read_summary(folder.path))
