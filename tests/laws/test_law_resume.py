"""Law 1: a run that is stopped anywhere and resumed equals the run left alone, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import reconv
from reconv.errors import PreemptedError, RecipeError
from reconv.report.events import Attempt, Event, Noted, Progress, Saved, read_events

from .conftest import EVERYTHING, Outcome, Train


def assert_same_bits(one: Outcome, other: Outcome) -> None:
    a, b = one.bits(), other.bits()
    assert a.keys() == b.keys()
    assert len(a) > 60  # model, average and momentum of every layer
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert different == []
    assert one.checkpoint.name == other.checkpoint.name


@pytest.mark.parametrize("stop_at", [1, 3, 5, 6, 9])
def test_stop_at_any_step_and_resume_equals_uninterrupted_run(train: Train, tmp_path: Path, stop_at: int) -> None:
    whole = train("whole", EVERYTHING)
    given = [(field, value, "--set") for field, value in EVERYTHING.items()]

    def stop(event: Event) -> None:
        if isinstance(event, Progress) and event.step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(PreemptedError):
        reconv.train(
            "quickstart", out=tmp_path / "parts", overrides=[*given, ("log.every", "1step", "--set")], on_event=stop
        )
    resumed = train("parts", {**EVERYTHING, "log.every": "1step"}, resume=True)
    assert_same_bits(whole, resumed)
    attempts = [e for e in read_events(resumed.folder.events) if isinstance(e, Attempt)]
    assert [a.from_step for a in attempts] == [0, stop_at]


def test_resume_with_other_workers_equals_uninterrupted_run(train: Train, tmp_path: Path) -> None:
    whole = train("whole", EVERYTHING)

    def stop(event: Event) -> None:
        if isinstance(event, Saved) and event.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    given = [(field, value, "--set") for field, value in EVERYTHING.items()]
    with pytest.raises(PreemptedError):
        reconv.train("quickstart", out=tmp_path / "parts", overrides=given, on_event=stop)
    resumed = train("parts", {**EVERYTHING, "data.workers": "2", "data.prefetch": "4"}, resume=True)
    assert_same_bits(whole, resumed)


# Importing torch takes seconds, so one process imports it and forks a run for every line it is sent.
NURSERY = """
import os, sys
import reconv.run
given = [tuple(s.split('=', 1)) + ('--set',) for s in sys.argv[2:]]
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        reconv.run.train('quickstart', out=sys.argv[1], resume=True, overrides=given)
        os._exit(0)
    print(pid, flush=True)
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""
NUM_KILLS = 24


def test_sigkills_at_random_moments_end_with_the_bits_of_a_run_left_alone(train: Train, tmp_path: Path) -> None:
    """Real processes, killed at moments drawn over start, steps, evaluation and saves, until one is let through."""
    settings = {**EVERYTHING, "length": "200step", "data.percent": "50", "save.every": "2step"}
    whole = train("whole", settings)
    arguments = [f"{field}={value}" for field, value in settings.items()]
    draw = random.Random(0)
    out = tmp_path / "killed"
    resumed_from, during_a_save = set(), 0
    with subprocess.Popen(
        [sys.executable, "-c", NURSERY, str(out), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as nursery:
        for number in range(NUM_KILLS):
            pid = _fork(nursery)
            _wait_for_a_moment(out, ("at the start", "after a save", "in a save")[number % 3], draw)
            os.kill(pid, signal.SIGKILL)
            assert _exit_code(nursery) == -signal.SIGKILL
            resumed_from.add(_newest_step(out))
            during_a_save += any((out / "checkpoints").glob(".tmp*"))
        _fork(nursery)
        assert _exit_code(nursery) == 0
    assert len(resumed_from) > 5, f"the kills hit too few places: {resumed_from}"
    assert during_a_save > 0
    result = reconv.train("quickstart", out=out, resume=True, overrides=[(f, v, "--set") for f, v in settings.items()])
    assert_same_bits(whole, Outcome(result.folder, result.summary))


def _newest_step(out: Path) -> str:
    return max((path.name for path in (out / "checkpoints").glob("step-*")), default="none")


def _wait_for_a_moment(out: Path, kind: str, draw: random.Random) -> None:
    """Wait for what the run does, not for the clock alone, so that a busy machine is hit in the same places."""
    before = _newest_step(out)
    if kind != "at the start":
        while _newest_step(out) == before:
            time.sleep(0.002)
    if kind == "in a save":
        while not any((out / "checkpoints").glob(".tmp*")):
            time.sleep(0.0005)
    else:
        time.sleep(draw.uniform(0, 0.2))


def _fork(nursery: subprocess.Popen[str]) -> int:
    assert nursery.stdin is not None and nursery.stdout is not None
    nursery.stdin.write("run\n")
    nursery.stdin.flush()
    return int(nursery.stdout.readline())


def _exit_code(nursery: subprocess.Popen[str]) -> int:
    assert nursery.stdout is not None
    return int(nursery.stdout.readline())


def test_a_torn_newest_checkpoint_is_passed_over_and_said(train: Train, tmp_path: Path) -> None:
    whole = train("whole", EVERYTHING)
    part = train("part", {**EVERYTHING, "length": "1ep"})
    file = part.checkpoint / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    resumed = train("part", EVERYTHING, resume=True)
    assert resumed.bits().keys() == whole.bits().keys()
    notes = [e.text for e in read_events(resumed.folder.events) if isinstance(e, Noted)]
    assert any("fell back" in text and part.checkpoint.name in text for text in notes), notes


def test_nothing_to_resume_starts_afresh_and_says_so(train: Train) -> None:
    run = train("fresh", {**EVERYTHING, "length": "1ep"}, resume=True)
    notes = [e.text for e in read_events(run.folder.events) if isinstance(e, Noted)]
    assert any("starting afresh" in text for text in notes), notes


def test_a_finished_run_is_left_alone(train: Train) -> None:
    first = train("run", {**EVERYTHING, "length": "1ep"})
    before = first.folder.events.read_bytes()
    again = train("run", {**EVERYTHING, "length": "1ep"}, resume=True)
    assert again.summary["exit_code"] == 0
    assert again.folder.events.read_bytes() == before


def test_a_finished_run_can_be_extended_and_says_so(train: Train) -> None:
    train("run", {**EVERYTHING, "length": "1ep"})
    longer = train("run", EVERYTHING, resume=True)
    assert longer.summary["steps"] == longer.summary["total_steps"] == 10
    notes = [e.text for e in read_events(longer.folder.events) if isinstance(e, Noted)]
    assert any("1ep -> 2ep" in text for text in notes), notes


def test_a_changed_recipe_is_refused_with_every_difference(train: Train) -> None:
    train("run", {**EVERYTHING, "length": "1ep"})
    with pytest.raises(RecipeError) as refusal:
        train("run", {**EVERYTHING, "length": "1ep", "seed": "3", "batch.size": "32"}, resume=True)
    assert "seed" in str(refusal.value) and "batch.size" in str(refusal.value)
    assert refusal.value.code == 2
