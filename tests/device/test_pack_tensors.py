"""Small tensors that are copied together keep their values, shapes and dtypes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from reconv.device.pack_tensors import pack_tensors, unpack_tensors

DTYPES = [torch.bool, torch.uint8, torch.int16, torch.float16, torch.float32, torch.int64, torch.float64]
shapes = st.lists(st.integers(0, 5), max_size=3)


@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=6), st.integers(0, 2**32))
def test_unpacked_tensors_are_those_that_were_packed(
    given_tensors: list[tuple[list[int], torch.dtype]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randint(0, 2, shape, generator=generator).to(dtype) for shape, dtype in given_tensors]
    found = unpack_tensors(pack_tensors(tensors).clone(), tensors)
    for ours, expected in zip(found, tensors, strict=True):
        assert ours.dtype == expected.dtype and ours.shape == expected.shape and torch.equal(ours, expected)
        assert ours.is_contiguous()
