"""Gaudi support against a fake habana_frameworks that records calls; never run on the hardware."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from ranks import in_ranks

import reconv
from reconv.checkpoint.store import CheckpointStore
from reconv.core.errors import UsageError
from reconv.device import device_kind, open_device
from reconv.optim import build_optimizer
from reconv.precision.policy import accumulate_dtype
from reconv.recipe.parts.optimizer import OptimizerConfig

GAUDI = Path(__file__).parents[1] / "fixtures" / "gaudi"
SHORT = {
    "length": "3step",
    "schedule.warmup": "0ep",
    "data.subset_percent": "20",
    "batch.size": "32",
    "batch.group": "16",
    "batch.micro": "16",
    "evaluate.every": "3step",
    "save.every": "3step",
    "engine.num_threads": "1",
}


def forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "habana_frameworks"]:
        del sys.modules[name]


@pytest.fixture
def gaudi(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """Install the fake package; yields the calls it records."""
    monkeypatch.syspath_prepend(str(GAUDI))
    monkeypatch.delenv("PT_ENABLE_INT64_SUPPORT", raising=False)
    forget()
    from habana_frameworks.recording import calls, mode

    with mode:
        yield calls
    forget()


def named(calls: list[tuple[str, Any]], *names: str) -> list[str]:
    return [name for name, _ in calls if name in names]


def trained(out: Path, device: str, settings: dict[str, str]) -> dict[str, torch.Tensor]:
    overrides = [(field, value, "--set") for field, value in settings.items()]
    result = reconv.train("quickstart", out=out, overrides=overrides, device=device)
    assert result.exit_code == 0
    newest = CheckpointStore(result.folder / "checkpoints").newest().path
    assert newest is not None
    return safetensors.torch.load_file(newest / "model.safetensors")


def test_lazy_mode_calls_mark_step_after_each_backward_pass_and_optimizer_step(
    gaudi: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    on_hpu = trained(tmp_path / "hpu", "hpu", {**SHORT, "evaluate.every": "off"})
    order = named(gaudi, "mark_step", "FusedSGD.step")
    # Two micro-batches a step; one vendor optimizer for each decay group that has parameters.
    num_groups = order.count("FusedSGD.step") // 3
    assert num_groups >= 1
    steps = (["mark_step"] * 2 + ["FusedSGD.step"] * num_groups + ["mark_step"]) * 3
    assert order == [*steps, "mark_step"]  # the last one: a save waits for its copies
    assert ("placed", "hpu:0") in gaudi
    on_cpu = trained(tmp_path / "cpu", "cpu", {**SHORT, "evaluate.every": "off"})
    assert max((on_hpu[name].double() - on_cpu[name].double()).abs().max().item() for name in on_cpu) < 1e-6


def test_evaluation_calls_mark_step_for_every_batch(
    gaudi: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    trained(tmp_path / "without", "hpu", {**SHORT, "evaluate.every": "off"})
    without = len(named(gaudi, "mark_step"))
    gaudi.clear()
    trained(tmp_path / "with", "hpu", {**SHORT, "evaluate.batch_size": "120"})
    assert len(named(gaudi, "mark_step")) == without + 3  # 360 validation digits


def test_eager_mode_never_calls_mark_step_and_compiles_with_the_vendors_backend(
    gaudi: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    assert open_device("hpu").compile_backend == "hpu_backend"
    trained(tmp_path / "hpu", "hpu", {**SHORT, "engine.compile": "off"})
    assert named(gaudi, "mark_step") == []
    assert len(named(gaudi, "FusedSGD.step")) >= 3


def test_lazy_mode_rejects_torch_compile(
    gaudi: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    with pytest.raises(UsageError, match="compile"):
        trained(tmp_path / "hpu", "hpu", {**SHORT, "engine.compile": "on"})


def test_bf16_is_torchs_autocast_of_hpu(
    gaudi: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    trained(tmp_path / "hpu", "hpu", {**SHORT, "precision.mode": "bf16"})
    kinds = {dtype for name, dtype in gaudi if name == "conv2d"}
    assert kinds == {torch.bfloat16}
    with pytest.raises(UsageError, match="float64"):
        trained(tmp_path / "fp64", "hpu", {**SHORT, "precision.mode": "fp64"})


def test_the_environment_is_set_before_the_vendor_package_is_imported(
    gaudi: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PT_HPU_LAZY_MODE", raising=False)
    import os

    device = open_device("hpu", local_rank=1)
    assert (os.environ["PT_HPU_LAZY_MODE"], os.environ["PT_ENABLE_INT64_SUPPORT"]) == ("0", "1")
    monkeypatch.delenv("PT_HPU_LAZY_MODE")
    assert ("set_device", 1) in gaudi and device.torch == torch.device("hpu", 1)
    assert device.describe() == "hpu:1, GAUDI2, eager mode"
    assert device.peak_memory_bytes() == 3 << 20 < device.total_memory_bytes()
    assert device_kind("auto") == ("cuda" if torch.cuda.is_available() else "hpu")
    with pytest.raises(UsageError, match="hpu:7"):
        open_device("hpu:7")


def test_without_fused_sgd_foreach_is_used(gaudi: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    device = open_device("hpu")
    assert callable(device.sgd_implementation())
    import habana_frameworks.torch.hpex.optimizers as extension

    monkeypatch.delattr(extension, "FusedSGD")
    assert device.sgd_implementation() == "foreach"


def test_collectives_use_hccl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_ranks(2, all_reduce_on_hpu, str(GAUDI)) == [(6.0, [("hccl", (0, 2))]), (6.0, [("hccl", (1, 2))])]


def all_reduce_on_hpu(path: str) -> tuple[float, list[tuple[str, Any]]]:
    sys.path.insert(0, path)
    from reconv.distributed.process_group import open_process_group

    process_group = open_process_group(device="hpu")
    from habana_frameworks.recording import calls, mode

    with mode:
        total = process_group.all_reduce(torch.tensor(3.0))
    process_group.close()
    return float(total), [call for call in calls if call[0] == "hccl"]


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_vendor_sgd_equals_ours_and_skips_steps_that_are_not_ok(nesterov: bool) -> None:
    section = OptimizerConfig(nesterov=nesterov, weight_decay=0.01, weight_decay_exclude="norm-bias")
    both = []
    for sgd in (torch.optim.SGD, "foreach"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        optimizer = build_optimizer(section, model, sgd=sgd)
        for step, is_ok in enumerate((True, True, False, True)):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float("nan") if not is_ok else 0.1 * (step + 1))
            optimizer.step(0.1 / (step + 1), torch.tensor(is_ok))
        both.append({**dict(model.named_parameters()), **optimizer.state_dict()})
    vendor, plain = both
    assert len(vendor) == 12
    for name, value in plain.items():
        torch.testing.assert_close(vendor[name], value, rtol=1e-6, atol=1e-7)


def test_accumulate_dtype_is_one_the_device_has() -> None:
    assert [accumulate_dtype(torch.device(kind)) for kind in ("cpu", "cuda", "mps", "hpu")] == [
        torch.float64,
        torch.float64,
        torch.float32,
        torch.float32,
    ]
