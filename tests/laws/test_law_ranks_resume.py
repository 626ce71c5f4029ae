"""Runs resumed on another number of ranks, evaluation on several ranks, and bad images counted over all ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from ranks import in_ranks

import reconv
from reconv.core.errors import PreemptedError
from reconv.logging.event_log import read_events
from reconv.logging.events import AttemptStarted, BadImageSkipped, EvalFinished, Event, TrainProgress

from .conftest import Outcome
from .test_law_ranks import MIXED, SHORT, differing, losses, scores, trained

ORDERED = {**SHORT, **MIXED, "parallel.reduce": "ordered", "length": "10step", "save.every": "10step"}
ORDERED |= {"evaluate.every": "10step", "batch.size": "100", "batch.group": "25", "batch.micro": "25"}


def train_until_signalled(out: str, settings: dict[str, str], at_step: int) -> int:
    """Train, and send one rank a stop signal after some steps."""

    def on_event(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == at_step:
            os.kill(os.getpid(), signal.SIGTERM)

    given = [(field, value, "--set") for field, value in settings.items()]
    try:
        return reconv.train("quickstart", out=out, overrides=given, on_event=on_event).exit_code
    except PreemptedError as error:
        return error.code


def resume_here(out: str, settings: dict[str, str]) -> int:
    given = [(field, value, "--set") for field, value in settings.items()]
    return reconv.train("quickstart", out=out, overrides=given, resume=True).exit_code


def test_run_stopped_on_4_ranks_and_resumed_on_2_equals_uninterrupted_run() -> None:
    whole = trained(1, ORDERED)
    folder = Path.cwd() / "changed"
    assert in_ranks(4, train_until_signalled, str(folder), ORDERED, 3) == [75] * 4
    stopped = Outcome(folder, {})
    assert stopped.checkpoint.name in ("step-000000003", "step-000000004")
    assert in_ranks(2, resume_here, str(folder), ORDERED) == [0, 0]
    changed = Outcome(folder, {})
    assert differing(whole, changed) == []
    attempts = [event for event in read_events(folder / "events.jsonl") if isinstance(event, AttemptStarted)]
    assert [attempt.from_step for attempt in attempts] == [0, int(stopped.checkpoint.name[-1])]
    assert sorted(path.name for path in (folder / "logs").iterdir()) == [f"rank-{rank}.log" for rank in range(4)]


@pytest.mark.slow
def test_evaluation_and_report_images_do_not_depend_on_the_number_of_ranks() -> None:
    settings = {
        **ORDERED,
        "length": "1step",
        "schedule.warmup": "0ep",
        "batch.group": "14",
        "evaluate.batch_size": "32",
    }
    settings["batch.micro"] = "auto"
    one = trained(1, settings)
    assert len(scores(one)) == 2  # raw and averaged
    image = (one.folder.images / "mistakes.png").read_bytes()
    for size in (2, 3, 4, 7):
        several = trained(size, settings)
        assert scores(several) == scores(one)
        assert (several.folder.images / "mistakes.png").read_bytes() == image


def write_images_with_bad_ones(folder: Path) -> None:
    """Two classes of small images, some of them not images at all."""
    from PIL import Image

    for split, count in (("train", 24), ("val", 9)):
        for label, shade in (("dark", 40), ("light", 200)):
            (folder / split / label).mkdir(parents=True)
            for number in range(count):
                path = folder / split / label / f"{number:02}.png"
                Image.new("L", (8, 8), shade + number).save(path)
                if number in (3, 11) or (split, number) == ("val", 8):
                    path.write_bytes(b"no image")


def logged(outcome: Outcome) -> list[Event]:
    events = read_events(outcome.folder.events)
    return [event for event in events if isinstance(event, BadImageSkipped)]


def test_bad_images_are_skipped_and_counted_as_on_one_rank() -> None:
    write_images_with_bad_ones(Path.cwd() / "images")
    settings = {
        **ORDERED,
        "length": "3ep",
        "schedule.warmup": "0ep",
        "data.source": "folder",
        "data.subset_percent": "100",
    }
    settings |= {"data.path": str(Path.cwd() / "images"), "data.bad_images": "skip up to 20", "evaluate.every": "1ep"}
    settings |= {
        "batch.size": "16",
        "batch.group": "4",
        "batch.micro": "4",
        "evaluate.batch_size": "4",
        "save.every": "1ep",
    }
    one, several = trained(1, settings), trained(3, settings)
    assert len(logged(one)) == 8
    by_place = [sorted(logged(run), key=lambda event: (event.step, event.split, event.index)) for run in (one, several)]
    assert by_place[0] == by_place[1]
    assert differing(one, several) == []
    assert losses(one) == losses(several)
    scored = [[e for e in read_events(run.folder.events) if isinstance(e, EvalFinished)] for run in (one, several)]
    assert [(e.num_samples, e.skipped, e.metrics) for e in scored[0]] == [
        (e.num_samples, e.skipped, e.metrics) for e in scored[1]
    ]
    assert torch.equal(one.bits()["model/fc.weight"], several.bits()["model/fc.weight"])
