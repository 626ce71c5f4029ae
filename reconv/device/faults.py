"""Faults of a device, as errors that say what to do: a kernel outside its memory, a lost device, a failed capture."""

from __future__ import annotations

import torch

from reconv.core.errors import ResourceError

_CAPTURE = ("captur", "cudaErrorStreamCapture")
_RESUME = "run the same command with --resume (or reconv resume RUN): it continues from the newest checkpoint"
_WHY = (
    (
        ("illegal memory access", "misaligned address", "invalid program counter", "illegal instruction"),
        "a kernel was wrong, of custom code or of a library, or the device is defective; the process cannot use it "
        "any more",
        "CUDA_LAUNCH_BLOCKING=1 names the call",
    ),
    (
        ("device-side assert",),
        "a kernel refused its inputs, such as a label beyond the number of classes",
        "CUDA_LAUNCH_BLOCKING=1 names the call",
    ),
    (
        ("uncorrectable", "ECC", "fallen off", "device is lost", "unknown error", "no CUDA-capable device"),
        "the device or its driver has failed",
        "look at `dmesg | grep -i xid` and `nvidia-smi`, and take a device that fails again out of service",
    ),
    (
        ("launch timed out", "launch failure"),
        "a kernel hung or crashed",
        "CUDA_LAUNCH_BLOCKING=1 names the call",
    ),
)


class DeviceError(ResourceError):
    """A device that has failed; the process cannot use it any more."""


def device_error(error: BaseException) -> DeviceError | None:
    """The error for a fault of a device; None for all others, of which running out of memory is one.

    Such a fault is found at any later call, so that the place where it was raised says little.
    """
    if not isinstance(error, torch.AcceleratorError):
        return None
    text = str(error).partition("\n")[0]
    if any(word in text for word in _CAPTURE):
        return DeviceError(
            f"a step could not be captured as a CUDA graph: {text}",
            why="it calls something that waits for the device, in custom code or a library",
            hint=f"--set engine.cuda_graphs=off; {_RESUME}",
        )
    for words, why, advice in _WHY:
        if any(word in text for word in words):
            return DeviceError(f"the device has failed: {text}", why=why, hint=f"{_RESUME}; {advice}")
    return DeviceError(f"the device has failed: {text}", hint=_RESUME)
