"""Stop signals: what the first and the following ones do."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

import reconv
from reconv.cli import main
from reconv.core.errors import UsageError
from reconv.logging.event_log import read_events
from reconv.logging.events import AttemptStarted, CheckpointSaved, RunEnded, TrainProgress
from reconv.logging.json_lines import add_checksum
from reconv.logging.run_dir import RunDir
from reconv.trainer.options import RunOptions
from reconv.trainer.run import run_training
from reconv.trainer.stop import StopAfter, StopSignal


def test_second_ctrl_c_interrupts_also_after_a_sigterm() -> None:
    with StopSignal(same_press_s=0) as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal_number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_repeated_by_a_launcher_counts_once() -> None:
    with StopSignal(same_press_s=60) as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert stop.signal_number == signal.SIGINT


def test_a_ctrl_c_after_a_sigterm_still_waits_for_the_save() -> None:
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.signal_number == signal.SIGTERM


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGTERM"])
def test_a_repeated_signal_of_a_scheduler_does_not_end_the_save(name: str) -> None:
    number = signal.Signals[name]
    before = signal.getsignal(number)
    with StopSignal(same_press_s=0) as stop:
        for _ in range(3):
            signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal_number == number
    assert signal.getsignal(number) is before


def test_a_third_ctrl_c_interrupts_again() -> None:
    with StopSignal(same_press_s=0):
        signal.raise_signal(signal.SIGINT)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)


def test_the_signal_of_the_environment_stops_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECONV_STOP_SIGNAL", "SIGRTMIN+1")
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGRTMIN + 1)
        assert stop.signal_number == signal.SIGRTMIN + 1


SETTINGS = {"length": "4ep", "data.subset_percent": "25", "batch.size": "64", "log.every": "1step"}  # epochs of 5 steps
OVERRIDES = [(name, value, "--set") for name, value in SETTINGS.items()]
WORDS = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]


def run_cli(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    return int(end.value.code or 0)


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run / f"checkpoints/step-{step:09d}/model.safetensors")


@pytest.mark.parametrize(
    ("text", "step", "seconds"),
    [
        ("7step", 17, None),
        ("1 step", 11, None),
        ("2ep", 20, None),
        ("0.5ep", 13, None),
        ("90s", None, 90.0),
        ("3h", None, 10800.0),
        ("1.5min", None, 90.0),
        (None, None, None),
    ],
)
def test_limit_counts_from_the_first_step_of_the_command(text: str | None, step: int | None, seconds: float) -> None:
    found = StopAfter.parse(text, first_step=10, steps_per_epoch=5)
    assert (found.step, found.seconds) == (step, seconds)
    assert step is None or (found.is_reached(step) and not found.is_reached(step - 1))


@pytest.mark.parametrize("text", ["", "5", "0step", "1.5step", "-1h", "3 days", "1e9h"])
def test_other_limits_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="stop-after") as error:
        StopAfter.parse(text, first_step=0, steps_per_epoch=5)
    assert "100step" in error.value.hint


def test_time_is_up_when_the_seconds_have_passed() -> None:
    limit = StopAfter.parse("10min", first_step=0, steps_per_epoch=5)
    assert not limit.time_is_up()
    assert StopAfter("10min", seconds=600.0, start_s=limit.start_s - 601).time_is_up()


def test_run_in_parts_by_stop_after_and_resume_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    whole = reconv.train("quickstart", out=tmp_path / "whole", overrides=OVERRIDES)
    run = tmp_path / "parts"
    assert run_cli("train", "quickstart", "--out", str(run), *WORDS, "--stop-after", "7step") == 0
    assert not RunDir(run).is_finished()
    assert run_cli("resume", str(run), "--stop-after", "1ep") == 0
    assert run_cli("resume", str(run)) == 0
    assert RunDir(run).is_finished()
    a, b = weights(whole.folder, 20), weights(run, 20)
    assert len(a) > 30 and all(torch.equal(a[name], b[name]) for name in a)
    events = read_events(run / "events.jsonl")
    assert [event.step for event in events if isinstance(event, TrainProgress)] == list(range(1, 21))
    lr = {e.step: e.lr for e in read_events(whole.folder / "events.jsonl") if isinstance(e, TrainProgress)}
    assert {event.step: event.lr for event in events if isinstance(event, TrainProgress)} == lr
    ends = [(event.step, event.exit_code) for event in events if isinstance(event, RunEnded)]
    assert ends == [(7, 0), (12, 0), (20, 0)]


def test_a_damaged_event_log_neither_ends_nor_changes_a_resumed_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = reconv.train("quickstart", out=tmp_path / "whole", overrides=OVERRIDES)
    run = tmp_path / "run"
    assert (
        run_cli("train", "quickstart", "--out", str(run), *WORDS, "--set", "loggers=csv", "--stop-after", "7step") == 0
    )
    lines = (run / "events.jsonl").read_bytes().split(b"\n")
    number = next(n for n, line in enumerate(lines) if b'"kind":"train","' in line)
    lines[number] = lines[number].replace(b'"step":1,', b'"step":9,')
    other = add_checksum(b'{"kind":"attempt","attempt":"x","from_step":null,"command":7,"environment":[]}')
    (run / "events.jsonl").write_bytes(b"\n".join([*lines[:-1], other, b"]]", b'{"kind":"train","st']))
    assert run_cli("resume", str(run)) == 0
    printed = capsys.readouterr().out
    assert f"could not be verified; left out: lines {number + 1}, {len(lines) + 1}\n" in printed
    assert f"could not be read (another version of Reconv?); left out: line {len(lines)}\n" in printed
    a, b = weights(whole.folder, 20), weights(run, 20)
    assert all(torch.equal(a[name], b[name]) for name in a)
    events = read_events(run / "events.jsonl")
    assert [event.attempt for event in events if isinstance(event, AttemptStarted)] == [1, 2]
    assert [event.step for event in events if isinstance(event, TrainProgress)] == list(range(2, 21))


def test_stopped_run_is_saved_and_its_summary_says_how_to_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert run_cli("train", "quickstart", "--out", str(run), *WORDS, "--stop-after", "3step") == 0
    printed = capsys.readouterr().out
    assert f"to resume: reconv resume {run}" in printed
    assert "stopped at step 3 of 20" in printed and "NOT MET" not in printed
    saved = [e for e in read_events(run / "events.jsonl") if isinstance(e, CheckpointSaved)]
    assert [(e.step, e.reason) for e in saved] == [(3, "stop")]


def test_time_limit_saves_at_the_next_step(tmp_path: Path) -> None:
    result = reconv.train("quickstart", out=tmp_path / "run", overrides=OVERRIDES, stop_after="0.0001s")
    assert (result.exit_code, result.summary["steps"]) == (0, 1)
    assert "--stop-after 0.0001s" in result.summary["reason"]
    assert result.summary["resume_command"] == f"reconv resume {tmp_path / 'run'}"


def test_limit_beyond_the_end_finishes_the_run(tmp_path: Path) -> None:
    result = reconv.train("quickstart", out=tmp_path / "run", overrides=OVERRIDES, stop_after="20step")
    assert (result.summary["reason"], result.summary["resume_command"]) == ("finished", None)


def test_profile_beyond_the_limit_is_refused_before_the_run_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="step 9 cannot be profiled") as error:
        reconv.train(
            "quickstart",
            out=tmp_path / "run",
            overrides=[*OVERRIDES, ("profile", [8, 9], "--profile")],
            stop_after="8step",
        )
    assert "--stop-after 8step" in error.value.why
    assert not (tmp_path / "run").exists()


def test_resume_takes_the_options_of_the_last_command(tmp_path: Path) -> None:
    from reconv.cli.commands.resume import stored_options

    run = tmp_path / "run"
    words = ["train", "quickstart", "--out", str(run), *WORDS, "--device", "cpu", "--nic", "lo"]
    options = RunOptions("quickstart", OVERRIDES, out=run, device="cpu", stop_after="2step")
    run_training(replace(options, command=["reconv", *words]), None)
    assert stored_options(run / "events.jsonl") == {"device": "cpu", "devices": None, "nic": "lo"}
    resumed = replace(options, recipe=str(run / "recipe.yaml"), overrides=(), resume=True)
    run_training(replace(resumed, command=["reconv", "resume", str(run), "--devices", "2"]), None)
    assert stored_options(run / "events.jsonl") == {"device": "cpu", "devices": 2, "nic": "lo"}


def test_resume_of_a_directory_without_a_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("resume", str(tmp_path / "nothing")) == 4
    assert "no such run" in capsys.readouterr().err
