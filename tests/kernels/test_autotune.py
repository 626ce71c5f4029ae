"""The fastest implementation with the right values is chosen."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from reconv.kernels.autotune import Call, fastest

PLAIN = torch.arange(16.0).view(2, 2, 2, 2)


def refuses() -> Tensor:
    raise RuntimeError("no plan for this shape")


def does_not_fit() -> Tensor:
    raise OutOfResources(250_000, 232_448, "shared memory")


def form(value: Tensor) -> Call:
    return lambda: value


def test_the_fastest_form_of_the_plain_values_is_chosen() -> None:
    plain, slow, quick = form(PLAIN), form(PLAIN), form(PLAIN + 1e-5)
    times_ms = {plain: 2.0, slow: 3.0, quick: 1.0}
    assert fastest(plain, [slow, quick], times_ms.__getitem__) == 1
    assert fastest(plain, [slow], times_ms.__getitem__) == -1


def test_forms_that_differ_or_do_not_run_are_never_chosen() -> None:
    plain, other, nan = form(PLAIN), form(PLAIN * 1.1), form(PLAIN * torch.nan)
    times_ms = {plain: 2.0}  # nothing else is timed
    assert fastest(plain, [other, refuses, does_not_fit, nan], times_ms.__getitem__) == -1


def test_a_form_that_lies_in_memory_in_another_way_is_not_chosen() -> None:
    plain, turned = form(PLAIN), form(PLAIN.contiguous(memory_format=torch.channels_last))
    assert fastest(plain, [turned], {plain: 2.0}.__getitem__) == -1
    assert fastest(turned, [plain], {turned: 2.0}.__getitem__) == -1
    pixel = torch.ones(3, 4, 1, 1)  # has both layouts
    plain, turned = form(pixel), form(torch.ones(3, 1, 1, 4).permute(0, 3, 1, 2))
    assert fastest(plain, [turned], {plain: 2.0, turned: 1.0}.__getitem__) == 0


def test_what_is_not_a_number_in_itself_is_left_to_the_plain_form() -> None:
    times_ms: dict[Call, float] = {}
    assert fastest(form(PLAIN * torch.nan), [form(PLAIN * torch.nan)], times_ms.__getitem__) == -1
