"""A Weights and Biases run in the run folder's `wandb/`, offline unless the user says otherwise in WANDB_MODE.

Owns the mapping of events to a wandb run. Refuses to know how it is stored or uploaded: `wandb sync` is the user's.
Invariant: without WANDB_MODE=online nothing leaves the machine; all attempts share one run id.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from reconv.logging.events import EvalFinished, Event, ImageLogged, RunEnded, TrainProgress
from reconv.logging.exporters.exporter import ExportedRun, series


class WandbExporter:
    """One offline run an attempt, under the same id."""

    def __init__(self, run: ExportedRun) -> None:
        mode = os.environ.get("WANDB_MODE") or "offline"
        if mode != "online":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # the package reports its own crashes otherwise
        self._wandb: Any = importlib.import_module("wandb")
        self._exported = run
        self._run: Any = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "reconv",
            name=run.label,
            id=run.run_id,
            resume="allow",
            dir=str(run.run_dir),
            mode=mode,
            config=run.settings(),
            # It would else wrap stdout, where our console draws, and read the user's repository.
            settings=self._wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )

    def on_event(self, event: Event) -> None:
        match event:
            case TrainProgress() | EvalFinished():
                self._run.log(dict(series(event)), step=event.step)
            case ImageLogged():
                path = self._exported.run_dir / event.path
                self._run.log({event.title: self._wandb.Image(str(path))}, step=event.step)
            case RunEnded():
                self._run.finish(exit_code=event.exit_code)
                self._run = None

    def close(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=1)
            self._run = None
