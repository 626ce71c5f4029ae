"""The baseline of SSD-ResNet34: the published network on torchvision's layers, with our plain losses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.training.throughput import Task, find_baseline
from reconv.bench.baselines import compare, detection_loss, find_baselines
from reconv.bench.inference_baselines import inference_baselines
from reconv.bench.run import bench_args, no_log, open_bench_run
from reconv.bench.ssd_baseline import SSD300
from reconv.bench.timing import TimingConfig
from reconv.build.data import build_train_loader
from reconv.build.postprocess import build_anchors
from reconv.build.task import build_detection
from reconv.data.pipeline.prefetcher import DataContext
from reconv.models import build_model
from reconv.models.architecture import SSDOutput
from reconv.recipe.loader import Override
from reconv.tasks.detection import ssd_losses

NAMES = ["torchvision resnet34 SSD channels_last", "torchvision resnet34 SSD channels_last compiled"]
NUM_ANCHORS = 8732
# Stands for torchvision, which may not be installed: layers of its ResNet-34, with one block in each stage.
TORCHVISION = """
from torch import nn

class Block(nn.Module):
    def __init__(self, channels, planes, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, planes, 3, stride, 1, bias=False)
        self.downsample = nn.Sequential(nn.Conv2d(channels, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))
    def forward(self, x):
        return (self.conv1(x) + self.downsample(x)).relu()

class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.relu, self.maxpool = nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        self.layer1, self.layer2 = nn.Sequential(Block(64, 64, 1)), nn.Sequential(Block(64, 128, 2))
        self.layer3, self.layer4 = nn.Sequential(Block(128, 256, 2)), nn.Sequential(Block(256, 512, 2))

def resnet34(weights):
    return ResNet()

def list_models():
    return ["resnet34"]
"""
SMALL: list[Override] = [
    ("batch", {"size": 2, "group": "all"}, "--set"),
    ("detection.metric", "voc10", "--set"),
    ("model.options", {"backbone": "resnet10", "width": 8, "extra_widths": [16, 16, 16, 16, 16]}, "--set"),
]


@pytest.fixture
def torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of that name with a small ResNet-34."""
    package = tmp_path / "site" / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from torchvision import models\n")
    (package / "models.py").write_text(TORCHVISION)
    hidden = [name for name in sys.modules if name.split(".")[0] == "torchvision"]
    for name in hidden:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(package.parent))
    yield
    for name in ("torchvision", "torchvision.models"):
        sys.modules.pop(name, None)


def test_the_baselines_are_listed_with_the_reason_for_missing_ones(
    torchvision: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    baselines, _ = find_baselines("ssd_resnet34")
    assert [baseline.name for baseline in baselines] == NAMES
    assert [(b.half, b.channels_last, b.compiled) for b in baselines] == [("bf16", True, False), ("bf16", True, True)]
    task = Task("ssd-resnet34", 2, ("bf16",), ("bf16",), (1,), (), "cpu", "channels_last compiled", {})
    chosen = find_baseline(task, "bf16", ("bf16", "tf32"))
    assert chosen is not None and [baseline.name for baseline in chosen] == NAMES[1:]
    assert [baseline.name for baseline in inference_baselines(baselines)] == NAMES
    monkeypatch.setattr("sys.path", [])
    for name in ("torchvision", "torchvision.models"):
        del sys.modules[name]
    baselines, reasons = find_baselines("ssd_resnet34")
    assert baselines == [] and reasons[0] == "torchvision is not installed"  # timm may be, and has no such network


def test_the_network_has_the_published_maps_and_one_prediction_per_anchor(torchvision: None) -> None:
    network = find_baselines("ssd_resnet34", "compiled")[0][0].build(80)
    assert isinstance(network, SSD300)
    sides: list[int] = []
    for head in network.box_heads:
        head.register_forward_pre_hook(lambda _, given: sides.append(given[0].shape[-1]))
    with torch.no_grad():
        outputs = network(torch.zeros(1, 3, 300, 300))
    assert sides == [38, 19, 10, 5, 3, 1]
    assert outputs.box_deltas.shape == (1, NUM_ANCHORS, 4) and outputs.logits.shape == (1, NUM_ANCHORS, 81)


def test_everything_after_the_backbone_has_the_size_of_our_network(torchvision: None) -> None:
    network = find_baselines("ssd_resnet34", "compiled")[0][0].build(80)
    with torch.device("meta"):
        ours = build_model("ssd_resnet34", num_classes=81)
    for theirs, own in ((network.extras, ours.extras), (network.box_heads, ours.box_heads)):
        assert [p.shape for p in theirs.parameters()] == [p.shape for p in own.parameters()]
    assert [p.shape for p in network.class_heads.parameters()] == [p.shape for p in ours.class_heads.parameters()]


def test_predictions_are_in_the_order_of_the_anchors(torchvision: None) -> None:
    """Each output is the number of its box in a cell, the row and the column."""
    network = find_baselines("ssd_resnet34", "compiled")[0][0].build(2)
    network.backbone, network.extras = nn.Identity(), nn.ModuleList()
    network.box_heads = nn.ModuleList([_CellNumbers(4)])
    network.class_heads = nn.ModuleList([_CellNumbers(3)])
    found = network(torch.zeros(1, 1, 38, 38)).box_deltas[0]
    with open_bench_run(bench_args("ssd-resnet34", overrides=SMALL, device="cpu")) as run:
        anchors = build_anchors(run.recipe)[: len(found)]
    assert torch.equal(found[:, 1], (anchors[:, 1] * 300 / 8 - 0.5).round())  # row
    assert torch.equal(found[:, 2], (anchors[:, 0] * 300 / 8 - 0.5).round())  # column
    sizes = [tuple(anchors[found[:, 0] == box, 2:].unique(dim=0).flatten().tolist()) for box in range(4)]
    assert all(len(size) == 2 for size in sizes) and len(set(sizes)) == 4


class _CellNumbers(nn.Module):
    """A head of four boxes per cell whose first outputs are the numbers of box, row and column."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = x.shape[-1]
        box, row, column = torch.meshgrid(torch.arange(4), torch.arange(side), torch.arange(side), indexing="ij")
        values = [box, row, column, torch.zeros_like(box)][: self.numbers]
        return torch.stack(values, dim=1).flatten(0, 1)[None].float()


def test_the_loss_is_that_of_our_plain_task(torchvision: None) -> None:
    with open_bench_run(bench_args("ssd-resnet34", overrides=SMALL, device="cpu")) as run:
        loader = build_train_loader(run.recipe, run.plan, run.datasets.train, DataContext.on_host())
        [batch] = next(iter(loader.steps(0, 1)))
        task = build_detection(run.recipe, run.datasets.train, run.device)
    generator = torch.Generator().manual_seed(0)
    deltas, logits = (torch.randn(2, NUM_ANCHORS, k, generator=generator) for k in (4, 81))
    truth = (batch["boxes"], batch["labels"], batch["num_boxes"], task.anchors_cxcywh)
    expected = ssd_losses(deltas, logits, *truth, task.match_config)
    found = detection_loss(task)(SSDOutput(deltas, logits), batch)
    torch.testing.assert_close(found, (expected.classification + expected.box_regression).mean())
    assert found > 0


def test_the_baseline_is_trained_and_compared_like_any_other(torchvision: None) -> None:
    [baseline] = find_baselines("ssd_resnet34", NAMES[0])[0]
    network = baseline.build(80)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    with open_bench_run(bench_args("ssd-resnet34", overrides=SMALL, device="cpu")) as run:
        assert run.plan.num_classes == 80
        baselines = [replace(baseline, build=lambda num_classes: network)]
        results, notes = compare(run, baselines, TimingConfig(1, 1, 0), 10.0, no_log)
    assert results[NAMES[0]]["ratio"] == 10.0 / results[NAMES[0]]["images_per_s"] and notes == []
    assert all(p.isfinite().all() and not torch.equal(p, before[name]) for name, p in network.named_parameters())
