"""Checks of the contents of a checkpoint's `state.json`.

The checksums of a checkpoint prove that it is what some program wrote, not that the program was ours: a checkpoint may
have been edited and signed again, or written by another version.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from reconv.checkpoint.store import STATE, malformed
from reconv.recipe.parts.data import Decoder

MAX_THREADS = 1 << 16


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _Evaluation(_Strict):
    step: NonNegativeInt
    weights: str
    metrics: dict[str, float]


class _Monitored(_Strict):
    metric: str
    weights: str


class _BadImage(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    split: Literal["train", "val"]
    index: NonNegativeInt
    step: int
    path: str
    why: str


class _Divergence(_Strict):
    """The state of the divergence guard; the learning rate is multiplied by `lr_factor`."""

    start: float | None = None
    losses: list[list[float | int | None]] = []
    first_step: NonNegativeInt = 0
    num_rewinds: NonNegativeInt = 0
    warned: list[str] = []
    lr_factor: float = Field(default=1.0, gt=0, le=1)


class _State(_Strict):
    step: NonNegativeInt
    total_steps: PositiveInt
    history: list[_Evaluation]
    monitored: _Monitored
    skipped: NonNegativeInt
    micro_groups: PositiveInt
    bad_images: list[_BadImage]
    recipe: dict[str, Any]
    class_names: list[str] = Field(min_length=1)
    class_ids: list[int] = []
    display_names: list[str] = []
    data_fingerprint: dict[str, str]
    threads: int = Field(ge=1, le=MAX_THREADS)
    decoder: Decoder = "pillow"
    device: str
    teacher: str | None = None
    callbacks: dict[str, Any] = {}
    divergence: _Divergence = Field(default_factory=_Divergence)
    code: dict[str, str] = {}


def check_state(state: Mapping[str, Any], path: Path) -> None:
    """Raise `CheckpointError` if the state of a checkpoint lacks something or has something impossible."""
    try:
        checked = _State.model_validate(dict(state))
    except ValidationError as error:
        first = error.errors()[0]
        raise malformed(path / STATE, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    if checked.step > checked.total_steps:
        raise malformed(path / STATE, f"step {checked.step:,} of {checked.total_steps:,}")
    late = [evaluation.step for evaluation in checked.history if evaluation.step > checked.step]
    if late:
        raise malformed(path / STATE, f"it has an evaluation of step {late[0]:,}, after its own step {checked.step:,}")
    for evaluation in checked.history:
        if evaluation.weights == checked.monitored.weights and checked.monitored.metric not in evaluation.metrics:
            raise malformed(
                path / STATE, f"the evaluation of step {evaluation.step:,} has no {checked.monitored.metric}"
            )
