"""Which algorithms torch may take: the fastest found by trial, or those that give the same bits every time."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from reconv.device import Cpu, configure_algorithms
from reconv.errors import RecipeError
from reconv.recipe.loader import load
from reconv.recipe.schema import EngineConfig
from reconv.recipe.unused import unused_options


class Told(Cpu):
    """A device that remembers how many algorithms it may try, and whether bits were promised before it woke."""

    tried: int | None = -1
    woke_with: tuple[bool, bool] | None = None

    def set_cudnn_benchmark(self, limit: int | None) -> None:
        self.tried = limit

    def warm_up(self) -> None:
        self.woke_with = torch.are_deterministic_algorithms_enabled(), "CUBLAS_WORKSPACE_CONFIG" in os.environ


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("is_deterministic", "tried"), [(False, 4), (True, None)])
@pytest.mark.parametrize("again", [False, True])
def test_auto_tries_unless_bits_are_promised(is_deterministic: bool, tried: int | None, again: bool) -> None:
    device = Told()
    for _ in range(1 + again):
        configure_algorithms(device, EngineConfig(deterministic=is_deterministic))
    assert device.tried == tried
    assert torch.are_deterministic_algorithms_enabled() is is_deterministic
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) is is_deterministic


def test_off_tries_nothing_and_on_with_promised_bits_is_refused() -> None:
    device = Told()
    configure_algorithms(device, EngineConfig(cudnn_benchmark="off"))
    assert device.tried is None
    given = [("engine.cudnn_benchmark", "on", "--set"), ("engine.deterministic", "true", "--set")]
    with pytest.raises(RecipeError, match="cudnn_benchmark"):
        load("quickstart", given)


@pytest.mark.parametrize(("limit", "tried"), [(1, 1), ("all", 0)])
def test_the_limit_is_what_the_device_is_told(limit: int | str, tried: int) -> None:
    device = Told()
    configure_algorithms(device, EngineConfig(cudnn_benchmark_limit=limit))
    assert device.tried == tried


def test_a_limit_without_trials_is_said_to_have_no_effect() -> None:
    given = [("engine.cudnn_benchmark_limit", "2", "--set"), ("engine.cudnn_benchmark", "off", "--set")]
    assert "engine.cudnn_benchmark_limit" in dict(unused_options(load("quickstart", given).recipe))
    assert "engine.cudnn_benchmark_limit" not in dict(unused_options(load("quickstart", given[:1]).recipe))


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_a_device_wakes_when_all_that_its_libraries_read_is_set(is_deterministic: bool) -> None:
    device = Told()
    configure_algorithms(device, EngineConfig(deterministic=is_deterministic))
    assert device.woke_with == (is_deterministic, is_deterministic)
