"""The end of `model.freeze_until`: from its step on the backbone is trained, too.

The optimizer has state for all parameters from the start, and skips those without gradients. When the backbone is
unfrozen the training step is built again, as for a run that is resumed at that step
(tests/laws/test_law_frozen_backbone.py).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

from reconv.models.frozen import FrozenBackbone
from reconv.trainer.callbacks.base import TrainerCallback
from reconv.trainer.step import TrainStep

if TYPE_CHECKING:
    from reconv.trainer.loop import Trainer


class UnfreezeBackbone(TrainerCallback):
    """Trains all parameters from a step on.

    The training step is built again, as for a run that is resumed there: DDP and captured graphs are made for one set
    of trained parameters.
    """

    def __init__(self, freeze_steps: int, backbone: FrozenBackbone, build_step: Callable[[], TrainStep]) -> None:
        self._freeze_steps = freeze_steps
        self._backbone = backbone
        self._build_step = build_step

    def on_batch_fetch_end(self, trainer: Trainer, step: int) -> None:
        if step != self._freeze_steps:
            return
        self._backbone.unfreeze()
        trainer.step = self._build_step()
        gc.collect()  # frees the gradient buckets and the captured graphs of the old step
        trainer.logger.info("the backbone is unfrozen: all parameters are trained from here on", step)
