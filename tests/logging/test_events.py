"""The event log: written, damaged, repaired and read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reconv.core.errors import UsageError
from reconv.logging.event_log import EventLog, latest_by_step, read_event_file, read_events
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
    decode,
    encode,
)
from reconv.logging.json_lines import MAX_LINE_BYTES, add_checksum

EVERY_KIND: list[Event] = [
    AttemptStarted(1, 0, ("reconv", "train", "<b>"), {"torch": "2.13", "threads": 2}),
    DataFingerprint("0f" * 16, "ab" * 16),
    RunPlanned("quickstart", "classification", 440, 22.5, 64, ("line 1", "line 2"), 272_474, "resnet8", 2),
    TrainProgress(5, 0.2, 1.5, 0.1, {"top1": 0.5}, "on mixed images", 2.0, None, None, 0.1, 10, None, 1024.0),
    EvalFinished(22, 1.0, "ema", {"top1": 0.9, "loss": 0.3}, 360, 0.1, True, True),
    ScalarLogged(22, "temperature", 36.6),
    CheckpointSaved(22, "checkpoints/step-000000022", 1000, 0.1, "interval"),
    NonFiniteStep(23, 7.0, (1, 2, 3), "skip"),
    WrongBits(24, 1, "model.conv1.weight", "at rest", 20),
    BadImageSkipped(24, "train", 17, "cats/\udcff.jpg", "the file is half-written"),
    DataWait(22, 0.4, {"disk": 1.0, "decode": 2.5}, "decode", "--workers 4"),
    SlowRank(30, 3, "node2", 0.038, 0.023, 0.024, 0.09),
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


def test_every_changed_byte_is_found_and_its_line_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        for step in (1, 2, 3):
            log.write(progress(step))
    content = path.read_bytes()
    first, second, _ = content.splitlines(keepends=True)
    for at in range(len(first), len(first) + len(second) - 1):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        file = read_event_file(path)
        assert (file.events, file.damaged) == ([progress(1), progress(3)], [2]), at
    assert file.problems() == ["1 line of events.jsonl could not be verified; left out: line 2"]


@pytest.mark.parametrize(
    "line",
    [
        b"{broken",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b"\0" * 50,
        b'{"kind":"message","level":NaN,"text":"x"}',
        b"x" * (MAX_LINE_BYTES + 5),
        encode(progress(2)).encode(),  # without a checksum after a line that has one
        encode(progress(2)).encode()[:-1] + b',"crc32c":"00000000"}',
        add_checksum(encode(progress(2)).encode()).replace(b'"step":2', b'"step":3'),
        add_checksum(encode(progress(2)).encode()).replace(b'"crc32c":', b'"crc32c": '),
    ],
    ids=range(11),
)
def test_a_damaged_line_is_left_out_and_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "events.jsonl"
    sealed = [add_checksum(encode(progress(step)).encode()) for step in (1, 3)]
    path.write_bytes(b"\n".join([sealed[0], line, sealed[1], line, b""]))
    file = read_event_file(path)
    assert file.events == [progress(1), progress(3)]
    assert file.damaged == [2, 4]
    assert file.problems() == ["2 lines of events.jsonl could not be verified; left out: lines 2, 4"]
    with EventLog(path) as log:  # removes nothing but an incomplete last line
        log.write(progress(4))
    assert read_event_file(path).events == [progress(1), progress(3), progress(4)]
    assert read_event_file(path).damaged == [2, 4]


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "checkpoint", "step": 3},
        {"step": 3},
        {"kind": ["train"]},
        *(json.loads(encode(progress(2))) | {"step": step} for step in ("2", None, 2.5, True, [2], 10**30)),
        *(json.loads(encode(progress(2))) | {"loss": loss} for loss in ("1", None, {}, 10**400)),
        *(json.loads(encode(progress(2))) | {"metrics": metrics} for metrics in (None, [1], {"top1": "x"})),
        json.loads(encode(attempt(1, 0))) | {"command": "reconv"},
        json.loads(encode(attempt(1, 0))) | {"command": [1]},
        {"kind": "message", "level": "info", "text": 3},
    ],
    ids=str,
)
def test_fields_that_are_missing_or_of_another_type_are_blamed_on_another_version(
    tmp_path: Path, record: dict[str, object]
) -> None:
    path = tmp_path / "events.jsonl"
    lines = [json.dumps(record), encode(progress(2))]
    path.write_bytes(b"".join(add_checksum(line.encode()) + b"\n" for line in lines))
    file = read_event_file(path)
    assert file.events == [progress(2)]
    assert file.unreadable == [1]
    assert file.damaged == []
    assert "another version" in file.problems()[0]


def test_lines_of_a_version_without_checksums_are_read_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f"{encode(progress(1))}\n{encode(progress(2))}\n")
    with EventLog(path) as log:
        log.write(progress(3))
    file = read_event_file(path)
    assert (file.events, file.unchecked, file.problems()) == ([progress(1), progress(2), progress(3)], [1, 2], [])


def test_an_event_that_is_too_long_is_replaced_by_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(LogMessage("info", "x" * MAX_LINE_BYTES))
    [event] = read_events(path)
    assert isinstance(event, LogMessage)
    assert (event.level, event.text[:32]) == ("warning", "an event of kind message is too ")


@pytest.mark.parametrize(("limit", "value"), [("MAX_LINES", 2), ("MAX_FILE_BYTES", 600)])
def test_a_file_is_read_up_to_its_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        for step in range(1, 9):
            log.write(progress(step))
    monkeypatch.setattr(f"reconv.logging.json_lines.{limit}", value)
    file = read_event_file(path)
    assert file.events == [progress(1), progress(2)]
    assert file.problems()[0].endswith("left out from line 3 on")


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
