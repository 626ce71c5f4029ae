"""The recipe sections `model`, `ema` and `checkpoint_average`: the network, initial weights and averages of weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from reconv.recipe.parts.code import Options
from reconv.recipe.units import Duration, Listed, Off, PositiveFraction, Section


class ModelConfig(Section):
    """The network and the weights it starts from."""

    name: str = "resnet50"
    """Name of the network, as `reconv.models` or timm:NAME or torchvision:NAME has it, or the import path of your own,
    as in my_pkg.nets:make or ./nets.py:make."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the network's builder; they are checked when the network is built."""
    zero_init_last: bool = False
    """Initialize the last norm of each residual block to zero, in ResNets; model.options.zero_gamma overrides it."""
    init: str | None = None
    """Initial weights: a weights file, a run, torchvision:NAME, timm:NAME, hf://OWNER/MODEL or an https URL; null is
    random."""
    resume_from: str | None = None
    """A checkpoint of another run, or of torchvision's, NVIDIA's or timm's program, to continue: its weights,
    momentum and epoch."""
    freeze_backbone: bool = False
    """Train the head only."""
    freeze_until: Duration | Off = "off"
    """Train only the head until this point of the run and all parameters from there on, as in 2ep or 10%."""
    trainable: Annotated[tuple[str, ...], Listed] = ()
    """Name patterns of the parameters to train, as in [layer4.*, fc.*]; empty trains all."""


class EmaConfig(Section):
    """An exponential moving average (EMA) of the weights, evaluated and saved with them."""

    decay: Annotated[float, Field(ge=0, lt=1)] = 0
    """Decay per step; 0 switches EMA off."""
    warmup: bool = True
    """Start with a smaller decay: min(decay, (1 + step) / (10 + step))."""


class CheckpointAverageConfig(Section):
    """The average of the last checkpoints, written to averaged.safetensors at the end of the run."""

    last: Duration | Off = "off"
    """Average the checkpoints that `save.every` wrote in this last part of the run; 100% averages all."""
    mode: Literal["mean", "exponential"] = "mean"
    """Plain or exponential average."""
    decay: PositiveFraction = 0.99
    """Exponential: weight of the average so far at each next checkpoint."""
