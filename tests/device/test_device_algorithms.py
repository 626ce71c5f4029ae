"""Which algorithms torch may take: the fastest found by trial, or those that give the same bits every time."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from reconv.device import Cpu, choose_algorithms
from reconv.errors import RecipeError
from reconv.recipe.load import load


class Told(Cpu):
    """A device that remembers whether it may try algorithms."""

    tries: bool | None = None

    def autotune(self, is_on: bool) -> None:
        self.tries = is_on


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("wish", "is_deterministic", "tries"), [("auto", False, True), ("auto", True, False)])
@pytest.mark.parametrize("again", [False, True])
def test_auto_tries_unless_bits_are_promised(wish: str, is_deterministic: bool, tries: bool, again: bool) -> None:
    device = Told()
    for _ in range(1 + again):
        choose_algorithms(device, wish, is_deterministic)
    assert device.tries is tries
    assert torch.are_deterministic_algorithms_enabled() is is_deterministic
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) is is_deterministic


def test_off_tries_nothing_and_on_with_promised_bits_is_refused() -> None:
    device = Told()
    choose_algorithms(device, "off", False)
    assert device.tries is False
    given = [("engine.autotune", "on", "--set"), ("engine.deterministic", "true", "--set")]
    with pytest.raises(RecipeError, match="autotune"):
        load("quickstart", given)
