"""Bad images: a run that skips some resumes bitwise, with any number of workers."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import reconv
from reconv.core.errors import DataError, ExitCode, PreemptedError
from reconv.logging.event_log import latest_by_step, read_events
from reconv.logging.events import AttemptStarted, BadImageSkipped, EvalFinished, Event, TrainProgress

from .conftest import Outcome

SETTINGS = {
    "data.source": "folder",
    "data.bad_images": "skip up to 4",
    "batch.size": "8",
    "batch.group": "4",
    "length": "3ep",
    "evaluate.every": "1ep",
    "save.every": "2step",
    "save.keep_last": "9",
    "log.every": "1step",
    "augment.mixup.alpha": "0.2",
    "augment.hflip": "0.5",
    "ema.decay": "0.9",
}


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """28 training and 8 validation images of two classes; two and one of them do not decode."""
    rng = np.random.default_rng(0)
    root = tmp_path / "damaged"
    for split, count in (("train", 14), ("val", 4)):
        for name in ("cat", "dog"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(rng.integers(0, 256, (20, 20), np.uint8)).save(folder / f"{number:02}.png")
    for path in ("train/cat/03.png", "train/dog/11.png", "val/dog/02.png"):
        content = (root / path).read_bytes()
        (root / path).write_bytes(content[: len(content) // 2])
    return root


def run(
    data: Path,
    out: Path,
    resume: bool = False,
    on_event: Callable[[Event], None] | None = None,
    **changed: str,
) -> Outcome:
    given = {**SETTINGS, **{name.replace("__", "."): value for name, value in changed.items()}}
    overrides = [(field, value, "--set") for field, value in given.items()]
    result = reconv.train("quickstart", data=data, out=out, resume=resume, overrides=overrides, on_event=on_event)
    return Outcome(result.folder, result.summary)


def assert_same_bits(one: Outcome, other: Outcome) -> None:
    a, b = one.bits(), other.bits()
    assert a.keys() == b.keys()
    assert len(a) > 60
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def logged(outcome: Outcome) -> list[BadImageSkipped]:
    return [e for e in latest_by_step(read_events(outcome.folder.events)) if isinstance(e, BadImageSkipped)]


def test_bad_images_are_listed_once_and_excluded_from_the_metric(damaged: Path, tmp_path: Path) -> None:
    outcome = run(damaged, tmp_path / "run")
    events = read_events(outcome.folder.events)
    bad = [e for e in events if isinstance(e, BadImageSkipped)]
    expected = {damaged / "train/cat/03.png", damaged / "train/dog/11.png", damaged / "val/dog/02.png"}
    assert {Path(e.path) for e in bad} == expected
    assert len(bad) == 3
    scored = [e for e in events if isinstance(e, EvalFinished)]
    assert len(scored) == 6  # raw and averaged weights, three times
    assert {(e.num_samples, e.skipped) for e in scored} == {(7, 1)}
    assert (outcome.summary["bad_images"], outcome.summary["bad_val_images"]) == (3, 1)
    page = (outcome.folder.path / "report.html").read_text()
    assert "Bad images" in page
    assert all(page.count(str(path)) == 1 for path in expected)


@pytest.mark.parametrize("stop_at", [1, 4, 7])
def test_resume_with_bad_images_equals_the_uninterrupted_run(damaged: Path, tmp_path: Path, stop_at: int) -> None:
    whole = run(damaged, tmp_path / "whole", data__num_workers="0")

    def stop(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(PreemptedError):
        run(damaged, tmp_path / "parts", on_event=stop, data__num_workers="8", data__prefetch="4")
    resumed = run(damaged, tmp_path / "parts", resume=True, data__num_workers="2")
    assert_same_bits(whole, resumed)
    assert logged(whole) == logged(resumed)
    assert len(logged(whole)) == 3
    attempts = [e for e in read_events(resumed.folder.events) if isinstance(e, AttemptStarted)]
    assert [a.from_step for a in attempts] == [0, stop_at]


def test_run_stopped_by_a_bad_image_can_resume_with_skip(damaged: Path, tmp_path: Path) -> None:
    whole = run(damaged, tmp_path / "whole")
    with pytest.raises(DataError) as caught:
        run(damaged, tmp_path / "parts", data__bad_images="stop")
    assert (caught.value.code, Path(caught.value.where).suffix) == (ExitCode.DATA, ".png")
    assert_same_bits(whole, run(damaged, tmp_path / "parts", resume=True))


def test_repaired_dataset_can_resume_with_stop(damaged: Path, tmp_path: Path) -> None:
    good = (damaged / "val/dog/01.png").read_bytes()

    def stop(event: Event) -> None:
        if isinstance(event, EvalFinished):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(PreemptedError):
        run(damaged, tmp_path / "run", on_event=stop)
    for path in ("train/cat/03.png", "train/dog/11.png", "val/dog/02.png"):
        size = (damaged / path).stat().st_size
        small = io.BytesIO()
        Image.fromarray(np.zeros((2, 2), np.uint8)).save(small, "PNG")
        assert len(small.getvalue()) < size < len(good)
        (damaged / path).write_bytes(small.getvalue().ljust(size, b"\0"))  # the fingerprint looks at sizes
    outcome = run(damaged, tmp_path / "run", resume=True, data__bad_images="stop")
    scored = [e for e in read_events(outcome.folder.events) if isinstance(e, EvalFinished)]
    assert [(e.num_samples, e.skipped) for e in (scored[0], scored[-1])] == [(7, 1), (8, 0)]


def test_bad_image_count_continues_after_resume(damaged: Path, tmp_path: Path) -> None:
    """Two are tolerated: the third ends the run, also if the first two were before the resume."""
    met: list[BadImageSkipped] = []

    def stop(event: Event) -> None:
        if isinstance(event, BadImageSkipped):
            met.append(event)
        if isinstance(event, TrainProgress) and len(met) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(PreemptedError):
        run(damaged, tmp_path / "run", on_event=stop, data__bad_images="skip up to 2")
    assert {e.split for e in met} == {"train"}
    with pytest.raises(DataError, match=r"3 images cannot be read, and data\.bad_images tolerates 2"):
        run(damaged, tmp_path / "run", resume=True, data__bad_images="skip up to 2")


def test_evaluate_skips_the_same_images_and_logs_them(damaged: Path, tmp_path: Path) -> None:
    outcome = run(damaged, tmp_path / "run")
    said: list[str] = []
    [result] = reconv.evaluate(outcome.folder.path, backend="eager", log=said.append)
    assert (result.num_samples, result.skipped) == (7, 1)
    assert len(said) == 1
    assert "02.png" in said[0]
    assert result.metrics["top1"] == outcome.summary["value"]
