"""The CUDA context that is created while torch is imported, with a driver library of the test."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from reconv.core.cuda_context import start_cuda_context

DRIVER = """
int retained = -1;
int cuInit(unsigned flags) { return NUM_DEVICES ? 0 : 100; }
int cuDeviceGet(int *device, int index) { *device = 40 + index; return index < NUM_DEVICES ? 0 : 101; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = 0; retained = device; return 0; }
"""


def compile_driver(num_devices: int) -> Path:
    source, library = Path("driver.c"), Path(f"libdriver{num_devices}.so").absolute()
    source.write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", f"-DNUM_DEVICES={num_devices}", "-o", library, source], check=True)
    return library


@pytest.mark.native
@pytest.mark.parametrize(
    ("device", "num_devices", "retained"),
    [("auto", 2, 40), ("cuda", 2, 40), ("cuda:1", 2, 41), ("cuda:2", 2, -1), ("auto", 0, -1)],
)
def test_the_context_is_that_of_the_device_of_the_run(device: str, num_devices: int, retained: int) -> None:
    library = compile_driver(num_devices)
    ready: list[int] = []
    thread = start_cuda_context(device, ready.append, str(library))
    assert thread is not None
    thread.join()
    assert ready == ([] if retained == -1 else [retained - 40])
    assert ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "retained").value == retained


@pytest.mark.parametrize("device", ["cpu", "mps", "hpu", "cuda:x"])
def test_other_devices_get_no_context(device: str) -> None:
    assert start_cuda_context(device, library="libdriver.so") is None


def test_a_machine_without_the_library_is_left_to_torch() -> None:
    thread = start_cuda_context("cuda", library="/no/such/libcuda.so")
    assert thread is not None
    thread.join()
