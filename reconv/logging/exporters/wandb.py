"""A Weights & Biases run in the run directory's `wandb/`, offline unless WANDB_MODE=online (upload: `wandb sync`)."""

from __future__ import annotations

import importlib
import os
from typing import Any

from reconv.logging.events import EvalFinished, Event, ImageLogged, RunEnded, ScalarLogged, TrainProgress
from reconv.logging.exporters.base import ExportedRun, series


class WandbExporter:
    """Logs to Weights & Biases; all attempts share one run id."""

    def __init__(self, run: ExportedRun) -> None:
        mode = os.environ.get("WANDB_MODE") or "offline"
        if mode != "online":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it uploads reports of its own crashes otherwise
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
            # Otherwise it wraps stdout, where the console draws, and reads the user's repository.
            settings=self._wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )

    def on_event(self, event: Event) -> None:
        match event:
            case TrainProgress() | EvalFinished() | ScalarLogged():
                self._run.log(dict(series(event)), step=event.step)
            case ImageLogged():
                path = str(event.file(self._exported.run_dir))
                self._run.log({event.title: self._wandb.Image(path)}, step=event.step)
            case RunEnded():
                self._run.finish(exit_code=event.exit_code)
                self._run = None

    def close(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=1)
            self._run = None
