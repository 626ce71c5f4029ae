"""The event log: written, damaged, repaired and read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reconv.errors import CheckpointError, UsageError
from reconv.logging.events import (
    AttemptStarted,
    BadImageSkipped,
    CheckpointSaved,
    DataWait,
    EvalFinished,
    Event,
    EventLog,
    ImageLogged,
    LogMessage,
    NonFiniteStep,
    RunEnded,
    RunPlanned,
    ScalarLogged,
    TrainProgress,
    decode,
    encode,
    latest_by_step,
    read_events,
)

EVERY_KIND: list[Event] = [
    AttemptStarted(1, 0, ("reconv", "train", "<b>"), {"torch": "2.13", "threads": 2}),
    RunPlanned("quickstart", "classification", 440, 22.5, 64, ("line 1", "line 2"), 272_474, "resnet8", 2),
    TrainProgress(5, 0.2, 1.5, 0.1, {"top1": 0.5}, "on mixed images", 2.0, None, None, 0.1, 10, None, 1024.0),
    EvalFinished(22, 1.0, "ema", {"top1": 0.9, "loss": 0.3}, 360, 0.1, True, True),
    ScalarLogged(22, "temperature", 36.6),
    CheckpointSaved(22, "checkpoints/step-000000022", 1000, 0.1, "interval"),
    NonFiniteStep(23, 7.0, (1, 2, 3), "skip"),
    BadImageSkipped(24, "train", 17, "cats/\udcff.jpg", "the file is half-written"),
    DataWait(22, 0.4, {"disk": 1.0, "decode": 2.5}, "decode", "--workers 4"),
    LogMessage("warning", "naïve ✓ 'quotes' \n newline \u2028", 3),
    ImageLogged("first batch", "images/a.png", ("7", "8"), 0, 2),
    RunEnded(440, 0, "finished", 9.0, 100, 5, 8.0, 1.0, 90, {"note": "x"}),
]


BYTES = "mean/caf\udce9.png"  # how Python spells a file name that is not UTF-8


def progress(step: int, loss: float = 1.0) -> TrainProgress:
    return TrainProgress(step, step / 10, loss, 0.1, {}, "", 1.0, None, None, 0.0, 0, None)


def attempt(number: int, from_step: int) -> AttemptStarted:
    return AttemptStarted(number, from_step, ("reconv", "train", "x"), {})


def test_every_kind_of_event_round_trips(tmp_path: Path) -> None:
    kinds = {cls.kind for cls in Event.__subclasses__()}
    assert {event.kind for event in EVERY_KIND} == kinds
    with EventLog(tmp_path / "events.jsonl") as log:
        written = [log.write(event) for event in EVERY_KIND]
    read = read_events(tmp_path / "events.jsonl")
    assert read == EVERY_KIND
    assert [event.time_s for event in read] == [event.time_s for event in written]
    assert all(event.time_s for event in read)


def test_every_line_is_strict_json() -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    for event in (*EVERY_KIND, progress(1, math.nan)):
        line = encode(event)
        assert "\n" not in line
        assert json.loads(line, parse_constant=refuse)["kind"] == event.kind


@settings(deadline=None)
@given(loss=st.floats(), metric=st.floats())
def test_non_finite_numbers_survive(loss: float, metric: float) -> None:
    event = EvalFinished(1, 1.0, "raw", {"top1": metric, "loss": loss}, 1, 0.0, False)
    back = decode(encode(event))
    assert isinstance(back, EvalFinished)
    assert repr(dict(back.metrics)) == repr(dict(event.metrics))
    number = decode(encode(progress(1, loss)))
    assert isinstance(number, TrainProgress)
    assert repr(number.loss) == repr(loss)


def test_a_file_cut_at_any_byte_is_read_and_repaired(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        for step in (1, 2, 3):
            log.write(progress(step))
    content = path.read_bytes()
    starts = [0, *(n + 1 for n, byte in enumerate(content) if byte == ord("\n"))]
    cuts = [*range(starts[2], len(content) - 3, 4), *range(len(content) - 3, len(content) + 1)]
    assert len(cuts) > 40
    for cut in cuts:
        path.write_bytes(content[:cut])
        complete = [progress(1), progress(2)] + ([progress(3)] if cut >= len(content) - 1 else [])
        assert read_events(path) == complete
        with EventLog(path) as log:
            log.write(progress(9))
        assert read_events(path) == [*complete, progress(9)]


def test_a_damaged_line_is_reported_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f"{encode(progress(1))}\n{{broken\n{encode(progress(2))}\n")
    with pytest.raises(CheckpointError) as exc_info:
        read_events(path)
    assert exc_info.value.where.endswith("events.jsonl:2")


def test_a_line_without_a_field_is_blamed_on_another_version(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind":"checkpoint","step":3}\n' + encode(progress(2)) + "\n")
    with pytest.raises(CheckpointError, match="another version") as exc_info:
        read_events(path)
    assert "delete" not in str(exc_info.value)


def test_kinds_and_fields_of_later_versions_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    known = json.loads(encode(progress(1))) | {"color": "blue"}
    path.write_text('{"kind":"hologram","x":1}\n' + json.dumps(known) + "\n")
    assert read_events(path) == [progress(1)]


def test_a_directory_without_an_event_log_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a run directory"):
        read_events(tmp_path / "events.jsonl")


def test_a_full_disk_leaves_no_incomplete_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(progress(1))
        real_write = os.write
        monkeypatch.setattr(os, "write", lambda file, data: real_write(file, data[:10]))
        with pytest.raises(OSError, match="No space left"):
            log.write(progress(2))
        monkeypatch.undo()
        log.write(progress(3))
    assert read_events(path) == [progress(1), progress(3)]
    assert path.read_bytes().count(b"\n") == 2


def test_a_resume_discards_the_steps_after_its_own() -> None:
    events = [
        *(attempt(1, 0), progress(10), CheckpointSaved(15, "a", 1, 0.0, "interval"), progress(20, 5.0), progress(25)),
        *(attempt(2, 15), LogMessage("info", "went on"), progress(20, 6.0)),
    ]
    kept = latest_by_step(events)
    assert [e for e in kept if isinstance(e, TrainProgress)] == [progress(10), progress(20, 6.0)]
    assert [e.step for e in kept if isinstance(e, CheckpointSaved)] == [15]
    assert sum(isinstance(e, AttemptStarted) for e in kept) == 2


def test_a_repeated_evaluation_counts_once() -> None:
    first = EvalFinished(10, 1.0, "raw", {"top1": 0.5}, 1, 0.0, False)
    second = EvalFinished(10, 1.0, "raw", {"top1": 0.6}, 1, 0.0, True)
    other = EvalFinished(10, 1.0, "ema", {"top1": 0.7}, 1, 0.0, False)
    assert latest_by_step([attempt(1, 0), first, other, second])[1:] == [other, second]


@settings(deadline=None)
@example([(0, 5), (3, 0)])
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=6))
def test_each_step_counts_as_its_last_attempt(lengths: list[tuple[int, int]]) -> None:
    events: list[Event] = []
    expected: dict[int, int] = {}
    reached = 0
    for number, (back, forth) in enumerate(lengths, 1):
        start = max(0, reached - back)
        events.append(attempt(number, start))
        expected = {step: n for step, n in expected.items() if step <= start}
        for step in range(start + 1, start + forth + 1):
            events.append(progress(step, float(number)))
            expected[step] = number
        reached = start + forth
    kept = [e for e in latest_by_step(events) if isinstance(e, TrainProgress)]
    assert {e.step: e.loss for e in kept} == expected
    assert len(kept) == len(expected)


def test_file_names_that_are_not_utf8_are_written_and_read_back(tmp_path: Path) -> None:
    event = ImageLogged("Worst mistakes", "images/mistakes.png", (f"said 7 · {BYTES}",), 3, 8)
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(event)
    (tmp_path / "events.jsonl").read_text(encoding="utf-8")
    assert read_events(tmp_path / "events.jsonl") == [event]


def test_an_event_can_be_encoded_as_ascii() -> None:
    for event in (*EVERY_KIND, LogMessage("info", f"{BYTES} \U0001f600", 0)):
        line = encode(event, ascii_only=True)
        assert line.isascii()
        assert decode(line) == event


def test_a_bad_image_is_logged_once_and_discarded_with_its_step() -> None:
    train, val = BadImageSkipped(4, "train", 7, "a.jpg", "cut"), BadImageSkipped(4, "val", 7, "b.jpg", "cut")
    events = [attempt(1, 0), train, val, attempt(2, 4), train]
    assert [e for e in latest_by_step(events) if isinstance(e, BadImageSkipped)] == [val, train]
    assert [e for e in latest_by_step(events[:4]) if isinstance(e, BadImageSkipped)] == [val]
    assert [
        e for e in latest_by_step([attempt(1, 0), train, val, attempt(2, 3)]) if isinstance(e, BadImageSkipped)
    ] == []
