"""Run directories with small checkpoints, as training writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from reconv.checkpoint import manifest
from reconv.checkpoint.run_identity import RunIdentity, write_identity
from reconv.checkpoint.store import open_store
from reconv.logging.run_dir import RunDir

RECIPE_DIGEST = "0" * 32


def start_run(root: Path, name: str = "quickstart", *, steps: Sequence[int] = ()) -> RunDir:
    """A run with a recipe, an identity and checkpoints."""
    run = RunDir.create(root, name)
    write_identity(run, RunIdentity.new(RECIPE_DIGEST))
    run.recipe.write_text("name: quickstart\n")
    for step in steps:
        save(run, step)
    return run


def save(run: RunDir, step: int, history: Mapping[int, float] | None = None) -> Path:
    """Save a checkpoint; `history` has the top-1 accuracy at each evaluated step."""
    tensors = {"w": torch.full((2,), float(step))}
    return open_store(run).save(step, {"model": tensors, "ema": tensors}, state(step, history or {})).path


def state(step: int, history: Mapping[int, float]) -> dict[str, Any]:
    return {
        "step": step,
        "total_steps": 10_000,
        "history": [{"step": at, "weights": "raw", "metrics": {"top1": value}} for at, value in history.items()],
        "monitored": {"metric": "top1", "weights": "raw"},
        "skipped": 0,
        "micro_groups": 1,
        "bad_images": [],
        "recipe": {"name": "quickstart"},
        "class_names": ["a", "b"],
        "data_fingerprint": {"train": "1", "val": "2"},
        "threads": 1,
        "device": "cpu",
    }


def sign(folder: Path, **changed: object) -> None:
    """Write the manifest of a checkpoint anew, for the files that it has now; `changed` are other fields of it."""
    old = manifest.read(folder)
    paths = [path for path in folder.iterdir() if path.name != manifest.NAME]
    files = {path.name: manifest.entry_of(path.read_bytes()) for path in paths}
    fields: dict[str, Any] = {"step": old.step, "run_id": old.run_id, "recipe_digest": old.recipe_digest, **changed}
    (folder / manifest.NAME).write_bytes(manifest.render(manifest.Manifest(files=files, **fields)))


def change_state(folder: Path, **changed: object) -> None:
    """Change fields of a checkpoint's `state.json` and sign it again."""
    path = folder / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    sign(folder)
