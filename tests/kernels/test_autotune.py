"""The fastest implementation with the right values is chosen."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from reconv.kernels.autotune import Call, fastest

REFERENCE = torch.arange(16.0).view(2, 2, 2, 2)


def fails() -> Tensor:
    raise RuntimeError("no plan for this shape")


def does_not_fit() -> Tensor:
    raise OutOfResources(250_000, 232_448, "shared memory")


def candidate(value: Tensor) -> Call:
    return lambda: value


def test_the_fastest_correct_candidate_is_chosen() -> None:
    reference, slow, quick = candidate(REFERENCE), candidate(REFERENCE), candidate(REFERENCE + 1e-5)
    times_ms = {reference: 2.0, slow: 3.0, quick: 1.0}
    assert fastest(reference, [slow, quick], times_ms.__getitem__) == 1
    assert fastest(reference, [slow], times_ms.__getitem__) == -1


def test_wrong_or_failing_candidates_are_never_chosen() -> None:
    reference, other, nan = candidate(REFERENCE), candidate(REFERENCE * 1.1), candidate(REFERENCE * torch.nan)
    times_ms = {reference: 2.0}  # nothing else is timed
    assert fastest(reference, [other, fails, does_not_fit, nan], times_ms.__getitem__) == -1


def test_a_candidate_with_another_memory_format_is_not_chosen() -> None:
    reference, channels_last = candidate(REFERENCE), candidate(REFERENCE.contiguous(memory_format=torch.channels_last))
    assert fastest(reference, [channels_last], {reference: 2.0}.__getitem__) == -1
    assert fastest(channels_last, [reference], {channels_last: 2.0}.__getitem__) == -1
    pixel = torch.ones(3, 4, 1, 1)  # has both layouts
    reference, channels_last = candidate(pixel), candidate(torch.ones(3, 1, 1, 4).permute(0, 3, 1, 2))
    assert fastest(reference, [channels_last], {reference: 2.0, channels_last: 1.0}.__getitem__) == 0


def test_nan_reference_values_choose_the_reference() -> None:
    times_ms: dict[Call, float] = {}
    assert fastest(candidate(REFERENCE * torch.nan), [candidate(REFERENCE * torch.nan)], times_ms.__getitem__) == -1
