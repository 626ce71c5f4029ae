"""Opening devices by name, and recognizing when one is out of memory."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest
import torch

from reconv.core.errors import UsageError
from reconv.device import is_out_of_memory, open_device


def test_cpu_moves_copies_and_counts_memory() -> None:
    device = open_device("cpu")
    value = torch.tensor(3.0)
    wait = device.copy_to_host(value)
    value.fill_(4.0)
    assert wait().item() == 3.0
    device.synchronize()
    device.step_boundary()
    assert device.move(value).device == device.torch
    assert 10**7 < device.peak_memory_bytes() < device.total_memory_bytes()
    assert "thread" in device.describe()


def test_threads_are_set_when_given() -> None:
    before = torch.get_num_threads()
    try:
        assert "1 thread" in open_device("cpu", threads=1).describe()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_auto_opens_the_best_available_device() -> None:
    expected = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert open_device("auto").kind == expected


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:99", "hpu", "hpu:0"])
def test_a_missing_device_error_says_what_to_do(name: str) -> None:
    with pytest.raises(UsageError) as exc_info:
        open_device(name)
    assert exc_info.value.hint


def test_every_out_of_memory_error_is_recognized() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(OSError(errno.ENOMEM, "no memory"))
    with pytest.raises(RuntimeError) as exc_info:
        torch.empty(1 << 60)
    assert is_out_of_memory(exc_info.value)
    assert not is_out_of_memory(OSError(errno.ENOSPC, "no space"))
    assert not is_out_of_memory(RuntimeError("shapes do not agree"))


HALF_PRECISION = """
import torch
from reconv.device import open_device
open_device("cpu", threads=1)
rows = torch.ones(8, 64, dtype=torch.bfloat16)
assert torch.nn.functional.linear(rows, torch.ones(10, 64, dtype=torch.bfloat16)).sum().item() == 8 * 10 * 64
"""


def test_half_precision_on_the_cpu_survives_amx_that_is_reported_but_broken() -> None:
    subprocess.run([sys.executable, "-c", HALF_PRECISION], check=True)
