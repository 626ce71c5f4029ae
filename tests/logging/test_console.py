"""Console output in each mode."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from run_example import write_run

from reconv.core.errors import UsageError
from reconv.logging.console import make_console
from reconv.logging.event_log import EventLog, read_events
from reconv.logging.events import (
    BadImageSkipped,
    CheckpointSaved,
    EvalFinished,
    Event,
    LogMessage,
    RunEnded,
    RunPlanned,
    decode,
)
from reconv.report.html import write_report
from reconv.report.summary import summarize


class FakeTerminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


class FailingTerminal(FakeTerminal):
    """A terminal that fails after some writes, as a closed pipe or a full disk does."""

    def __init__(self, error: Exception, num_writes: int) -> None:
        super().__init__()
        self.error = error
        self.num_left = num_writes
        self.num_failed = 0

    def write(self, text: str) -> int:
        if self.num_left == 0:
            self.num_failed += 1
            raise self.error
        self.num_left -= 1
        return super().write(text)


def print_run(mode: str, run: Path, stream: io.StringIO) -> str:
    write_report(run)
    console = make_console(mode, run, stream)
    for event in read_events(run / "events.jsonl"):
        console.on_event(event)
    console.finish(summarize(run))
    console.close()
    return stream.getvalue()


def test_plain_prints_progress_every_few_seconds_and_the_result_last(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", mixed=True)
    lines = print_run("plain", run, io.StringIO()).splitlines()
    steps = [line for line in lines if line.startswith("epoch ")]
    times = [event.time_s for event in read_events(run / "events.jsonl") if event.kind == "train"]
    assert len(times) == 440 // 5
    assert times[-1] - times[0] == 36.0  # type: ignore[operator]
    assert len(steps) == 8  # one per 5 s, and the last one
    assert len(lines) < 40
    steps = [line for line in steps if "step 440/440" in line]
    for part in (
        "step 440/440",
        "epoch 20.00/20",
        "loss ",
        "top-1 ",
        "on mixed images",
        "lr ",
        "images/s",
        "data wait",
        "ETA",
    ):
        assert part in steps[0]
    assert sum(line.startswith("validation at epoch") for line in lines) == 20  # raw and EMA weights on one line
    assert sum(line.startswith("saved ") for line in lines) == 2  # the first and the last
    assert lines[-1] == f"top-1 99.44 % (expected 99.0 ± 0.5: met) · report: {run / 'report.html'}"


def test_less_than_an_epoch_is_printed_with_two_decimals(tmp_path: Path) -> None:
    run, stream = write_run(tmp_path / "run"), io.StringIO()
    console = make_console("plain", run, stream)
    for event in read_events(run / "events.jsonl"):
        is_plan = isinstance(event, RunPlanned)
        console.on_event(replace(event, total_steps=1, steps_per_epoch=22.0) if is_plan else event)
    console.close()
    assert "0.05 epochs, 1 step" in stream.getvalue() and "/0.05  step " in stream.getvalue()
    assert "0.04545" not in stream.getvalue()


def test_the_first_lines_name_recipe_model_device_length_and_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    first = print_run("plain", run, io.StringIO()).split("\nepoch ")[0]
    for part in (
        "quickstart",
        "resnet8_cifar",
        "cpu, 2 threads",
        "20 epochs, 440 steps",
        "global batch 64 =",
        f"report: {run}",
    ):
        assert part in first


def test_a_long_plan_is_a_screenful_unless_all_of_it_is_asked_for(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    plan = next(event for event in read_events(run / "events.jsonl") if isinstance(event, RunPlanned))
    plan = replace(plan, lines=tuple(f"fact {number}" for number in range(30)))
    shown = {}
    for mode in ("plain", "plan"):
        console = make_console(mode, run, stream := io.StringIO())
        console.on_event(plan)
        shown[mode] = stream.getvalue().splitlines()
    assert len(shown["plain"]) < 24
    assert "  11 more lines: --plan prints them, the report has them" in shown["plain"]
    assert "  fact 18" in shown["plain"] and "  fact 19" not in shown["plain"]
    assert [f"  fact {number}" for number in range(30)] == shown["plan"][1:31]


def test_classes_with_few_validation_images_are_named_beside_the_metric(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    plan = next(event for event in read_events(run / "events.jsonl") if isinstance(event, RunPlanned))
    with EventLog(run / "events.jsonl") as log:
        log.write(replace(plan, few_val_images={"fox": 9, "owl": 2}))
    [line] = print_run("quiet", run, io.StringIO()).splitlines()
    assert line.startswith("top-1 99.44 %, few validation images: owl 2, fox 9 (expected")


def test_a_stopped_run_prints_the_resume_command(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", stop_at=200, exit_code=75)
    lines = print_run("quiet", run, io.StringIO()).splitlines()
    assert lines[0].startswith("stopped at step 200 of 440: top-1 98.89 % · report: ")
    assert lines[1] == f"to resume: reconv resume {run}"


def test_quiet_prints_only_the_result(tmp_path: Path) -> None:
    assert len(print_run("quiet", write_run(tmp_path / "run"), io.StringIO()).splitlines()) == 1


def test_json_prints_every_event_and_the_summary(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", broken_steps=[50])
    *events, summary = print_run("json", run, io.StringIO()).splitlines()
    # A NaN is not equal to itself, so the lines are compared as text.
    assert [repr(decode(line)) for line in events] == [repr(event) for event in read_events(run / "events.jsonl")]
    assert json.loads(summary) == {"kind": "summary", **summarize(run)}


def test_a_terminal_shows_live_progress_and_keeps_past_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = print_run("auto", write_run(tmp_path / "run", resumes=[150]), FakeTerminal())
    assert "\x1b[2K" in shown  # a line is erased to be drawn anew
    assert "step 440/440" in shown
    assert shown.count("validation at epoch") == 20
    assert "\x1b[?25h" in shown.split("step 440/440")[-1]  # the cursor is back


def test_no_color_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    run = write_run(tmp_path / "run")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;32m" in print_run("auto", run, FakeTerminal())
    monkeypatch.setenv("NO_COLOR", "1")
    shown = print_run("auto", run, FakeTerminal())
    assert not any(f"\x1b[{code}" in shown for code in ("1;3", "3", "38;"))


def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    run = write_run(tmp_path / "run")
    assert print_run("auto", run, FakeTerminal()) == print_run("plain", run, io.StringIO())


def test_an_unknown_mode_is_rejected() -> None:
    with pytest.raises(UsageError, match="loud"):
        make_console("loud")


def test_rich_is_imported_only_for_a_terminal() -> None:
    code = "import sys, reconv.logging.console as c; c.make_console('plain'); print('rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("mode", "term", "error"),
    [
        ("auto", "xterm-256color", BrokenPipeError()),
        ("auto", "xterm-256color", ValueError("I/O operation on closed file")),
        ("auto", "dumb", OSError(errno.ENOSPC, "full")),
        ("json", "dumb", BrokenPipeError()),
    ],
    ids=repr,
)
def test_output_stops_when_the_stream_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    error: Exception,
    term: str,
) -> None:
    monkeypatch.setenv("TERM", term)
    stdout = sys.stdout
    stream = FailingTerminal(error, num_writes=20)
    print_run(mode, write_run(tmp_path / "run"), stream)
    assert 1 <= stream.num_failed <= 3  # the write that failed, and giving the terminal back
    assert sys.stdout is stdout


@pytest.mark.parametrize("mode", ["auto", "plain", "quiet", "json"])
def test_a_process_without_stdout_has_a_silent_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    run = write_run(tmp_path / "run")
    monkeypatch.setattr(sys, "stdout", None)
    console = make_console(mode, run)
    console.on_event(LogMessage("info", "hello"))
    console.finish(summarize(run))
    console.close()
    assert sys.stdout is None  # nothing was put in its place


@pytest.mark.parametrize("mode", ["plain", "json"])
def test_everything_is_printed_to_an_ascii_stream(tmp_path: Path, mode: str) -> None:
    run = write_report(write_run(tmp_path / "run")).parent
    written = io.BytesIO()
    console = make_console(mode, run, io.TextIOWrapper(written, encoding="ascii"))
    console.on_event(LogMessage("info", "caf\udce9 ± 1"))
    console.finish(summarize(run))
    first, last = written.getvalue().decode("ascii").splitlines()
    if mode == "json":
        assert json.loads(first)["text"] == "caf\udce9 ± 1"
        assert json.loads(last)["kind"] == "summary"
    else:
        assert first == "caf\\udce9 \\xb1 1"
        assert "report.html" in last


def test_a_report_that_was_not_written_is_not_mentioned(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    stream = io.StringIO()
    make_console("quiet", run, stream).finish(summarize(run))
    assert stream.getvalue() == "top-1 99.44 % (expected 99.0 ± 0.5: met)\n"


def test_a_skipped_image_is_printed_and_noted_with_the_metric() -> None:
    stream = io.StringIO()
    console = make_console("plain", None, stream)
    console.on_event(BadImageSkipped(3, "val", 17, "val/cat/17.jpg", "the file is half-written"))
    console.on_event(EvalFinished(10, 1.0, "raw", {"top1": 0.5}, 98, 0.1, best=False, skipped=2))
    first, second = stream.getvalue().splitlines()
    assert first == "warning: skipped a bad val image: val/cat/17.jpg: the file is half-written"
    assert second.endswith("top-1 50.00 %  without 2 bad images")


PLAN = RunPlanned("photos", "classification", 100, 10.0, 8, (), 2_200_000, monitored_weights="ema", num_classes=10)


def evaluation(weights: str, *, best: bool = False, step: int = 10) -> EvalFinished:
    metrics = {"top1": 0.5 if weights == "raw" else 0.75, "top5": 1.0, "loss": 1.25}
    return EvalFinished(step, step / 10, weights, metrics, 98, 0.1, best=best)


def plain_lines(*events: Event) -> list[str]:
    stream = io.StringIO()
    console = make_console("plain", None, stream)
    for event in events:
        console.on_event(event)
    return stream.getvalue().splitlines()


def test_an_evaluation_of_raw_and_ema_weights_is_one_line() -> None:
    _, line = plain_lines(PLAN, evaluation("raw"), evaluation("ema", best=True))
    assert line == "validation at epoch 1.00: top-1 75.00 %  loss 1.25 (EMA), top-1 50.00 %  loss 1.25 (raw)  best"
    _, line = plain_lines(replace(PLAN, monitored_weights="raw"), evaluation("raw", best=True))
    assert line == "validation at epoch 1.00: top-1 50.00 %  loss 1.25  best"


def test_raw_weights_without_their_ema_are_printed_with_the_next_event() -> None:
    _, line, message = plain_lines(PLAN, evaluation("raw"), LogMessage("info", "stopping"))
    assert (line, message) == ("validation at epoch 1.00: top-1 50.00 %  loss 1.25", "stopping")
    lines = plain_lines(PLAN, evaluation("raw"), evaluation("raw", step=20), evaluation("ema", step=20))
    assert [line[:24] for line in lines[1:]] == ["validation at epoch 1.00", "validation at epoch 2.00"]


@pytest.mark.parametrize(("num_classes", "is_shown"), [(5, False), (10, False), (11, True), (0, True)])
def test_top5_of_few_classes_is_not_printed(num_classes: int, is_shown: bool) -> None:
    _, line = plain_lines(replace(PLAN, num_classes=num_classes), evaluation("averaged"))
    assert ("top-5" in line) == is_shown


def test_warnings_alike_are_folded_and_counted() -> None:
    bad = [BadImageSkipped(3, "train", n, f"cat/{n}.jpg", "half-written") for n in range(1500)]
    other = LogMessage("warning", "another one")
    alike = [LogMessage("warning", f"step {n} took {n}.5 s") for n in range(5)]
    end = RunEnded(10, 0, "finished", 1.0, 80, 0)
    lines = plain_lines(PLAN, *bad, other, *alike, end)
    assert [line.split(":")[0] for line in lines[1:5]] == ["warning"] * 4
    assert "cat/2.jpg" in lines[3] and "listed in the report" in lines[4]
    assert lines[5] == "warning: another one"
    assert lines[-2] == "not printed: 1,497 more bad images"
    assert lines[-1].startswith("not printed: 2 more warnings: step 0")
    assert len(lines) == 1 + 4 + 1 + 4 + 2


def test_routine_checkpoints_after_the_first_are_not_printed() -> None:
    reasons = ("interval", "interval", "best", "keep_at", "stop")
    saved = [CheckpointSaved(n, f"checkpoints/step-{n}", 1000, 0.1, reason) for n, reason in enumerate(reasons)]
    assert [line.split("(")[1] for line in plain_lines(*saved)] == ["1 kB, interval)", "1 kB, keep_at)", "1 kB, stop)"]


def test_the_plan_says_how_many_parameters_are_trained() -> None:
    assert "2.2 M parameters, 10 epochs" in plain_lines(replace(PLAN, num_trained=2_200_000))[0]
    assert "2.2 M parameters (5.13 k trained), 10 epochs" in plain_lines(replace(PLAN, num_trained=5_130))[0]
