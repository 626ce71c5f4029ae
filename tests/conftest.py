"""What every test stands on: one torch thread, an empty folder to work in, the same examples on every run."""

from __future__ import annotations

import os
from pathlib import Path

# Kernels run in Triton's interpreter, which must be chosen before anything imports Triton: torch's compiler does.
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from hypothesis import settings

from reconv.device.tiles import avoid_broken_tiles

# oneDNN reads its limits once, at its first use in a process: before any test.
avoid_broken_tiles()

# xdist uses every core already; and bitwise laws hold at equal thread counts.
torch.set_num_threads(1)

settings.register_profile("reconv", deadline=None, derandomize=True, database=None, max_examples=50)
settings.load_profile("reconv")


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder of one's own, so that no test writes runs/ into the checkout or finds the user's data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("DATA_DIR", raising=False)
