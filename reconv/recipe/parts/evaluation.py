"""The recipe sections `evaluate`, `early_stopping`, `save` and `log`: what a run does between its steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from reconv.recipe.units import Duration, Listed, Off, Positive, PositiveFraction, Section

MULTILABEL_THRESHOLD = 0.5  # of the sigmoid, for F1 and predictions


class EvaluateConfig(Section):
    """Evaluation of the validation set."""

    every: Duration | Off = Duration(1, "ep")
    """Interval between evaluations; there is always one at the end, unless `off`."""
    offset: Duration = Duration(0, "ep")
    """Point of the first evaluation; the next follows `every` later."""
    batch_size: Positive = 256
    """Samples per forward pass."""
    num_samples: Positive | None = None
    """Evaluate only this many samples, spread evenly over the validation set; such results are marked partial."""
    best_metric: str | None = None
    """Metric that decides which checkpoint is best and when early_stopping ends a run, larger is better: of
    classification top1 (null), top5 or one of your own metrics; of detection null, which is detection.metric."""
    coverage: Annotated[float, Field(ge=0.5, lt=1)] | Off = 0.9
    """Share of images whose prediction set has the right class (conformal prediction). At the end of a run temperature
    and sets of a classifier are fitted on its validation images, if there are enough; `off`: neither."""
    tta: Literal["none", "flip", "flip-translate"] = "none"
    """Test-time augmentation, also for prediction: average the logits of the image and its mirror image (`flip`), and
    of both shifted by one pixel to the upper left and the lower right at half weight (`flip-translate`)."""


class EarlyStoppingConfig(Section):
    """Early end of a run, by the metric of its evaluations."""

    target: PositiveFraction | Off = "off"
    """Stop as soon as the metric reaches this value."""
    patience: Positive | Off = "off"
    """Stop after this many evaluations without improvement."""


class SaveConfig(Section):
    """Times of checkpoints, and which are kept."""

    every: Duration | Off = Duration(1, "ep")
    """Interval between checkpoints in epochs, steps, percent of the run or minutes; `off` writes none."""
    keep_last: Positive = 2
    """Number of latest checkpoints to keep. If it is 1 or 2, a checkpoint that is due while others are being written
    may be left out in favor of the next one, so that training does not wait for the disk."""
    keep_best: bool = True
    """Also keep the best checkpoint by the evaluation metric."""
    keep_at: Annotated[tuple[Duration, ...], Listed] = ()
    """Points at which checkpoints are written and never deleted."""
    background: bool = True
    """Write checkpoints in the background; training only waits for a copy of the state."""


class LogConfig(Section):
    """Interval at which training progress is logged."""

    every: Duration | Literal["auto"] = "auto"
    """Interval between log lines; `auto` is 10 steps, and fewer in runs of less than 500 steps, which get 50 lines."""
