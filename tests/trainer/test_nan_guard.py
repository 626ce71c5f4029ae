"""Non-finite steps are detected one step later, and stop the run or are skipped."""

from __future__ import annotations

import pytest
import torch

from reconv.core.errors import DivergedError
from reconv.device import open_device
from reconv.logging.events import Event, NonFiniteStep
from reconv.logging.run_logger import RunLogger
from reconv.trainer.callbacks.nan_guard import NanGuard
from reconv.trainer.step import StepResult

from .conftest import batch


def make_guard(policy: str, max_skipped: int = 2, scale: float | None = None) -> tuple[NanGuard, list[Event]]:
    events: list[Event] = []
    loss_scale = None if scale is None else torch.tensor(scale)
    guard = NanGuard(
        open_device("cpu"),
        RunLogger(events.append),
        policy=policy,
        max_skipped=max_skipped,
        loss_scale=lambda: loss_scale,
    )
    return guard, events


def result(loss: float, ok: bool) -> StepResult:
    return StepResult(torch.tensor(loss), 8.0, {}, torch.tensor(1.0), torch.tensor(ok))


NAN = float("nan")


def test_non_finite_step_raises_one_step_later_with_step_and_samples() -> None:
    guard, events = make_guard("stop")
    guard.add(0, result(1.0, True), [batch(first=0)])
    guard.add(1, result(NAN, False), [batch(first=8)])
    assert events == []
    with pytest.raises(DivergedError, match="step 2") as stopped:
        guard.add(2, result(1.0, True), [batch(first=16)])
    assert stopped.value.code == 5
    assert "8, 9, 10" in stopped.value.where
    [event] = events
    assert isinstance(event, NonFiniteStep)
    assert (event.step, event.action, event.samples) == (2, "stop", tuple(range(8, 16)))


def test_non_finite_steps_are_skipped_up_to_max_skipped() -> None:
    guard, events = make_guard("skip", max_skipped=2)
    for step in range(2):
        guard.add(step, result(NAN, False), [batch()])
    guard.flush()
    assert guard.skipped == 2
    assert [e.action for e in events if isinstance(e, NonFiniteStep)] == ["skip", "skip"]
    guard.add(2, result(NAN, False), [batch()])
    with pytest.raises(DivergedError, match="not finite"):
        guard.flush()


def test_flush_checks_the_last_step() -> None:
    guard, _ = make_guard("stop")
    guard.add(0, result(NAN, False), [batch()])
    with pytest.raises(DivergedError):
        guard.flush()


@pytest.mark.parametrize("loss,scale,stops", [(1.0, 1024.0, False), (NAN, 1024.0, True), (1.0, 1.0, True)])
def test_overflow_is_tolerated_while_the_dynamic_loss_scale_can_decrease(
    loss: float, scale: float, stops: bool
) -> None:
    guard, _ = make_guard("stop", scale=scale)
    guard.add(0, result(loss, False), [batch()])
    if stops:
        with pytest.raises(DivergedError):
            guard.flush()
    else:
        guard.flush()
        assert guard.skipped == 0
