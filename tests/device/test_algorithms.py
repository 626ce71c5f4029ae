"""Deterministic algorithms and cudnn.benchmark, as the recipe sets them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal

import pytest
import torch

from reconv.core.errors import RecipeError
from reconv.device import Cpu, configure_algorithms, without_cudnn_benchmark
from reconv.recipe.load.unused import unused_options
from reconv.recipe.loader import load
from reconv.recipe.parts.engine import EngineConfig


class FakeDevice(Cpu):
    """Records the benchmark limit, and the determinism settings at warm-up."""

    limit: int | None = -1
    settings_at_warm_up: tuple[bool, bool] | None = None

    def set_cudnn_benchmark(self, limit: int | None) -> None:
        self.limit = limit

    def cudnn_benchmark_limit(self) -> int | None:
        return self.limit

    def warm_up(self) -> None:
        self.settings_at_warm_up = torch.are_deterministic_algorithms_enabled(), "CUBLAS_WORKSPACE_CONFIG" in os.environ


@pytest.fixture(autouse=True)
def _restore(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("is_deterministic", "expected"), [(False, 10), (True, None)])
@pytest.mark.parametrize("again", [False, True])
def test_auto_benchmarks_unless_deterministic(is_deterministic: bool, expected: int | None, again: bool) -> None:
    device = FakeDevice()
    for _ in range(1 + again):
        configure_algorithms(device, EngineConfig(deterministic=is_deterministic))
    assert device.limit == expected
    assert torch.are_deterministic_algorithms_enabled() is is_deterministic
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) is is_deterministic


@pytest.mark.parametrize(
    ("setting", "num_steps", "expected"),
    [("auto", 3999, None), ("auto", 4000, 10), ("on", 1, 10), ("off", 10**6, None)],
)
def test_a_short_run_does_not_time_algorithms_unless_asked_to(
    setting: Literal["auto", "on", "off"], num_steps: int, expected: int | None
) -> None:
    device = FakeDevice()
    configure_algorithms(device, EngineConfig(cudnn_benchmark=setting), num_steps)
    assert device.limit == expected


def test_off_disables_the_benchmark_and_on_conflicts_with_deterministic() -> None:
    device = FakeDevice()
    configure_algorithms(device, EngineConfig(cudnn_benchmark="off"))
    assert device.limit is None
    overrides = [("engine.cudnn_benchmark", "on", "--set"), ("engine.deterministic", "true", "--set")]
    with pytest.raises(RecipeError, match="cudnn_benchmark"):
        load("quickstart", overrides)


@pytest.mark.parametrize(("limit", "expected"), [(1, 1), ("all", 0)])
def test_the_limit_is_passed_to_the_device(limit: int | str, expected: int) -> None:
    device = FakeDevice()
    configure_algorithms(device, EngineConfig(cudnn_benchmark_limit=limit))
    assert device.limit == expected


def test_a_limit_without_a_benchmark_is_reported_as_unused() -> None:
    overrides = [("engine.cudnn_benchmark_limit", "2", "--set"), ("engine.cudnn_benchmark", "off", "--set")]
    assert "engine.cudnn_benchmark_limit" in dict(unused_options(load("quickstart", overrides).recipe))
    assert "engine.cudnn_benchmark_limit" not in dict(unused_options(load("quickstart", overrides[:1]).recipe))


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_a_device_warms_up_after_determinism_is_configured(is_deterministic: bool) -> None:
    device = FakeDevice()
    configure_algorithms(device, EngineConfig(deterministic=is_deterministic))
    assert device.settings_at_warm_up == (is_deterministic, is_deterministic)


@pytest.mark.parametrize("engine", [EngineConfig(cudnn_benchmark_limit="all"), EngineConfig(cudnn_benchmark="off")])
def test_the_benchmark_is_restored_where_it_was_off_for_a_while(engine: EngineConfig) -> None:
    device = FakeDevice()
    configure_algorithms(device, engine)
    before = device.limit
    with without_cudnn_benchmark(device):
        assert device.limit is None
    assert device.limit == before
    with pytest.raises(ZeroDivisionError), without_cudnn_benchmark(device):
        _ = 1 / 0
    assert device.limit == before
