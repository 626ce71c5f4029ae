"""Laws 1 to 4 for class weights and samplers: resume, micro-batches, ranks and pipelines change nothing."""

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
from reconv.logging.events import Event, TrainProgress

from .conftest import Outcome, Train

SHORT = {
    "length": "6step",
    "schedule.warmup": "2step",
    "save.every": "6step",
    "log.every": "1step",
    "evaluate.every": "off",
    "data.subset_percent": "20",
    "batch.size": "48",
    "batch.group": "12",
    "batch.micro": "48",
    "engine.num_threads": "1",
    "parallel.reduce": "ordered",
}
WEIGHTS = {
    "data.sampler": "balanced",
    "loss.class_weights": "[0.3, 1.7, 2.9, 0.01, 5.3, 1.1, 0.7, 13.1, 0.9, 2.3]",
    "loss.label_smoothing": "0.1",
}
CASES = {
    "weights": WEIGHTS,
    "multilabel": {
        "task": "multilabel",
        "expect": "null",
        "data.source": "synthetic",
        "data.subset_percent": "100",
        "loss.class_weights": "balanced",
        "loss.label_smoothing": "0.1",
        "augment.mixup.alpha": "0.3",
    },
    "bce": {
        "loss.name": "bce",
        "loss.class_weights": "balanced",
        "augment.cutmix.alpha": "1.0",
        "augment.repeats": "3",
        "augment.auto_augment": "randaugment",
        "augment.randaugment.implementation": "timm",
        "augment.randaugment.magnitude_std": "0.5",
        "model.options.drop_path_rate": "0.2",
    },
}
each_case = pytest.mark.parametrize("settings", [pytest.param(case, id=name) for name, case in CASES.items()])


def differing(one: Outcome, other: Outcome) -> list[str]:
    ours, theirs = one.bits(), other.bits()
    assert len(ours) > 40 and set(ours) == set(theirs)
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def progress(outcome: Outcome) -> list[object]:
    events = read_events(outcome.folder.events)
    found = [(event.step, event.loss, event.metrics) for event in events if isinstance(event, TrainProgress)]
    assert len(found) == 6
    return found


def train_here(out: str, settings: dict[str, str]) -> int:
    given = [(field, value, "--set") for field, value in settings.items()]
    return reconv.train("quickstart", out=out, overrides=given).exit_code


@each_case
def test_micro_batches_ranks_and_a_resume_give_the_same_bits(
    train: Train, tmp_path: Path, settings: dict[str, str]
) -> None:
    settings = {**SHORT, **settings}
    one = train("one", settings)
    split = train("split", {**settings, "batch.micro": "12"})
    assert differing(one, split) == []
    assert progress(split) == progress(one)
    assert in_ranks(2, train_here, str(tmp_path / "ranks"), settings) == [0, 0]
    ranks = Outcome(tmp_path / "ranks", {})
    assert differing(one, ranks) == []
    assert progress(ranks) == progress(one)

    def stop(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    given = [(field, value, "--set") for field, value in settings.items()]
    with pytest.raises(PreemptedError):
        reconv.train("quickstart", out=tmp_path / "parts", overrides=given, on_event=stop)
    assert differing(one, train("parts", settings, resume=True)) == []


def test_a_pipeline_with_class_weights_equals_no_pipeline(train: Train, tmp_path: Path) -> None:
    settings = {**SHORT, **WEIGHTS, "parallel.reduce": "fast", "batch.micro": "12"}
    stages = {"parallel.pipeline_stages": "2", "parallel.pipeline_splits": "[layer2.0]"}
    one = train("one", settings)
    assert in_ranks(2, train_here, str(tmp_path / "stages"), {**settings, **stages}) == [0, 0]
    pipeline = Outcome(tmp_path / "stages", {})
    assert differing(one, pipeline) == []
    assert progress(pipeline) == progress(one)


@pytest.mark.parametrize("field", ["data.sampler", "loss.class_weights"])
def test_the_setting_changes_the_result(train: Train, field: str) -> None:
    """Otherwise the tests above would hold trivially."""
    assert differing(train("without", SHORT), train("with", {**SHORT, field: WEIGHTS[field]})) != []
