"""`bench infer` measures a recipe or a run at several batch sizes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import reconv
from reconv.bench.baselines import TrainBaseline
from reconv.bench.infer import BATCHES, LatencyConfig, bench_infer, concurrent_rows, open_network, synchronized
from reconv.bench.inference_baselines import InferenceBaseline, inference_baselines
from reconv.bench.published import add_published
from reconv.build.saved_model import read_saved_model
from reconv.checkpoint.locate import locate
from reconv.cli import main
from reconv.cli.bench_output import print_published
from reconv.core.errors import UsageError
from reconv.device import Device
from reconv.inference.backends.captured_network import FusedInference
from reconv.inference.backends.fold import fold_batch_norms, fold_network
from reconv.inference.backends.precisions import DTYPES, trained_precision
from reconv.models import build_model
from reconv.recipe.loader import load


def _run(words: list[str], code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == code


def test_the_json_has_a_row_for_each_batch_size(capsys: pytest.CaptureFixture[str]) -> None:
    _run(["bench", "infer", "quickstart", "--batches", "1,3,8", "--iterations", "5", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert [row["batch"] for row in result["batches"]] == [1, 3, 8]
    for row in result["batches"]:
        assert 0 < row["latency_ms"]["p50"] <= row["latency_ms"]["p95"] <= row["latency_ms"]["p99"]
        assert row["iterations"] == 5
    assert result["latency_ms"] == result["batches"][0]["latency_ms"]
    assert result["images_per_s"] == max(row["images_per_s"] for row in result["batches"])
    assert result["norms_folded"] == 7
    assert result["flops_per_image"] == 2 * 747136
    assert result["versions"]["reconv"] == reconv.__version__


def test_clients_at_once_have_percentiles_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "infer", "quickstart", "--concurrency", "1,3", "--batches", "2", "--iterations", "4"]
    _run([*command, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert [(row["concurrency"], row["batch"], row["iterations"]) for row in result["concurrent"]] == [
        (1, 2, 4),
        (3, 2, 12),
    ]
    for row in result["concurrent"]:
        latency = row["latency_ms"]
        assert 0 < latency["p50"] <= latency["p90"] <= latency["p95"] <= latency["p99"] <= latency["max"]
        clients = row["images_per_s"] * latency["mean"] / 1000 / row["batch"]  # Little's law
        assert clients <= row["concurrency"] + 1e-6
    _run([*command, "--quiet"])
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines() if line[:1] in ("1", "3")] == [
        ["1", "2"],
        ["3", "2"],
    ]


def test_clients_wait_for_each_other_where_there_is_one_graph() -> None:
    running, most = 0, 0

    class Busy:
        kind = "cpu"

        def synchronize(self) -> None:
            pass

    def run() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.002)
        running -= 1

    for exclusive, together in ((True, 1), (False, 4)):
        most = 0
        request = synchronized(run, cast(Device, Busy()), exclusive)
        rows = concurrent_rows(1, (4,), request, LatencyConfig(5, 0.0))
        assert (most, rows[0]["iterations"]) == (together, 20)


def test_published_figures_stand_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    _run(["bench", "infer", "resnet18", "--batches", "1", "--iterations", "1", "--published", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["published"] == [] and "no figures of resnet18" in result["notes"][-1]
    result |= {"recipe": load("resnet50", [("precision.mode", "bf16", "test")]).recipe.model_dump(mode="json")}
    result["concurrent"] = [{**result["batches"][0], "concurrency": 16}]
    add_published(result)
    assert {(f["batch"], f.get("concurrency")) for f in result["published"] if "batch" in f} == {(1, None)}
    print_published(result)
    lines = capsys.readouterr().out.splitlines()
    assert "Reconv, measured now" in lines[2] and "cpu" in lines[2]
    v100 = next(line for line in lines if "ConvNets, 2023 " in line and "V100 16 GB" in line)
    assert "  78  " in v100 and "12.78" in v100 and " x " in v100
    assert any(" 16        1,132.9 " in line and "14.13" in line for line in lines)  # Triton, 16 requests


def test_batch_sizes_go_from_1_to_256() -> None:
    assert (BATCHES[0], BATCHES[-1], len(BATCHES)) == (1, 256, 9)


def test_bench_infer_of_a_run_uses_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        ("data.subset_percent", "20", "--set"),
        ("length", "2step", "--set"),
        ("schedule.warmup", "1step", "--set"),
    ]
    run = reconv.train("quickstart", overrides=given).folder
    before = sorted(path for path in Path().rglob("*"))
    result = bench_infer(str(run), batches=(2,), iterations=2)
    assert result["recipe"]["length"] == "2step"
    changed = bench_infer(str(run), batches=(2,), iterations=2, overrides=[("precision.mode", "fp64", "--set")])
    assert (result["precision"], changed["precision"]) == ("fp32", "fp64")
    _run(["bench", "infer", str(run), "--batches", "2", "--iterations", "2"])
    assert "7 norms folded" in capsys.readouterr().out
    assert sorted(path for path in Path().rglob("*")) == before
    _, network, _ = open_network(str(run), (), "cpu")
    trained = read_saved_model(locate(run), weights="auto", recipe=None).tensors
    assert {name: torch.equal(trained[name], value) for name, value in network.model.state_dict().items()} == (
        dict.fromkeys(trained, True)
    )


@pytest.mark.parametrize("text", ["", "0", "1,a", "-1"])
def test_malformed_batch_sizes_are_an_error(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    _run(["bench", "infer", "quickstart", "--batches", text], code=2)
    assert "--batches" in capsys.readouterr().err


def test_batch_that_does_not_fit_is_an_error_listing_those_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    _run(["bench", "infer", "quickstart", "--batches", f"1,2,{10**12}", "--iterations", "1"], code=6)
    message = capsys.readouterr().err
    assert "a batch of 1,000,000,000,000 images does not fit" in message and "--batches 1,2\n" in message


@pytest.mark.parametrize("mode", ["fp64", "32.32", "bf16", "bf16-all", "16.32", "16.16"])
def test_every_precision_mode_can_be_measured(mode: str) -> None:
    result = bench_infer("quickstart", batches=(2,), iterations=1, overrides=[("precision.mode", mode, "--set")])
    assert result["precision"] == mode


def test_per_operation_dtypes_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "precision.mode=bf16", "--set", "precision.ops.float32=[linear]"]
    _run(["bench", "infer", "quickstart", *settings], code=2)
    assert "precision.ops" in capsys.readouterr().err


class FakeCapture:
    """Replays work like a CUDA graph: it writes to the tensor of the capture."""

    def __init__(self) -> None:
        self.num_replayed = 0

    def run_on_stream(self, work: Callable[[], Any]) -> Any:
        return work()

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        output = torch.full_like(work(), torch.nan)

        def replay() -> None:
            self.num_replayed += 1
            output.copy_(work())

        return output, replay


def test_fused_inference_matches_the_model() -> None:
    model, num_folded = fold_batch_norms(build_model("resnet8_cifar", num_classes=10), (3, 32, 32))
    capture = FakeCapture()
    fused = FusedInference(model, capture)
    for rows in (2, 1):
        fused_run = fused(torch.randn(rows, 3, 32, 32))
        assert fused_run.num_fused == num_folded == 7
        assert fused_run.difference < 1e-5
        with torch.inference_mode():
            fused_run.run()
    assert capture.num_replayed == 4


@pytest.mark.parametrize("mode, is_close", [("fp64", True), ("fp32", True), ("bf16-all", False), ("16.16", False)])
def test_fused_inference_is_compared_with_exact_outputs(mode: str, is_close: bool) -> None:
    recipe, network, _ = open_network("quickstart", [("precision.mode", mode, "test")], "cpu")
    size = recipe.data.preprocess.size
    dtype = DTYPES.get(trained_precision(recipe), torch.float32)
    folded = fold_network(network.model, (1, size, size), dtype)
    model, exact = folded.model, folded.exact
    images = torch.randn(2, 1, size, size).to(dtype)
    fused_run = FusedInference(model, FakeCapture(), exact)(images)
    assert (fused_run.num_fused, fused_run.note) == (7, "")
    assert fused_run.difference < 0.01
    with torch.inference_mode():
        outputs, wide = model(images), exact(images)
    assert outputs.dtype == dtype and torch.equal(outputs, wide) == is_close
    torch.testing.assert_close(outputs, wide, rtol=0.1, atol=0.1, check_dtype=False)


class BatchDependent(nn.Module):
    """A model whose computation depends on the batch size."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv, self.how = nn.Conv2d(3, 8, 3), how

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        if self.how == "sync":
            return y if float(x[0, 0, 0, 0]) else -y
        return y / len(x) if self.how == "scaled" else y + torch.ones(len(x), 8, 1, 1)


@pytest.mark.parametrize(
    "how, rows, why",
    [
        ("scaled", 6, "its outputs differ by"),
        ("shaped", 6, "it fails: "),
        ("sync", 3, "it fails: "),
        ("shaped", 1, "differ by inf of the largest"),  # one image is broadcast to the traced batch size
    ],
)
def test_model_that_cannot_be_fused_runs_unfused_with_a_note(how: str, rows: int, why: str) -> None:
    model = BatchDependent(how).eval()
    fused_run = FusedInference(model, FakeCapture())(torch.randn(rows, 3, 8, 8))
    assert (fused_run.num_fused, fused_run.difference) == (0, 0.0)
    assert fused_run.note.startswith("the fused model is not used: ") and why in fused_run.note


def test_fused_outputs_may_differ_by_the_rounding_error_of_the_model() -> None:
    model, images = (
        BatchDependent("scaled").eval(),
        torch.randn(6, 3, 8, 8),
    )  # a list of 3 rows gives twice the outputs of 6
    assert FusedInference(model, FakeCapture(), lambda x: 1.4 * model(x))(images).note
    fused_run = FusedInference(model, FakeCapture(), lambda x: 3 * model(x))(images)
    assert (fused_run.num_fused, fused_run.note) == (1, "")
    assert fused_run.difference == pytest.approx(1)


def test_untrained_model_gets_calibrated_batch_norm_statistics() -> None:
    given: list[tuple[str, object, str]] = [("precision.mode", "fp32", "test"), ("data.preprocess.size", 64, "test")]
    _, network, _ = open_network("se-resnext101-nv-90ep-8gpu-tf32", given, "cpu")  # began with outputs of over 10,000
    norms = [layer for layer in network.model.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert all(norm.running_var is not None and (norm.running_var != 1).any() for norm in norms)
    assert not any(norm.training for norm in norms) and {norm.momentum for norm in norms} == {0.1}
    with torch.inference_mode():
        outputs = network.model(torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(1)))
    assert 0.01 < outputs.std() < 10


def _small(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))


def _broken(num_classes: int) -> nn.Module:
    return nn.Linear(num_classes, 7)


def test_inference_baselines_are_measured_and_failures_noted() -> None:
    baselines = [InferenceBaseline("small", _small, False), InferenceBaseline("broken", _broken, False)]
    result = bench_infer("quickstart", batches=(1, 4), iterations=2, baselines=baselines)
    assert [row["batch"] for row in result["baselines"]["small"]] == [1, 4]
    for ours, theirs in zip(result["batches"], result["baselines"]["small"], strict=True):
        assert theirs["ratio"] == pytest.approx(ours["images_per_s"] / theirs["images_per_s"])
    assert result["baselines"]["broken"] == []
    assert [note.split(":")[0] for note in result["notes"]] == [
        "broken could not be measured at batch 1",
        "broken could not be measured at batch 4",
    ]


def test_inference_baselines_are_eager_and_compiled_and_selected_by_name() -> None:
    baselines = [
        TrainBaseline("torchvision", _small, "fp16", False),
        TrainBaseline("torchvision channels_last compiled", _small, "bf16", True),
    ]
    names = ["torchvision channels_last", "torchvision channels_last compiled"]
    assert [(baseline.name, baseline.is_compiled) for baseline in inference_baselines(baselines)] == list(
        zip(names, (False, True), strict=True)
    )
    assert [baseline.name for baseline in inference_baselines(baselines, names[0])] == names[:1]
    assert [baseline.name for baseline in inference_baselines(baselines, "compiled")] == names[1:]
    with pytest.raises(UsageError, match="no baseline is called"):
        inference_baselines(baselines, "timm")


def test_comparison_without_baselines_prints_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    _run(["bench", "infer", "quickstart", "--batches", "2", "--iterations", "1", "--compare"])
    said = capsys.readouterr().out
    assert "no baseline was measured" in said and "torchvision" in said
