"""`bench train` on several devices: weak scaling and the cost of the gradient reduction."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import in_ranks

from reconv.bench.baselines import TrainBaseline
from reconv.bench.timing import TimingConfig
from reconv.bench.train import bench_train
from reconv.cli import main
from reconv.cli.bench_output import train_lines
from reconv.core.errors import UsageError
from reconv.models import build_model
from reconv.recipe.loader import load
from reconv.recipe.plan import Facts, make_plan

QUICK = TimingConfig(windows=5, steps=1, warmup=0)
GROUPS = {"batch.size": "48", "batch.group": "16"}  # two groups and one


def measured(settings: dict[str, str]) -> dict[str, Any]:
    return bench_train("quickstart", overrides=[(k, v, "--set") for k, v in settings.items()], config=QUICK)


def num_parameters() -> int:
    return sum(p.numel() for p in build_model("resnet8_cifar", num_classes=10, in_channels=1).parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "bytes_each"),
    [
        ({"parallel.gradient_compression": "bf16", "parallel.bucket_cap_mb": "0.1"}, 2),
        ({"parallel.reduce": "ordered"}, 4),
    ],
)
def test_weak_scaling_of_two_devices(settings: dict[str, str], bytes_each: int) -> None:
    first, second = in_ranks(2, measured, {**GROUPS, **settings})
    scaling = first["scaling"]
    assert (first["devices"], first["batch"], first["batch_per_device"]) == (2, 48, 32)
    assert first["images_per_s"] == pytest.approx(48 / (first["step_ms"]["median"] / 1000))
    assert first["images_per_s_per_device"] == first["images_per_s"] / 2
    assert scaling["gradient_bytes"] == bytes_each * num_parameters()
    assert (scaling["buckets"] > 1) == ("parallel.bucket_cap_mb" in settings)
    step_ms = first["step_ms"]["median"]
    assert scaling["weak_scaling"] == pytest.approx(scaling["alone_step_ms"] / step_ms)
    assert scaling["alone_images_per_s"] == pytest.approx(32 / (scaling["alone_step_ms"] / 1000))
    assert scaling["exposed_ms"] == pytest.approx(step_ms - scaling["apart_step_ms"])
    assert scaling["reduce_share"] == pytest.approx(scaling["reduce_ms"] / step_ms) and scaling["reduce_ms"] > 0
    assert scaling["alone_step_ms"] == second["scaling"]["alone_step_ms"]  # rank 0's, while the other waited
    assert any("different numbers of samples" in note for note in first["notes"])
    printed = "\n".join(train_lines(first, compare=False))
    for words in (
        "2 devices x",
        "one device alone with the same batch (32)",
        "weak scaling",
        "of gradients per step in",
    ):
        assert words in printed


@pytest.mark.slow
def test_a_batch_of_one_group_is_measured_on_two_devices() -> None:
    first, _ = in_ranks(2, measured, {})
    assert (first["devices"], first["batch_per_device"]) == (2, 32) and first["flops_per_image"] > 0
    assert any("batch norm groups span several devices" in note for note in first["notes"])


def test_one_device_of_several_keeps_its_groups_and_micro_batches() -> None:
    given = [("batch.size", 96, "--set"), ("batch.group", 8, "--set"), ("batch.micro", 16, "--set")]
    plan = make_plan(load("quickstart", given).recipe, Facts(num_train=960, num_val=96, num_classes=10, world_size=3))
    alone = plan.one_device()
    assert (alone.world_size, alone.global_batch, alone.rows()) == (1, 32, slice(0, 32))
    assert alone.micro_batches() == plan.micro_batches(0) == ((8, 8), (8, 8))


def test_one_device_has_no_scaling_results() -> None:
    result = measured({})
    assert (result["devices"], result["scaling"]) == (1, None)
    assert result["images_per_s_per_device"] == result["images_per_s"]


def test_options_incompatible_with_several_devices_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="baselines are measured on one"):
        bench_train(
            "quickstart", devices=2, baselines=[TrainBaseline("none", lambda n: pytest.fail("built"), "bf16", False)]
        )
    for options, message in (
        (["--devices", "2", "--set", "parallel.pipeline_stages=2"], "does not measure pipelines"),
        (["--devices", "2", "--batch-size", "64", "--batch-per-device", "32"], "32 per device x 2 = 64"),
        (["--nic", "no-such-network"], "no such network interface"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["bench", "train", "quickstart", *options])
        assert end.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("size", ["2", "4"])
def test_devices_option_under_a_launcher_is_an_error(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(UsageError, match=f"already started {size} processes"):
        bench_train("quickstart", devices=2)
