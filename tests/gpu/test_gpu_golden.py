"""On a GPU, short trainings give the losses and weights that are stored in tests/golden/cuda.json for this GPU.

After a change that is meant to change results: `python tests/golden/accept.py --device cuda`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from golden_runs import GPU_RUNS, GPU_SETTINGS, RUNS, gpu_key, perform, read_values
from golden_values import compare

# Of losses on another GPU or torch, after eight steps; kernels and graphs there may differ.
TOLERANCE = 0.1


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden-data")


@pytest.mark.parametrize("name", GPU_RUNS)
def test_losses_and_weights_equal_the_stored_ones(
    name: str,
    data_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    assert name in RUNS
    monkeypatch.chdir(tmp_path)
    outcome = perform(name, data_folder, "cuda", GPU_SETTINGS)
    values = read_values("cuda")
    assert values, "store the numbers of a GPU first: python tests/golden/accept.py --device cuda"
    how, differences = compare(name, asdict(outcome), values, gpu_key(), TOLERANCE)
    record_property("golden", how)
    assert differences == [], how
