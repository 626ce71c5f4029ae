"""`events.jsonl`: one event with a checksum per line, append-only.

A line cut short by a crash is ignored. A line that is damaged, or that this version cannot read, is left out and its
number kept: reading raises no error. A step that was logged by two attempts counts as the later one has it.

Every start writes an attempt, and readers keep the last attempt of each step. Lines that are left out are named in a
warning, the report and `summary.json` (`unverified_lines`); no content of the file ends a training or a report, and
an incomplete last line is removed at the next start (tests/faults/test_malicious_inputs.py).
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from reconv.core.errors import CheckpointError, UnreadableRunError, UsageError
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
    WrongBits,
    encode,
    event_of,
)
from reconv.logging.json_lines import (
    CHECKSUM,
    MAX_FILE_BYTES,
    MAX_LINE_BYTES,
    MAX_LINES,
    Line,
    add_checksum,
    is_record,
    parse_record,
    read_lines,
    verify_checksum,
)
from reconv.storage.transient import is_machine_fault, naming, retry_transient

_MAX_NUMBERS = 10  # of lines, in a message


class EventLog:
    """Appends events to a file, one write per line, so that a killed process damages at most the last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with naming(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._end = self._repair()

    def write(self, event: Event) -> Event:
        """Append the event with the current time, and return it as written."""
        stamped = event if event.time_s is not None else replace(event, time_s=round(time.time(), 3))
        line = _line(stamped)
        if len(line) > MAX_LINE_BYTES:
            text = f"an event of kind {event.kind} is too long for events.jsonl ({len(line):,} bytes) and was left out"
            line = _line(LogMessage("warning", text, time_s=stamped.time_s))
        with naming(self._path):
            retry_transient(lambda: self._append(line), self._path)
            if isinstance(event, AttemptStarted | CheckpointSaved | RunEnded):
                os.fsync(self._file)
        return stamped

    def _append(self, line: bytes) -> None:
        """Write a whole line, or nothing."""
        try:
            written = os.write(self._file, line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):  # else the checksum shows that the line is incomplete
                os.ftruncate(self._file, self._end)
            raise
        self._end += len(line)

    def close(self) -> None:
        """Flush to disk and close the file. Can be called twice."""
        if self._file >= 0:
            descriptor, self._file = self._file, -1
            with naming(self._path):
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except OSError as close_error:
            if error is None:
                raise
            error.add_note(f"events.jsonl could not be closed: {close_error}")  # the error that ends the run is shown

    def _repair(self) -> int:
        """Remove a last line that a killed process left incomplete, and return the length of the file."""
        length = os.fstat(self._file).st_size
        start = max(0, length - MAX_LINE_BYTES)
        tail = os.pread(self._file, length - start, start)
        last = tail[tail.rfind(b"\n") + 1 :]
        if not last:
            return length
        if len(last) < MAX_LINE_BYTES and not is_record(last):
            os.ftruncate(self._file, length - len(last))
            return length - len(last)
        os.write(self._file, b"\n")
        return length + 1


def _line(event: Event) -> bytes:
    return add_checksum(encode(event).encode()) + b"\n"


@dataclass(slots=True)
class EventFile:
    """Readable events of an event log, and the numbers of the lines that could not be read."""

    events: list[Event] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)  # not as it was written, or longer than MAX_LINE_BYTES
    unreadable: list[int] = field(default_factory=list)  # its fields are not those of this version
    unchecked: list[int] = field(default_factory=list)  # read, but without a checksum: of an earlier version
    num_checked: int = 0
    cut_at: int = 0  # the first line beyond the limits of a file; 0: all were read

    def add(self, line: Line) -> None:
        """Read a line. Lines without a checksum can only come before the first one that has it."""
        if line.is_beyond_limit:
            self.cut_at = line.number
            return
        try:
            record = parse_record(line.content or b"")
        except ValueError:
            if line.has_newline or line.content is None:  # else the last line is being written, or was cut short
                self.damaged.append(line.number)
            return
        is_valid = verify_checksum(line.content or b"")
        if is_valid is False or (is_valid is None and (self.num_checked or CHECKSUM in record)):
            self.damaged.append(line.number)
            return
        self.num_checked += is_valid is True
        try:
            event = event_of(record)
        except ValueError:
            self.unreadable.append(line.number)
            return
        if not is_valid:
            self.unchecked.append(line.number)
        if event is not None:
            self.events.append(event)

    def problems(self) -> list[str]:
        """Messages on what was left out."""
        found = []
        if self.damaged:
            found.append(_left_out(self.damaged, "could not be verified"))
        if self.unreadable:
            found.append(_left_out(self.unreadable, "could not be read (another version of Reconv?)"))
        if self.cut_at:
            limits = f"{MAX_LINES:,} lines and {MAX_FILE_BYTES >> 30} GiB"
            found.append(f"events.jsonl is longer than {limits}: left out from line {self.cut_at:,} on")
        return found


def _left_out(numbers: Sequence[int], why: str) -> str:
    """The message about lines that are left out, with their numbers."""
    listed = ", ".join(map(str, numbers[:_MAX_NUMBERS])) + (", ..." if numbers[_MAX_NUMBERS:] else "")
    plural = "s" * (len(numbers) > 1)
    return f"{len(numbers):,} line{plural} of events.jsonl {why}; left out: line{plural} {listed}"


def read_event_file(path: Path) -> EventFile:
    """The events of a file, and what could not be read or verified."""

    def read() -> EventFile:
        file = EventFile()
        for line in read_lines(path):
            file.add(line)
        return file

    try:
        return retry_transient(read, path)
    except FileNotFoundError:
        raise UsageError(
            "this is not a run directory", where=str(path), why="it has no events.jsonl", hint="ls runs/*/*"
        ) from None
    except OSError as error:
        kind = UnreadableRunError if is_machine_fault(error) else CheckpointError
        raise kind("the event log of this run cannot be read", where=str(path), why=str(error)) from error


def read_events(path: Path) -> list[Event]:
    """The events of a file, without an incomplete last line, lines that cannot be read, and kinds of later versions."""
    return read_event_file(path).events


def latest_by_step(events: Iterable[Event]) -> list[Event]:
    """The events that are still valid: who resumes or goes back discards the steps after that, and a step counts once.

    Messages and ends are kept; an image is replaced by the next one with its title.
    """
    kept: dict[tuple[Any, ...], Event] = {}
    for number, event in enumerate(events):
        if isinstance(event, AttemptStarted | WrongBits):
            first = event.from_step if isinstance(event, AttemptStarted) else event.to_step
            discarded = [key for key, old in kept.items() if _step(old) > first]
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
            TrainProgress
            | EvalFinished
            | ScalarLogged
            | CheckpointSaved
            | NonFiniteStep
            | BadImageSkipped
            | DataWait
            | SlowRank,
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
        case DataFingerprint() | RunPlanned() | DataWait():
            return (event.kind,)
        case _:
            return (event.kind, number)
