"""The CUDA context of a process, created in a thread while torch is being imported: both take a third of a second.

This module does not import torch. It affects speed only: without the context torch creates it.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread

NVIDIA_DRIVER = Path("/dev/nvidiactl")
_LIBRARY = "libcuda.so.1"


def start_cuda_context(
    device: str, hint: Callable[[int], None] = lambda index: None, library: str = _LIBRARY
) -> Thread | None:
    """Create the context that a run on this device will use; None if that is no GPU, or not known yet.

    With a context, the thread calls `then` with the index of the GPU.
    """
    match = re.fullmatch(r"auto|cuda(?::(\d+))?", device)
    if match is None or (library == _LIBRARY and not NVIDIA_DRIVER.exists()):
        return None
    thread = Thread(target=_create_context, args=(library, int(match[1] or 0), hint), name="reconv-cuda", daemon=True)
    thread.start()
    return thread


def _create_context(library: str, index: int, hint: Callable[[int], None]) -> None:
    """Retain the primary context of a device, which torch uses as well; errors are left to torch."""
    with suppress(OSError):  # there is no such library
        driver = ctypes.CDLL(library)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        has_device = driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0
        if has_device and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0:
            hint(index)
