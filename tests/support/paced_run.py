"""A short run that can be disturbed: its steps take a while on any machine, and its weights must not depend on it.

Ordered reduction gives the bits of one process on any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_RECIPE = """\
extends: quickstart
name: quickstart  # a weights file has it
callbacks: [paced_steps:PacedSteps]
"""
_CALLBACK = """\
import time
import reconv

class PacedSteps(reconv.Callback):
    def on_step_end(self, run):
        time.sleep({pause_s})
"""
LIMIT_S = 300.0


def write_recipe(folder: Path, pause_s: float = 0.05) -> Path:
    """quickstart with a pause after each step, in a file."""
    folder.mkdir(exist_ok=True)
    (folder / "paced_steps.py").write_text(_CALLBACK.format(pause_s=pause_s))
    file = folder / "paced.yaml"
    file.write_text(_RECIPE)
    return file


@dataclass(frozen=True, slots=True)
class PacedRun:
    """A run directory, and the words that train in it."""

    out: Path
    steps: int = 240
    save_every: int = 60

    @property
    def recipe(self) -> Path:
        """The recipe, in a file beside the run."""
        return write_recipe(self.out.parent)

    @property
    def settings(self) -> list[str]:
        """The options that make the run short, and its bits independent of the ranks."""
        fields = {
            "length": f"{self.steps}step",
            "schedule.warmup": "0ep",
            "batch.size": "32",
            "batch.group": "8",
            "save.every": f"{self.save_every}step",
            "evaluate.every": "off",
            "log.every": "5step",
            "engine.num_threads": "1",
            "data.num_workers": "0",
            "parallel.reduce": "ordered",
            "parallel.heartbeat_timeout_s": "10",
        }
        return [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]

    def train(self, *more: str) -> list[str]:
        """The words behind `python`: `-m reconv train ...`."""
        words = ["-m", "reconv", "train", str(self.recipe), "--device", "cpu", "--quiet", "--out", str(self.out)]
        return [*words, *self.settings, *more]

    def train_alone(self) -> str:
        """Train in one process without a pause; returns the digest of the final weights."""
        words = self.train()
        words[words.index(str(self.recipe))] = "quickstart"
        subprocess.run([sys.executable, *words], check=True, timeout=LIMIT_S, capture_output=True)
        return self.weights()

    def events(self, kind: str) -> list[dict[str, Any]]:
        file = self.out / "events.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [json.loads(line) for line in lines if f'"kind":"{kind}"' in line]

    def wait_for_step(self, step: int) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not any(event["step"] >= step for event in self.events("train")):
            assert time.monotonic() < deadline_s, f"step {step} of {self.out} never came"
            time.sleep(0.05)

    def pause_s(self, began_s: float) -> float:
        """From a moment to the first step that is logged by the next attempt."""
        resumed_s = next(event["time_s"] for event in self.events("attempt") if event["time_s"] > began_s)
        return float(next(e["time_s"] for e in self.events("train") if e["time_s"] > resumed_s) - began_s)

    def weights(self) -> str:
        """The digest of the final weights."""
        file = self.out / f"checkpoints/step-{self.steps:09d}/model.safetensors"
        return hashlib.sha256(file.read_bytes()).hexdigest()
