"""Activation checkpointing and OOM retries change no bit of a run on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from reconv.core.errors import ResourceError
from reconv.logging.event_log import read_events
from reconv.logging.events import LogMessage, RunPlanned
from reconv.models.resnet import ResNet

from .conftest import EVERYTHING, Outcome, Train

SHORT = {**EVERYTHING, "length": "6step", "save.every": "6step", "evaluate.every": "off", "schedule.warmup": "0ep"}


def differing(one: Outcome, other: Outcome) -> list[str]:
    ours, theirs = one.bits(), other.bits()
    assert len(ours) > 60 and set(ours) == set(theirs)
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def notes(outcome: Outcome) -> list[str]:
    return [event.text for event in read_events(outcome.folder.events) if isinstance(event, LogMessage)]


@pytest.mark.parametrize(("wish", "mode"), [("all", "fp32"), ("auto", "bf16-all"), ("[layer2, stem]", "fp32")])
def test_activation_checkpointing_is_bitwise_equal(train: Train, wish: str, mode: str) -> None:
    settings = {**SHORT, "precision.mode": mode}
    kept = train("kept", settings)
    again = train("again", {**settings, "memory.activation_checkpointing": wish})
    assert differing(kept, again) == []
    [said] = [text for text in notes(again) if "activation checkpointing" in text]
    assert "a micro-batch of 32 keeps" in said


def test_checkpoint_segments_on_one_device_are_recomputed(train: Train) -> None:
    kept = train("kept", SHORT)
    again = train("again", {**SHORT, "memory.checkpoint_segments": "[layer2.0, head]"})
    assert differing(kept, again) == []
    [said] = [text for text in notes(again) if "activation checkpointing" in text]
    assert "4 of 5 stages (stem, layer1.0, layer2.0, layer3.0) in 2 segments" in said


def test_dropout_and_drop_connect_are_recomputed_identically(train: Train) -> None:
    settings = {
        **SHORT,
        "length": "2step",
        "save.every": "2step",
        "model.name": "efficientnet_b0",
        "model.options.dropout": "0.5",
        "batch.size": "16",
        "batch.group": "4",
        "batch.micro": "8",
    }
    assert (
        differing(train("kept", settings), train("again", {**settings, "memory.activation_checkpointing": "all"})) == []
    )


def plans(outcome: Outcome) -> list[tuple[str, ...]]:
    return [event.lines for event in read_events(outcome.folder.events) if isinstance(event, RunPlanned)]


class OomForward:
    """A forward that raises OOM for more than `max_images` images, after the first `after` passes."""

    def __init__(self, max_images: int, after: int = 0) -> None:
        self.max_images, self.after, self.passes = max_images, after, 0
        self.plain = ResNet.forward

    def __call__(self, model: Any, images: Tensor) -> Tensor:
        if model.training:
            self.passes += 1
            if self.passes > self.after and len(images) > self.max_images:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return self.plain(model, images)


def test_step_is_retried_with_smaller_micro_batches_after_oom(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SHORT, "parallel.reduce": "fast"}
    expected = train("expected", {**settings, "batch.micro": "16"})
    oom_forward = OomForward(16)
    monkeypatch.setattr(ResNet, "forward", lambda model, images: oom_forward(model, images))
    found = train("found", {**settings, "batch.micro": "auto"})
    assert differing(expected, found) == []
    assert [text for text in notes(found) if "out of memory" in text] == [
        "out of memory with micro-batches of 64: repeating the step with 32",
        "out of memory with micro-batches of 32: repeating the step with 16",
    ]
    assert oom_forward.passes == 2 + 6 * 4


def test_oom_in_the_second_micro_batch_does_not_change_the_result(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients and statistics of the first micro-batch exist when the second fails."""
    settings = {**SHORT, "data.subset_percent": "100", "batch.size": "512", "batch.group": "128", "length": "2step"}
    settings["save.every"] = "2step"
    expected = train("expected", {**settings, "batch.micro": "128"})
    late = OomForward(128, after=1)
    monkeypatch.setattr(ResNet, "forward", lambda model, images: late(model, images))
    assert differing(expected, train("late", {**settings, "batch.micro": "auto"})) == []
    assert late.passes == 2 + 2 * 4


def test_halved_micro_batch_is_kept_on_resume(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SHORT, "parallel.reduce": "fast", "schedule.name": "constant", "batch.micro": "auto"}
    expected = train("expected", {**settings, "batch.micro": "16"})
    oom_forward = OomForward(16)
    with monkeypatch.context() as patch:
        patch.setattr(ResNet, "forward", lambda model, images: oom_forward(model, images))
        train("found", {**settings, "length": "3step"})
    found = train("found", settings, resume=True)
    assert differing(expected, found) == []
    assert any("uses micro-batches of 16 samples: as before the resume" in line for line in plans(found)[-1])


def test_batch_norm_groups_are_not_split_after_oom(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    oom_forward = OomForward(15)
    monkeypatch.setattr(ResNet, "forward", lambda model, images: oom_forward(model, images))
    with pytest.raises(ResourceError, match="a batch norm group of 16 images does not fit") as caught:
        train("none", {**SHORT, "batch.micro": "auto"})
    assert caught.value.hint.startswith("--set memory.activation_checkpointing=auto, or smaller groups")
    assert oom_forward.passes == 3


def test_explicit_micro_batch_is_not_changed_after_oom(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    oom_forward = OomForward(16)
    monkeypatch.setattr(ResNet, "forward", lambda model, images: oom_forward(model, images))
    with pytest.raises(ResourceError, match="micro-batches of 32 images do not fit") as caught:
        train("given", {**SHORT, "batch.micro": "32"})
    assert caught.value.hint.endswith("--set batch.micro=16")
