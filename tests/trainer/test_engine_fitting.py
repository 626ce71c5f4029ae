"""How the largest micro-batch is looked for, and what halving leaves."""

from __future__ import annotations

import pytest

from reconv.trainer.micro_batch import largest_that_fits
from reconv.trainer.oom import MicroBatchSize


@pytest.mark.parametrize(
    ("start", "most", "found", "tried"),
    [
        (4, 99, 12, [4, 6, 12]),
        (4, 6, 6, [4, 6, 12]),
        (4, 2, 2, [4, 3, 2]),
        (4, 0, 1, [4, 3, 2, 1]),  # the smallest, though it does not fit: its error tells
        (12, 12, 12, [12]),
    ],
)
def test_the_largest_that_fits_is_found_upwards_and_downwards(
    start: int, most: int, found: int, tried: list[int]
) -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= most

    assert largest_that_fits([1, 2, 3, 4, 6, 12], start, fits) == found
    assert asked == tried


@pytest.mark.parametrize(("tried", "left"), [(2, 1), (3, 1), (4, 2), (6, 3), (9, 3), (15, 5), (16, 8)])
def test_halves_divide_what_was_tried(tried: int, left: int) -> None:
    fitting = MicroBatchSize(tried)
    fitting.halve(tried)
    assert fitting.max_groups == left
