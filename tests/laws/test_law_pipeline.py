"""Law 4: a pipeline equals no pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import in_ranks

import reconv
from reconv.core.errors import RecipeError
from reconv.logging.event_log import read_events
from reconv.logging.events import EvalFinished, TrainProgress
from reconv.models import build_model
from reconv.models.pipeline_split import balance, split_stages, stage_flops

from .conftest import Outcome

SHORT = {
    "length": "4step",
    "schedule.warmup": "0ep",
    "save.every": "4step",
    "log.every": "1step",
    "evaluate.every": "4step",
    "data.subset_percent": "30",
    "batch.size": "48",
    "batch.group": "8",
    "batch.micro": "8",
    "engine.num_threads": "1",
    "augment.mixup.alpha": "0.3",
    "ema.decay": "0.9",
}
TWO = {"parallel.pipeline_stages": "2", "parallel.pipeline_splits": "[layer2.0]"}
THREE = {"parallel.pipeline_stages": "3", "parallel.pipeline_splits": "[layer2.0, head]"}


def train_here(out: str, settings: dict[str, str], resume: bool = False) -> int:
    given = [(field, value, "--set") for field, value in settings.items()]
    return reconv.train("quickstart", out=out, overrides=given, resume=resume).exit_code


def trained(size: int, settings: dict[str, str], name: str) -> Outcome:
    folder = Path.cwd() / name
    assert in_ranks(size, train_here, str(folder), settings) == [0] * size
    return Outcome(folder, {})


def differing(one: Outcome, other: Outcome) -> list[str]:
    ours, theirs = one.bits(), other.bits()
    assert len(ours) > 60 and set(ours) == set(theirs)
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def logged_metrics(outcome: Outcome) -> list[object]:
    events = read_events(outcome.folder.events)
    losses = [(event.loss, event.metrics) for event in events if isinstance(event, TrainProgress)]
    scores = [dict(event.metrics) for event in events if isinstance(event, EvalFinished)]
    assert len(losses) == 4 and scores
    return [*losses, *scores]


@pytest.mark.parametrize(
    ("schedule", "cut"),
    [
        ("1f1b", TWO),
        pytest.param("sequential", TWO, marks=pytest.mark.slow),
        pytest.param("gpipe", THREE, marks=pytest.mark.slow),
    ],
)
def test_pipeline_equals_one_process_bitwise(schedule: str, cut: dict[str, str]) -> None:
    """Micro-batches add their gradients in the same order, and other stages add zeros."""
    one = trained(1, SHORT, "one")
    several = trained(
        int(cut["parallel.pipeline_stages"]), {**SHORT, **cut, "parallel.pipeline_schedule": schedule}, "several"
    )
    assert differing(one, several) == []
    assert logged_metrics(one) == logged_metrics(several)


@pytest.mark.slow
def test_two_pipeline_replicas_agree_to_1e_12_in_fp64() -> None:
    settings = {**SHORT, "precision.mode": "fp64", "batch.micro": "16", "batch.size": "64"}
    one, several = trained(1, settings, "one"), trained(4, {**settings, **TWO}, "several")
    ours, theirs = one.bits(), several.bits()
    assert len(ours) > 60 and set(ours) == set(theirs)
    assert 0 < max((ours[name].double() - theirs[name].double()).abs().max().item() for name in ours) < 1e-12


@pytest.mark.slow
def test_pipeline_of_a_model_with_auxiliary_heads() -> None:
    settings = {
        **SHORT,
        "model.name": "googlenet",
        "model.options.aux_heads": "true",
        "length": "1step",
        "save.every": "1step",
        "evaluate.every": "off",
        "batch.size": "8",
        "batch.group": "4",
        "batch.micro": "4",
        "data.preprocess.size": "96",
        "data.preprocess.resize": "96",
        "augment.mixup.alpha": "0",
    }
    cut = {"parallel.pipeline_stages": "2", "parallel.pipeline_splits": "[inception4b]"}
    assert differing(trained(1, settings, "one"), trained(2, {**settings, **cut}, "several")) == []


@pytest.mark.parametrize("splits", ["[]", "[stem]"])
def test_missing_or_unknown_splits_are_an_error_with_a_suggestion(splits: str) -> None:
    given = [("parallel.pipeline_stages", "2", "--set"), ("parallel.pipeline_splits", splits, "--set")]
    [error] = in_ranks(2, refused, given)[:1]
    assert "layer1.0, layer2.0, layer3.0, head" in error and "--set 'parallel.pipeline_splits=[layer2.0]'" in error


def refused(given: list[tuple[str, str, str]]) -> str:
    try:
        reconv.train("quickstart", overrides=given, out=Path.cwd() / "refused")
    except reconv.core.errors.ReconvError as error:
        return str(error)
    return ""


def test_balanced_splits_cover_every_stage_once() -> None:
    with torch.device("meta"):
        model = build_model("resnet34")
    work = stage_flops(model, (3, 224, 224))
    assert sum(work.values()) == pytest.approx(2 * 3.66e9, rel=0.01)  # twice torchvision's count of multiply-adds
    splits = balance(work, 4)
    loads = [sum(work[name] for name, _ in part) for part in split_stages(model, splits)]
    assert sum(loads) == sum(work.values()) and max(loads) < 1.15 * sum(loads) / 4


@pytest.mark.parametrize(
    "settings",
    [
        {**TWO, "parallel.pipeline_splits": "[layer2.0, head]"},
        {**TWO, "parallel.reduce": "ordered"},
        {**TWO, "memory.activation_checkpointing": "all"},
        {**TWO, "batch.size": "44", "batch.group": "8", "batch.micro": "8"},
        TWO,
    ],
)
def test_settings_incompatible_with_pipelines_are_an_error(settings: dict[str, str], tmp_path: Path) -> None:
    given = [(field, value, "--set") for field, value in settings.items()]
    with pytest.raises(RecipeError, match="pipeline"):
        reconv.train("quickstart", overrides=given, out=tmp_path / "refused")
