"""Choosing the fastest of several implementations of an operation on this device by trying each once.

An implementation whose values or memory layout differ from the plain one's is never chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from reconv.kernels.dispatch import has_triton

Call = Callable[[], Tensor]
_TRIALS = 5
_SLEEP_CYCLES = 3_000_000  # over a millisecond, in which the host enqueues all trials: launch overhead is not timed
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}  # relative to the largest value
_TF32_TOLERANCE, _FP32_TOLERANCE = 1e-2, 1e-4  # the second rejects TF32 where float32 is wanted


def fastest(plain: Call, others: Sequence[Call], time_ms: Callable[[Call], float] | None = None) -> int:
    """The index of the fastest of `others` that runs and equals the plain implementation; -1 if the plain one is
    fastest."""
    time_ms = time_ms or time_on_device_ms
    result = plain()
    expected, limit = result.float(), tolerance(result.dtype)
    times_ms: dict[int, float] = {}
    failures = _launch_errors()
    for place, call in [*enumerate(others), (-1, plain)]:
        try:
            y = call().float()
        except failures:
            continue
        error = (y - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
        if float(error) <= limit and _have_same_layout(y, expected):
            times_ms[place] = time_ms(call)
    return min(times_ms, key=times_ms.__getitem__, default=-1)


def _launch_errors() -> tuple[type[Exception], ...]:
    """Errors of an implementation that cannot run: cuDNN has no plan, or a tile does not fit into shared memory."""
    if not has_triton():
        return (RuntimeError,)
    from triton.errors import TritonError

    return RuntimeError, TritonError


def _have_same_layout(a: Tensor, b: Tensor) -> bool:
    """True if two image tensors have the same memory format."""
    layouts = (torch.channels_last, torch.contiguous_format)
    return any(a.is_contiguous(memory_format=layout) and b.is_contiguous(memory_format=layout) for layout in layouts)


def tolerance(dtype: torch.dtype) -> float:
    """The largest error relative to the largest value that an implementation may have."""
    has_tf32: bool = torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    return _TOLERANCE.get(dtype, _TF32_TOLERANCE if has_tf32 else _FP32_TOLERANCE)


def time_on_device_ms(call: Call) -> float:
    """Milliseconds that a call takes on the current CUDA device."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    torch.cuda._sleep(_SLEEP_CYCLES)
    began.record()
    for _ in range(_TRIALS):
        call()
    ended.record()
    ended.synchronize()
    spent_ms: float = began.elapsed_time(ended)
    return spent_ms / _TRIALS
