"""Errors of the launcher: too many devices, and a run directory that is in use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import reconv
from reconv.bench.bench_train import bench_train
from reconv.errors import RecipeError, UsageError, one_of
from reconv.trainer.dry_run import dry_run

MANY = 1 << 16
LARGE = [("batch.size", str(2 * MANY), "--set"), ("batch.group", "2", "--set")]


@pytest.mark.parametrize("start", [reconv.train, dry_run, bench_train])
def test_more_devices_than_batch_groups_is_an_error(start: Callable[..., object]) -> None:
    with pytest.raises(RecipeError, match="cannot be divided over 100 devices") as caught:
        start("quickstart", devices=100)
    assert caught.value.then == one_of("--devices 64", "--batch-size 100")


@pytest.mark.parametrize(
    ("device", "words"),
    [("cpu", "not enough memory"), ("cuda", r"this machine has \d+ cuda device"), ("cuda:1", "is a single device")],
)
def test_more_devices_than_available_is_an_error(device: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        reconv.train("quickstart", overrides=LARGE, device=device, devices=MANY)


def test_existing_run_directory_is_an_error_with_several_devices(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("")
    with pytest.raises(UsageError, match="already contains a run"):
        reconv.train("quickstart", out=tmp_path, devices=2)
