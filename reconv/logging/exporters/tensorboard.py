"""TensorBoard scalars, hyperparameters and images, in the run directory's `tensorboard/`.

Steps that a resume discards are purged, so curves show the last attempt.
"""

from __future__ import annotations

import importlib
from typing import Any

from reconv.logging.events import IMAGE_FORMATS, EvalFinished, Event, ImageLogged, RunEnded, ScalarLogged, TrainProgress
from reconv.logging.exporters.base import ExportedRun, series

_FLUSH_S = 10


class TensorBoardExporter:
    """Writes TensorBoard event files, one per attempt."""

    def __init__(self, run: ExportedRun) -> None:
        tensorboard: Any = importlib.import_module("torch.utils.tensorboard")
        purge_step = run.attempt.from_step + 1 if run.past else None
        self._exported = run
        self._scores: dict[str, float] = {}
        self._writer: Any = tensorboard.SummaryWriter(
            log_dir=str(run.run_dir / "tensorboard"), purge_step=purge_step, flush_secs=_FLUSH_S
        )

    def on_event(self, event: Event) -> None:
        match event:
            case TrainProgress() | EvalFinished() | ScalarLogged():
                for name, value in series(event).items():
                    self._writer.add_scalar(name, value, event.step, walltime=event.time_s)
                if isinstance(event, EvalFinished):
                    self._scores |= series(event)
            case ImageLogged():
                self._add_image(event)
            case RunEnded():
                scores = {name.replace("val", "hparam", 1): value for name, value in self._scores.items()}
                # run_name "." keeps the hyperparameters in this run instead of a new one beside it
                self._writer.add_hparams(self._exported.settings(), scores, run_name=".", global_step=event.step)
                self.close()

    def close(self) -> None:
        self._writer.close()

    def _add_image(self, event: ImageLogged) -> None:
        import numpy as np
        from PIL import Image

        with Image.open(event.file(self._exported.run_dir), formats=IMAGE_FORMATS) as image:
            pixels = np.asarray(image.convert("RGB"))
        self._writer.add_image(event.title, pixels, event.step, walltime=event.time_s, dataformats="HWC")
        if event.captions:
            text = "\n".join(f"{number}. {caption}" for number, caption in enumerate(event.captions, 1))
            self._writer.add_text(event.title, text, event.step, walltime=event.time_s)
