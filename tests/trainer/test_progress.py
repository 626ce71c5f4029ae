"""What a small real run logs and summarizes: memory, parameters, throughput, training accuracy."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import reconv
from reconv.build.model import build_network
from reconv.cli import main
from reconv.device import open_device
from reconv.logging.events import CheckpointSaved, EvalFinished, Event, TrainProgress
from reconv.models import build_model
from reconv.recipe.loader import load
from reconv.trainer.callbacks.base import TrainerCallback
from reconv.trainer.loop import Trainer
from reconv.trainer.run import RunOutcome, TrainingRun

SHORT = {"length": "4step", "data.subset_percent": "20", "log.every": "1step", "schedule.warmup": "1step"}


def train(folder: Path, seen: list[Event] | None = None, **fields: str) -> RunOutcome:
    given = [(name, value, "--set") for name, value in (SHORT | fields).items()]
    return reconv.train("quickstart", out=folder, overrides=given, on_event=None if seen is None else seen.append)


def resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def test_logged_memory_is_the_resident_set_size(tmp_path: Path) -> None:
    seen: list[Event] = []
    before = resident_bytes()
    summary = train(tmp_path / "run", seen).summary
    after = resident_bytes()
    logged = [event.memory_bytes for event in seen if isinstance(event, TrainProgress)]
    assert len(logged) == 4
    assert logged == sorted(logged)
    assert before <= logged[0] <= logged[-1] <= summary["peak_memory_bytes"] <= after
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["peak_memory_bytes"] >= logged[-1]


def fit(folder: Path, seen: list[Event], *callbacks: TrainerCallback, is_deferred: bool, **fields: str) -> None:
    """Train with values that are logged at once, as on a CPU, or one step later, as on a GPU."""
    given = [(name, value, "--set") for name, value in (SHORT | {"log.every": "2step"} | fields).items()]
    with TrainingRun.open("quickstart", given, out=folder, on_event=seen.append) as run:
        trainer = run.trainer()
        trainer.progress.is_deferred = is_deferred
        trainer.callbacks = [*trainer.callbacks, *callbacks]
        trainer.fit()


@pytest.mark.parametrize("background", ["true", "false"])
def test_values_that_are_read_later_are_logged_before_what_follows_their_step(tmp_path: Path, background: str) -> None:
    fields = {"length": "7step", "evaluate.every": "4step", "save.every": "3step", "save.background": background}
    at_once: list[Event] = []
    later: list[Event] = []
    fit(tmp_path / "at-once", at_once, is_deferred=False, **fields)
    fit(tmp_path / "later", later, is_deferred=True, **fields)
    lines = [
        [(e.step, e.loss, e.grad_norm, e.metrics) if isinstance(e, TrainProgress) else e.step for e in events]
        for seen in (at_once, later)
        for events in [[e for e in seen if isinstance(e, TrainProgress | EvalFinished)]]
    ]
    assert lines[0] == lines[1] and len(lines[0]) == 6
    saves = [position for position, event in enumerate(later) if isinstance(event, CheckpointSaved)]
    assert len(saves) >= 2
    for position in saves:
        logged = [event.step for event in later[:position] if isinstance(event, TrainProgress)]
        assert later[position].step // 2 * 2 in logged  # type: ignore[attr-defined]


def test_a_log_line_is_kept_when_a_callback_fails(tmp_path: Path) -> None:
    seen: list[Event] = []
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, seen, FailsAt(2), is_deferred=True)
    assert [event.step for event in seen if isinstance(event, TrainProgress)] == [2]


class FailsAt(TrainerCallback):
    """Fails when the batch of a step is fetched."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_batch_fetch_end(self, trainer: Trainer, step: int) -> None:
        if step == self._step:
            raise ZeroDivisionError


def test_summary_has_the_number_of_parameters(tmp_path: Path) -> None:
    result = train(tmp_path / "run", **{"evaluate.every": "off", "model.name": "resnet8_cifar"})
    network = build_model("resnet8_cifar", num_classes=10, in_channels=1)
    assert result.summary["num_parameters"] == sum(parameter.numel() for parameter in network.parameters())


def test_summary_has_wall_time_and_number_of_images(tmp_path: Path) -> None:
    begin_s = time.perf_counter()
    summary = train(tmp_path / "run", length="6step").summary
    passed_s = time.perf_counter() - begin_s
    assert summary["images"] == 6 * 64
    assert 0 < summary["wall_s"] <= passed_s
    # The first three steps are not timed; the others took no longer than everything together.
    assert summary["compute_images_per_s"] >= summary["images_per_s"] >= 3 * 64 / passed_s


def test_training_top1_is_a_fraction_of_the_batch_and_increases(tmp_path: Path) -> None:
    seen: list[Event] = []
    train(tmp_path / "run", seen, length="40step", **{"evaluate.every": "off", "batch.size": "64"})
    top1 = [event.metrics["top1"] for event in seen if isinstance(event, TrainProgress)]
    assert len(top1) == 40
    assert all((64 * value).is_integer() for value in top1)
    assert sum(top1[-10:]) > 2 * sum(top1[:10])


def test_run_without_evaluation_can_be_evaluated_later(tmp_path: Path) -> None:
    seen: list[Event] = []
    result = train(tmp_path / "run", seen, **{"evaluate.every": "off"})
    assert not any(isinstance(event, EvalFinished) for event in seen)
    assert (result.summary["value"], result.summary["steps"], result.exit_code) == (None, 4, 0)
    weights = sorted((tmp_path / "run" / "checkpoints").rglob("model.safetensors"))
    before = [file.read_bytes() for file in weights]
    [score] = reconv.evaluate(result.folder)
    assert (score.step, score.num_samples) == (4, 360)
    assert [file.read_bytes() for file in weights] == before


def test_metric_does_not_depend_on_the_evaluation_batch_size(tmp_path: Path) -> None:
    scores = [train(tmp_path / size, **{"evaluate.batch_size": size}).summary["value"] for size in ("7", "360")]
    assert scores[0] == scores[1] is not None


def test_channels_last_changes_the_memory_format_and_not_the_losses(tmp_path: Path) -> None:
    losses = {}
    for wish in ("on", "off"):
        recipe = load("quickstart", [("engine.channels_last", wish, "--set")]).recipe
        network = build_network(recipe, 10, open_device("cpu"))
        kernels = [weight for weight in network.model.parameters() if weight.ndim == 4 and min(weight.shape[1:]) > 1]
        assert {k.is_contiguous(memory_format=torch.channels_last) for k in kernels} == {wish == "on"}
        seen: list[Event] = []
        train(tmp_path / wish, seen, **{"engine.channels_last": wish, "evaluate.every": "off"})
        losses[wish] = [event.loss for event in seen if isinstance(event, TrainProgress)]
    assert losses["on"] == pytest.approx(losses["off"], rel=1e-4)


@pytest.fixture
def _kernels_as_before() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_kernels_as_before")
def test_deterministic_algorithms_are_reset_for_the_next_run(tmp_path: Path) -> None:
    seen: list[bool] = []
    for number, wanted in enumerate(("true", "false")):
        reconv.train(
            "quickstart",
            out=tmp_path / str(number),
            overrides=[(name, value, "--set") for name, value in (SHORT | {"engine.deterministic": wanted}).items()],
            on_event=lambda event: (
                seen.append(torch.are_deterministic_algorithms_enabled()) if isinstance(event, TrainProgress) else None
            ),
        )
    assert seen == [True] * 4 + [False] * 4


def test_data_option_takes_precedence_over_the_data_dir_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    for name in ("here", "there"):
        for split, kind in (("train", "a"), ("train", "b"), ("val", "a"), ("val", "b")):
            folder = tmp_path / name / split / f"{name}-{kind}"
            folder.mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (16, 16), (40 * number, 10, 10)).save(folder / f"{number}.png")
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "here"))
    fields = ["data.source=auto", "data.preprocess.channels=3", "data.preprocess.size=16", "batch.size=4", *_TINY]
    words = ["train", "quickstart", *(word for field in fields for word in ("--set", field)), "--json"]
    for more, expected in (([], "here"), (["--data", str(tmp_path / "there")], "there")):
        with pytest.raises(SystemExit) as end:
            main([*words, *more])
        said = capsys.readouterr()
        assert end.value.code == 0, said.err
        assert str(tmp_path / expected) in said.out
        assert str(tmp_path / ("there" if expected == "here" else "here")) not in said.out


_TINY = ("length=2step", "schedule.warmup=1step", "data.preprocess.mean=[0.5,0.5,0.5]", "data.preprocess.std=[1,1,1]")
