"""Runs whose recipe is derived from the data: one line trains, resume keeps the values, weights tell the network."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from box_examples import write_coco
from click.testing import CliRunner
from data_examples import encode, noise
from ranks import in_ranks

import reconv
from reconv.build.derived_recipe import load_derived
from reconv.cli import reconv as command_line
from reconv.core.errors import PreemptedError, RecipeError, UsageError
from reconv.logging.event_log import read_events
from reconv.logging.events import Event, LogMessage, RunPlanned, TrainProgress
from reconv.models import build_model
from reconv.recipe.loader import Override, load

UNFROZEN = "the backbone is unfrozen: all parameters are trained from here on"
SHORT = [("length", "2ep", "--epochs"), ("engine.num_threads", 1, "test")]


def write_images(root: Path, counts: dict[str, tuple[int, int]], side: int = 16) -> Path:
    """Class folders with (training, validation) images."""
    for number, (name, split_counts) in enumerate(counts.items()):
        for split, count in zip(("train", "val"), split_counts, strict=True):
            folder = root / split / name
            folder.mkdir(parents=True, exist_ok=True)
            for index in range(count):
                seed = len(split) * 1000 + number * 100 + index
                pixels = noise(side, side + index % 5, 3, seed) // 4 + 60 * number
                (folder / f"{index:03}.jpg").write_bytes(encode(pixels, "JPEG"))
    return root


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    return write_images(tmp_path / "flowers", {"daisy": (20, 4), "rose": (5, 2)})


def notes_of(folder: Path) -> list[str]:
    return [event.text for event in read_events(folder / "events.jsonl") if isinstance(event, LogMessage)]


def values_of(folder: Path) -> dict[str, object]:
    recipe = load(str(folder / "recipe.yaml")).recipe
    return {
        "model": recipe.model.name,
        "batch": recipe.batch.size,
        "size": recipe.data.preprocess.size,
        "weights": recipe.loss.class_weights,
        "derive": recipe.derive,
    }


def test_one_line_trains_and_the_run_holds_concrete_values(flowers: Path, tmp_path: Path) -> None:
    result = reconv.train("finetune", data=flowers, out=tmp_path / "run", overrides=SHORT)
    assert result.exit_code == 0
    assert values_of(result.folder) == {
        "model": "resnet20_cifar",
        "batch": 8,
        "size": 32,
        "weights": "balanced",
        "derive": (),
    }
    [plan] = [event for event in read_events(result.folder / "events.jsonl") if isinstance(event, RunPlanned)]
    assert "derived loss.class_weights balanced: largest class 20 / smallest 5 = 4.0, above 3" in plan.lines
    assert plan.total_steps == 8


def stop_at(step: int) -> object:
    def stop(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return stop


def test_a_resumed_run_keeps_its_values_and_refuses_other_data(flowers: Path, tmp_path: Path) -> None:
    given = [*SHORT, ("log.every", "1step", "test")]
    whole = reconv.train("finetune", data=flowers, out=tmp_path / "whole", overrides=given).folder
    with pytest.raises(PreemptedError):
        reconv.train("finetune", data=flowers, out=tmp_path / "parts", overrides=given, on_event=stop_at(5))
    for index in range(200):  # enough for another batch size
        (flowers / f"train/rose/more{index}.jpg").write_bytes(encode(noise(16, 16, 3, index), "JPEG"))
    with pytest.raises(RecipeError, match="the data has changed since the run was started"):
        reconv.train("finetune", data=flowers, out=tmp_path / "parts", overrides=given, resume=True)
    for path in flowers.glob("train/rose/more*.jpg"):
        path.unlink()
    resumed = reconv.train("finetune", data=flowers, out=tmp_path / "parts", overrides=given, resume=True).folder
    one, other = (
        safetensors.torch.load_file(next((folder / "checkpoints").glob("step-*8/model.safetensors")))
        for folder in (whole, resumed)
    )
    assert [name for name in one if not torch.equal(one[name], other[name])] == [] and len(one) > 60


def test_weights_of_a_run_bring_their_network_and_images(
    flowers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"model.name": "resnet8_cifar", "data.preprocess.size": 24, "data.preprocess.mean": [0.4, 0.4, 0.4]}
    first = reconv.train(
        "finetune",
        data=flowers,
        out=tmp_path / "first",
        overrides=[*SHORT, *((k, v, "test") for k, v in settings.items())],
    ).folder
    tuned = reconv.train(
        "finetune", data=flowers, out=tmp_path / "tuned", overrides=[*SHORT, ("model.init", first, "--init")]
    ).folder
    recipe = load(str(tuned / "recipe.yaml")).recipe
    assert (recipe.model.name, recipe.data.preprocess.size) == ("resnet8_cifar", 24)
    assert recipe.data.preprocess.mean == (0.4, 0.4, 0.4)
    copied = tmp_path / "copied.safetensors"
    copied.write_bytes(next((first / "checkpoints").glob("*/model.safetensors")).read_bytes())
    by_file = load_derived("finetune", [("data.path", flowers, ""), ("model.init", copied, "")]).recipe
    assert by_file.data.preprocess.mean == (0.4, 0.4, 0.4)
    assert str(recipe.model.freeze_until) == "10%" and UNFROZEN in notes_of(tuned)
    by_name = load_derived("finetune", [("data.path", flowers, ""), ("model.init", "torchvision:resnet50.v2", "")])
    assert by_name.recipe.model.name == "resnet50"
    monkeypatch.setitem(sys.modules, "timm", None)  # not installed
    external = load_derived("finetune", [("data.path", flowers, ""), ("model.init", "timm:convnext_tiny.in12k", "")])
    assert external.recipe.model.name == "timm:convnext_tiny"


def test_the_network_of_a_weights_file_is_identified_or_asked_for(flowers: Path, tmp_path: Path) -> None:
    file, strange = tmp_path / "net.pth", tmp_path / "strange.pth"
    torch.save(build_model("resnet14_cifar", num_classes=7).state_dict(), file)
    torch.save({"conv.weight": torch.ones(3, 3)}, strange)
    given = [("data.path", flowers, "--data")]
    assert load_derived("finetune", [*given, ("model.init", file, "--init")]).recipe.model.name == "resnet14_cifar"
    with pytest.raises(UsageError, match="cannot be identified") as caught:
        load_derived("finetune", [*given, ("model.init", strange, "--init")])
    assert caught.value.hint == "add --model NAME, as in --model resnet50"
    named = [*given, ("model.init", strange, "--init"), ("model.name", "resnet18", "--model")]
    assert load_derived("finetune", named).recipe.model.name == "resnet18"


@pytest.fixture
def strong_features(tmp_path: Path) -> Path:
    """Weights of a network whose last layer gets inputs ten times as large as usual."""
    torch.manual_seed(0)
    model = build_model("resnet8_cifar", num_classes=7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("layer3") and ("bn2" in name or "downsample.1" in name):
                parameter.fill_(10.0)
    torch.save(model.state_dict(), tmp_path / "strong.pth")
    return tmp_path / "strong.pth"


def rate_of(data: Path, weights: Path, *more: Override) -> float:
    return load_derived("finetune", [("data.path", data, ""), ("model.init", weights, ""), *more]).recipe.schedule.lr


def test_a_run_from_weights_with_large_features_does_not_diverge(
    flowers: Path, strong_features: Path, tmp_path: Path
) -> None:
    overrides = [
        ("model.init", strong_features, "--init"),
        ("length", "20step", "test"),
        ("engine.num_threads", 1, "test"),
        ("log.every", "1step", "test"),
        ("evaluate.every", "off", ""),
        ("save.every", "off", ""),
    ]
    result = reconv.train("finetune", data=flowers, out=tmp_path / "run", overrides=overrides)
    events = read_events(result.folder / "events.jsonl")
    losses = [event.loss for event in events if isinstance(event, TrainProgress)]
    assert len(losses) == 20
    assert sum(losses[-5:]) / 5 < losses[0], "0.6 and 2.8; at the rate for the batch alone it ends at 15 or more"


def test_the_rate_for_features_does_not_depend_on_threads_and_is_rounded(flowers: Path, strong_features: Path) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        several = rate_of(flowers, strong_features)
    finally:
        torch.set_num_threads(threads)
    assert several == rate_of(flowers, strong_features) == float(f"{several:.2g}") < 0.001
    assert rate_of(flowers, strong_features, ("optimizer.name", "adamw", "")) == 1.8e-4


def test_a_run_resumes_with_its_rate_when_the_weights_are_gone(
    flowers: Path, strong_features: Path, tmp_path: Path
) -> None:
    overrides = [("model.init", strong_features, "--init"), *SHORT, ("log.every", "1step", "test")]
    with pytest.raises(PreemptedError):
        reconv.train("finetune", data=flowers, out=tmp_path / "run", overrides=overrides, on_event=stop_at(2))
    before = load(str(tmp_path / "run/recipe.yaml")).recipe.schedule.lr
    strong_features.unlink()
    result = reconv.train("finetune", data=flowers, out=tmp_path / "run", overrides=overrides, resume=True)
    assert result.exit_code == 0
    assert load(str(tmp_path / "run/recipe.yaml")).recipe.schedule.lr == before < 0.001


def _train_here(data: str, out: str) -> int:
    return reconv.train("finetune", data=data, out=out, overrides=[*SHORT, ("length", "1step", "test")]).exit_code


def test_two_ranks_derive_what_one_does(flowers: Path, tmp_path: Path) -> None:
    for size in (1, 2):
        assert in_ranks(size, _train_here, str(flowers), str(tmp_path / f"of-{size}")) == [0] * size
    assert (tmp_path / "of-1/recipe.yaml").read_text() == (tmp_path / "of-2/recipe.yaml").read_text()


def boxes_of(index: int) -> list[dict[str, object]]:
    return [
        {"category_id": 1 + k, "bbox": [4.0 + index + 8 * k, 6.0, 20.0 + 6 * k, 12.0 + index]}
        for k in range(1 + index % 2)
    ]


def test_a_detector_trains_on_a_few_images_with_anchors_from_their_boxes(tmp_path: Path) -> None:
    train, val = ([(f"{split}{i}.jpg", 48, 64, boxes_of(i)) for i in range(n)] for split, n in (("t", 8), ("v", 2)))
    data = write_coco(tmp_path / "coco", {"train": train, "val": val}, {1: "bolt", 2: "nut"})
    small = {
        "length": "1step",
        "data.preprocess.size": 64,
        "model.options.depths": [1, 1, 1],
        "model.options.width": 8,
        "model.options.extra_widths": [16, 16, 16, 16, 16],
        "model.options.num_halved": 5,
    }
    overrides = [(name, value, "test") for name, value in small.items()]
    result = reconv.train("finetune-detection", data=data, out=tmp_path / "run", overrides=overrides)
    recipe = load(str(result.folder / "recipe.yaml")).recipe
    assert result.exit_code == 0
    assert (recipe.batch.size, recipe.detection.max_gt_boxes) == (4, 8)
    assert recipe.detection.anchors.scales[0] > 0.2, "the boxes are large"
    assert recipe.model.options["extra_norms"] is True
    backbone = build_model("resnet18", depths=[1, 1, 1, 1], width=8)
    torch.save(backbone.state_dict(), tmp_path / "backbone.pth")
    more = [
        ("length", "2step", "test"),
        ("model.init", tmp_path / "backbone.pth", "--init"),
        ("evaluate.every", "off", ""),
    ]
    more += [("model.options.backbone", "resnet18", "test"), ("model.freeze_until", "1step", "test")]
    tuned = reconv.train("finetune-detection", data=data, out=tmp_path / "tuned", overrides=[*overrides, *more])
    assert tuned.exit_code == 0, "layers after the backbone are new, and the backbone is not"
    assert UNFROZEN in notes_of(tuned.folder)


def invoke(*args: str) -> str:
    result = CliRunner().invoke(command_line, list(args))
    assert result.exit_code == 0, result.output
    return result.output


def test_recipes_show_and_data_check_print_what_would_be_derived(flowers: Path, tmp_path: Path) -> None:
    without = invoke("recipes", "show", "finetune")
    assert [line.split()[0] for line in without.splitlines() if "derived from the data (--data DIR)" in line][:2] == [
        "length",
        "model.name",
    ]
    shown = json.loads(invoke("recipes", "show", "finetune", "--data", str(flowers), "--json"))
    assert shown["batch.size"] == {
        "value": 8,
        "origin": "derived: 25 images / 16 = 1, down to a power of two from 8 to 128",
    }
    printed = invoke("data", "check", str(flowers), "--out", str(tmp_path / "check"), "--quiet")
    assert f"reconv train finetune --data {flowers} would use, from scratch: model.name resnet20_cifar" in printed
    report = json.loads((tmp_path / "check/check.json").read_text())
    assert report["finetune"]["batch.size"]["value"] == "8"
