"""Errors before a run starts: too many devices, a run directory that is in use, no memory."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import in_ranks

import reconv
from reconv.bench.train import bench_train
from reconv.core.errors import RecipeError, ResourceError, UsageError, one_of
from reconv.trainer.dry_run import dry_run

MANY = 1 << 16
LARGE = [("batch.size", str(2 * MANY), "--set"), ("batch.group", "2", "--set")]


@pytest.mark.parametrize("command", [reconv.train, dry_run, bench_train])
def test_more_devices_than_batch_groups_is_an_error(command: Callable[..., object]) -> None:
    with pytest.raises(RecipeError, match="cannot be divided over 100 devices") as caught:
        command("quickstart", devices=100)
    assert caught.value.hint == one_of("--devices 64", "--batch-size 100")


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


def train_without_address_space() -> str:
    """Train in a process that may not map any more memory; why that is refused."""
    used_pages = int(Path("/proc/self/statm").read_text().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used_pages * resource.getpagesize(), hard))
    with pytest.raises(ResourceError, match="out of memory") as caught:
        reconv.train("quickstart", out="run")
    return caught.value.why


def test_a_process_without_address_space_ends_instead_of_waiting_for_a_thread() -> None:
    [why] = in_ranks(1, train_without_address_space)
    assert why == "less than 8 MiB of address space are left to this process (ulimit -v)"
    assert not Path("run").exists()
