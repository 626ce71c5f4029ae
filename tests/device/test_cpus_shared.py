"""The cores that several processes of a machine share out among them."""

from __future__ import annotations

import os

import pytest

from reconv.device.affinity import rank_cpus


@pytest.mark.parametrize(("allowed", "local_world_size", "shares"), [
    ({0, 1, 2, 3, 8, 9}, 3, [{0, 1}, {2, 3}, {8, 9}]),
    ({4, 5, 6, 7, 8}, 2, [{4, 5}, {6, 7}]),
    ({0, 1}, 4, [{0}, {1}, {0}, {1}]),
])  # fmt: skip
def test_each_process_has_neighbouring_cores_and_as_many_as_the_others(
    monkeypatch: pytest.MonkeyPatch, allowed: set[int], local_world_size: int, shares: list[set[int]]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: allowed)
    assert [rank_cpus(local_rank, local_world_size) for local_rank in range(local_world_size)] == shares
