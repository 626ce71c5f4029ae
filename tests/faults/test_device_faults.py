"""Faults of a device at any step: a clear error, a good checkpoint, and a resume to the bits of an undisturbed run.

The errors are those that torch raises, at the places where they show. tests/gpu/test_gpu_faults.py causes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bit_flips import last_bits

import reconv
from reconv.core.errors import ExitCode, ReconvError
from reconv.device.faults import DeviceError, device_error
from reconv.logging.run_dir import read_summary
from reconv.models.resnet import ResNet
from reconv.optim.sgd import SGD

SETTINGS = {
    "length": "6step",
    "schedule.warmup": "1step",
    "save.every": "1step",
    "evaluate.every": "3step",
    "evaluate.num_samples": "16",
    "batch.size": "8",
    "data.subset_percent": "3",
    "data.num_workers": "0",
}
FAULTS = {
    "memory": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "memory", "batch"),
    "illegal access": (
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ..."),
        "the device has failed: CUDA error: an illegal memory access was encountered",
        "CUDA_LAUNCH_BLOCKING=1",
    ),
    "lost": (torch.AcceleratorError("CUDA error: unknown error"), "the device has failed", "nvidia-smi"),
    "hung": (torch.AcceleratorError("CUDA error: the launch timed out and was terminated"), "timed out", "--resume"),
    "capture": (
        torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"),
        "could not be captured as a CUDA graph",
        "engine.cuda_graphs=off",
    ),
}


def train(out: Path, **options: Any) -> None:
    overrides = [(name, value, "test") for name, value in SETTINGS.items()]
    reconv.train("quickstart", out=out, overrides=overrides, device="cpu", console="quiet", **options)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    train(out)
    return last_bits(out)


@pytest.mark.parametrize("call", [1, 5])
@pytest.mark.parametrize("place", ["forward", "update"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_at_any_step_is_an_error_and_the_run_resumes(
    name: str, place: str, call: int, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, what, hint = FAULTS[name]
    owner: Any = ResNet if place == "forward" else SGD
    method, calls = ("forward" if place == "forward" else "step"), iter(range(1, 1000))
    original = getattr(owner, method)

    def fail(self: Any, *args: Any) -> Any:
        if next(calls) == call:
            raise error
        return original(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(owner, method, fail)
        with pytest.raises(ReconvError) as raised:
            train(tmp_path / "run")
    assert raised.value.code == ExitCode.RESOURCES
    assert what in raised.value.what and hint in str(raised.value)
    assert read_summary(tmp_path / "run")["exit_code"] == ExitCode.RESOURCES
    train(tmp_path / "run", resume=True)
    assert last_bits(tmp_path / "run") == expected


TEXTS = [
    "CUDA error: device-side assert triggered",
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA error: misaligned address",
    "HIP error: something new",
]


@pytest.mark.parametrize("text", TEXTS)
def test_every_error_of_an_accelerator_is_one_of_the_device(text: str) -> None:
    found = device_error(torch.AcceleratorError(f"{text}\nmore lines"))
    assert isinstance(found, DeviceError)
    assert found.what.endswith(text) and "--resume" in str(found)


def test_other_errors_are_not() -> None:
    assert device_error(torch.OutOfMemoryError("CUDA out of memory")) is None
    assert device_error(RuntimeError("CUDA error: not from torch")) is None
