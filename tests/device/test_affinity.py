"""Binding a process to CPU cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from reconv.core.errors import UsageError
from reconv.device.affinity import cpu_affinity, numa_cpus, parse_cpu_list, rank_cpus


@pytest.mark.parametrize(("allowed", "local_world_size", "shares"), [
    ({0, 1, 2, 3, 8, 9}, 3, [{0, 1}, {2, 3}, {8, 9}]),
    ({4, 5, 6, 7, 8}, 2, [{4, 5}, {6, 7}]),
    ({0, 1}, 4, [{0}, {1}, {0}, {1}]),
])  # fmt: skip
def test_each_rank_gets_the_same_number_of_adjacent_cores(
    monkeypatch: pytest.MonkeyPatch, allowed: set[int], local_world_size: int, shares: list[set[int]]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: allowed)
    assert [rank_cpus(local_rank, local_world_size) for local_rank in range(local_world_size)] == shares


@pytest.fixture
def cores() -> Iterator[set[int]]:
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def test_a_process_is_bound_to_a_list_of_cores_and_released(cores: set[int]) -> None:
    first = min(cores)
    with cpu_affinity(f"{first}", lambda: None) as note:
        assert os.sched_getaffinity(0) == {first}
        assert note == f"engine.cpu_affinity: bound to cores {first}"
    assert os.sched_getaffinity(0) == cores
    with cpu_affinity(f"{first},9000-9001", lambda: None) as note:
        assert note == f"engine.cpu_affinity: bound to cores {first}; 9000-9001 are not available"
    assert os.sched_getaffinity(0) == cores
    with pytest.raises(UsageError, match="none of the cores 9000"), cpu_affinity("9000", lambda: None):
        raise AssertionError
    assert parse_cpu_list("0-2,7") == {0, 1, 2, 7}


def test_near_cores_are_those_of_the_numa_node(tmp_path: Path, cores: set[int]) -> None:
    device = tmp_path / "bus/pci/devices/0000:17:00.0"
    device.mkdir(parents=True)
    node = tmp_path / "devices/system/node/node1"
    node.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    (node / "cpulist").write_text(f"{min(cores)},4000\n")
    assert numa_cpus("0000:17:00.0", tmp_path) == {min(cores), 4000}
    with cpu_affinity("near", lambda: "0000:17:00.0", tmp_path) as note:
        assert os.sched_getaffinity(0) == {min(cores)}
        assert "4000 are not available" in note
    (device / "numa_node").write_text("-1\n")
    with cpu_affinity("near", lambda: "0000:17:00.0", tmp_path) as note:
        assert "no effect" in note and os.sched_getaffinity(0) == cores
    assert numa_cpus("0000:99:00.0", tmp_path) is None
    assert numa_cpus(None, tmp_path) is None
