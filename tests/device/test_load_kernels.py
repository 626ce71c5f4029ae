"""What is launched to load CUDA kernels ahead must run, and leave no trace; here it runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from reconv.device import load_kernels

KINDS = (
    load_kernels._run_convolution,
    load_kernels._run_elementwise,
    load_kernels._run_metrics,
    load_kernels._run_classifier,
)


@pytest.mark.parametrize("run", KINDS, ids=lambda run: run.__name__)
def test_each_kind_runs_and_uses_no_random_numbers(run: Callable[[torch.device], None]) -> None:
    before = torch.get_rng_state()
    run(torch.device("cpu"))  # in a thread its errors would pass unnoticed
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()
