"""Inputs of the kernels' tests, their exact copies in float64, and pairwise combinations of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

from reconv.kernels import reference
from reconv.kernels.ops.batch_norm import NormParams

EPS = 1e-5
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
DTYPES = list(TOLERANCE)


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases such that any two values of different axes occur together in at least one; chosen greedily."""

    def pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(case), 2))

    every = list(product(*(range(len(axis)) for axis in axes)))
    missing, chosen = set().union(*map(pairs, every)), []
    while missing:
        case = max(every, key=lambda case: len(pairs(case) & missing))
        chosen.append(case)
        missing -= pairs(case)
    return [tuple(axis[i] for axis, i in zip(axes, case, strict=True)) for case in chosen]


def alternate(cases: Sequence[tuple[Any, ...]], values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The cases, each with one of the values in turn, and the first case with all of them."""
    return [(*case, values[i % len(values)]) for i, case in enumerate(cases)] + [
        (*cases[0], value) for value in values[1:]
    ]


def draw(shape: Sequence[int], dtype: torch.dtype, seed: int, offset: float = 0.0) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + offset
    return values.to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_()


def parameters(channels: int, seed: int) -> NormParams:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(channels, generator=generator).requires_grad_()
    bias = torch.randn(channels, generator=generator).requires_grad_()
    return NormParams(weight, bias, torch.rand(channels, generator=generator) + 0.5, EPS)


def as_float64(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_()


def norm_as_float64(narrow: NormParams) -> NormParams:
    return NormParams(as_float64(narrow.weight), as_float64(narrow.bias), narrow.running_var.double(), narrow.eps)


def plain(x: Tensor, of: NormParams, groups: Sequence[int]) -> tuple[Tensor, Tensor]:
    return reference.batch_norm(x, of.weight, of.bias, of.running_var, of.eps, groups)


def assert_near(actual: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    assert actual is not None and expected is not None
    error = (actual.double() - expected).abs().max()
    assert error <= tolerance * (1 + expected.abs().max()), f"off by {error:.3g} of {expected.abs().max():.3g}"
