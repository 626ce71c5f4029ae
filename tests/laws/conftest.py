"""Small real runs that the laws compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
from torch import Tensor

import reconv
from reconv.checkpoint.store import CheckpointStore
from reconv.logging.run_dir import RunDir

Train = Callable[..., "Outcome"]

# Every part that carries state is on: accumulation, several groups, mixing, an average, momentum.
EVERYTHING = {
    "length": "2ep",
    "data.subset_percent": "25",
    "batch.size": "64",
    "batch.group": "16",
    "batch.micro": "32",
    "augment.mixup.alpha": "0.2",
    "ema.decay": "0.9",
    "save.every": "3step",
    "evaluate.every": "1ep",
}


class Outcome:
    """What a run left: the tensors of its last checkpoint, part by part, and its events."""

    def __init__(self, folder: Path, summary: dict[str, object]) -> None:
        self.folder = RunDir(folder)
        self.summary = summary
        newest = CheckpointStore(self.folder.checkpoints).newest().path
        assert newest is not None
        self.checkpoint = newest
        self.parts = {file.stem: safetensors.torch.load_file(file) for file in newest.glob("*.safetensors")}

    def bits(self) -> dict[str, Tensor]:
        return {f"{part}/{name}": tensor for part, tensors in self.parts.items() for name, tensor in tensors.items()}


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Train the quickstart recipe with overrides in a separate directory."""

    def run(name: str, overrides: dict[str, str], *, resume: bool = False) -> Outcome:
        given = [(field, value, "--set") for field, value in overrides.items()]
        result = reconv.train("quickstart", out=tmp_path / name, overrides=given, resume=resume)
        return Outcome(result.folder, result.summary)

    return run
