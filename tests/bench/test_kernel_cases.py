"""`python -m benchmarks.kernels`: every case draws tensors, calls its ways and tries its launch configurations."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.kernels.cases import CASES
from benchmarks.kernels.harness import UNTRACED, Row, Sizes
from reconv.kernels.jit.launch import trace_launches

SIZES = Sizes(batch=4, max_side=14)


def traced_variants(row: Row) -> int:
    """The number of kernel variants that a row would compile, with its launch configurations."""
    with trace_launches() as traced:
        tensors = row.draw("meta")
        for name, way in row.ways.items():
            if name != UNTRACED:
                way(tensors)
        for config in dict.fromkeys(row.configs):
            assert row.ours is not None
            row.ours(tensors, config)
    return len(traced)


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_of_a_case_are_traced_with_every_configuration(name: str) -> None:
    rows = list(islice(CASES[name](SIZES), 2))
    assert len(rows) == 2
    for row in rows:
        assert row.num_bytes > 0 and row.ways
        if row.trace is None:  # else it is traced by the pass of the trainer
            assert traced_variants(row) >= max(1, len(set(row.configs)) // 6)  # programs per SM need no variant


def test_rows_of_a_case_have_names_of_their_own() -> None:
    for case in CASES.values():
        names = [row.name for row in case(SIZES)]
        assert len(names) == len(set(names)) > 1
