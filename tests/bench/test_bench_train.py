"""`bench train` measures real steps of the recipe, writes JSON, and compares with baselines on the same data."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reconv.bench.baselines import BaselineStep, TrainBaseline, classification_loss, find_baselines
from reconv.bench.run import Input, bench_args, open_bench_run
from reconv.bench.timing import TimingConfig
from reconv.bench.train import bench_train
from reconv.build.task import check_metric
from reconv.cli import main
from reconv.core.errors import UsageError
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.train_loader import make_train_loader
from reconv.data.transforms.train import TrainPreprocess
from reconv.device import open_device
from reconv.metrics import coco_eval
from reconv.recipe.loader import Override, load
from reconv.trainer.dry_run import dry_run
from reconv.trainer.prepare import PreparedRun

QUICK = TimingConfig(windows=5, steps=2, warmup=1)
FEW = ["--steps", "2", "--windows", "5", "--warmup", "1"]


def _run(words: list[str], code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == code


def test_json_file_has_all_documented_fields() -> None:
    _run(["bench", "train", "quickstart", *FEW, "--json", "result.json"])
    result: dict[str, Any] = json.loads(Path("result.json").read_text())
    assert set(result["step_ms"]) == {"median", "p95", "forward", "backward", "optimizer", "input"}
    assert all(value > 0 for value in result["step_ms"].values())
    assert result["images_per_s"] == pytest.approx(64 / (result["step_ms"]["median"] / 1000))
    assert result["step_ms"]["p95"] >= result["step_ms"]["median"]
    assert len(result["window_images_per_s"]) == result["windows"] == 5
    assert result["startup_s"] > 0
    assert result["peak_memory_bytes"] > 0
    assert result["flops_per_image"] == 3 * 2 * 747136  # resnet8 of 8 px and one channel, counted by hand
    assert result["roofline_fraction"] is None
    assert "unknown" in result["roofline_note"]
    assert result["baselines"] == {}
    assert result["device"].startswith("cpu")
    assert result["versions"]["torch"] == torch.__version__
    assert result["recipe"]["optimizer"]["momentum"] == 0.9
    assert [path.name for path in Path().iterdir()] == ["result.json"]  # no run directory


def opened(recipe: str, input: Input, overrides: Sequence[Override]) -> PreparedRun:
    with open_bench_run(bench_args(recipe, input=input, overrides=overrides, device="cpu")) as run:
        return run


def test_synthetic_images_follow_the_recipe() -> None:
    run = opened("quickstart", "device", [])
    [batch] = next(make_train_loader(run.datasets.train, run.recipe, run.plan, DataContext.on_host()).steps(0, 1))
    assert batch["images"].shape == (64, 1, 8, 8)
    assert run.plan.num_classes == 10
    big = [("batch.size", 2, "--set"), ("batch.group", "all", "--set")]
    run = opened("resnet50", "host", big)
    assert run.plan.num_classes == 1000
    assert run.datasets.train.kind == "synthetic"


@pytest.mark.parametrize(
    ("words", "kind"), [([], "synthetic-device"), (["--input", "host"], "synthetic"), (["--input", "real"], "digits")]
)
def test_input_option_selects_the_data(words: list[str], kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    _run(["bench", "train", "quickstart", *FEW, *words, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["recipe"]["data"]["source"] == kind
    assert result["images_per_s"] > 0


def test_measured_step_trains_and_updates_the_ema() -> None:
    given = [("ema.decay", 0.9, "--set"), ("batch.size", 32, "--set"), ("batch.group", 16, "--set")]
    result = bench_train("quickstart", overrides=given, config=QUICK)
    assert result["recipe"]["ema"]["decay"] == 0.9
    assert result["batch"] == 32
    assert math.isfinite(result["images_per_s"])


def _linear(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))


def _broken(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(63, num_classes))


def test_baselines_are_measured_and_failures_noted() -> None:
    baselines = [
        TrainBaseline("small", _linear, "bf16", channels_last=True),
        TrainBaseline("wrong", _broken, "bf16", channels_last=False),
    ]
    result = bench_train("quickstart", config=QUICK, baselines=baselines)
    assert set(result["baselines"]) == {"small"}
    small = result["baselines"]["small"]
    assert small["ratio"] == pytest.approx(result["images_per_s"] / small["images_per_s"])
    assert small["precision"] == "fp32"  # on the CPU
    assert any(note.startswith("wrong could not be measured") for note in result["notes"])


def test_baseline_step_is_a_plain_step_on_the_whole_batch() -> None:
    given = [("batch.group", 16, "--set"), ("batch.micro", 16, "--set")]
    run = opened("quickstart", "real", given)
    recipe = run.recipe
    prepare = TrainPreprocess(recipe.data.preprocess, recipe.augment, 10, torch.float32)
    micro_batches = next(make_train_loader(run.datasets.train, recipe, run.plan, DataContext.on_host()).steps(0, 1))
    assert len(micro_batches) == 4
    model = _linear(10)
    expected = [p.clone() for p in model.parameters()]
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    prepared = [prepare(batch, 0) for batch in micro_batches]
    images, targets = (torch.cat([batch[name] for batch in prepared]) for name in ("images", "targets"))
    grads = torch.autograd.grad(loss(model(images), targets), list(model.parameters()))
    step = BaselineStep(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        loss=classification_loss(0.1),
        preprocess=prepare,
        device=open_device("cpu"),
        dtype=None,
    )
    step(0, micro_batches)
    for now, old, grad in zip(model.parameters(), expected, grads, strict=True):
        torch.testing.assert_close(now, old - 0.1 * grad)


def test_baselines_that_are_not_installed_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("torchvision", "timm"):
        monkeypatch.setitem(sys.modules, package, None)
    baselines, missing = find_baselines("resnet50")
    assert baselines == []
    assert missing == ["torchvision is not installed", "timm is not installed"]
    monkeypatch.undo()
    _run(["bench", "train", "quickstart", *FEW, "--compare"])  # nobody else has the network of this recipe
    assert "no baseline was measured" in capsys.readouterr().out


def test_installed_package_is_a_baseline_for_its_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "timm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from torch import nn\n"
        "def list_models():\n    return ['mobilenetv2_100']\n"
        "def create_model(name, num_classes):\n    return nn.Linear(2, num_classes)\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    baselines, missing = find_baselines("mobilenet_v2")
    assert [baseline.name for baseline in baselines] == ["timm channels_last", "timm channels_last compiled"]
    assert [baseline.compiled for baseline in baselines] == [False, True]
    built = baselines[0].build(5)
    assert isinstance(built, nn.Linear) and built.out_features == 5
    assert missing == ["torchvision is not installed"]
    assert [b.name for b in find_baselines("mobilenet_v2", "compiled")[0]] == ["timm channels_last compiled"]
    assert [b.name for b in find_baselines("mobilenet_v2", "timm channels_last")[0]] == ["timm channels_last"]
    assert len(find_baselines("mobilenet_v2", "timm channels")[0]) == 2
    with pytest.raises(UsageError, match="timm channels_last compiled"):
        find_baselines("mobilenet_v2", "torchvision")
    assert find_baselines("resnet8_cifar")[1][1] == "timm has no resnet8_cifar"
    monkeypatch.delitem(sys.modules, "timm")


def test_printed_results_are_readable(capsys: pytest.CaptureFixture[str]) -> None:
    _run(["bench", "train", "quickstart", *FEW])
    out = capsys.readouterr().out
    for words in ("images/s at batch 64", "median of 5 windows", "forward ", "peak memory", "roofline unknown"):
        assert words in out


@pytest.mark.parametrize(
    "words",
    [["--windows", "4"], ["--input", "host", "--data", "x"], ["--input", "disk"], ["--set", "nonsense"]],
)
def test_invalid_bench_train_options_are_an_error(words: list[str]) -> None:
    _run(["bench", "train", "quickstart", *words], code=2)


def test_bench_train_of_a_detector_needs_no_pycocotools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coco_eval, "PACKAGE", "a_package_that_is_not_there")
    small: list[Override] = [("batch", {"size": 2, "group": "all"}, "--set")]
    run = opened("ssd-resnet34", "device", small)
    assert run.recipe.detection.metric == "ap" and len(run.datasets.train.class_names) == 80
    with pytest.raises(UsageError, match=r"detection\.metric: ap is a COCO metric"):
        dry_run("quickstart-detection", steps=1, overrides=[("detection.metric", "ap", "--set")])
    unscored: list[Override] = [("detection.metric", "ap", "--set"), ("evaluate.every", "off", "--set")]
    check_metric(load("quickstart-detection", [*unscored, ("expect", None, "--set")]).recipe)
