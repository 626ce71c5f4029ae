"""Background saves: a snapshot of their step, atomic, with errors raised in the training loop."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from ranks import start
from torch import Tensor

import reconv
from reconv.checkpoint.async_writer import AsyncWriter
from reconv.checkpoint.store import CheckpointStore
from reconv.errors import ExitCode, ResourceError
from reconv.logging.events import CheckpointSaved, Event, RunEnded, TrainProgress, read_events

TINY = {
    "length": "6step",
    "schedule.warmup": "0ep",
    "data.subset_percent": "25",
    "batch.size": "32",
    "batch.group": "16",
    "ema.decay": "0.9",
    "evaluate.every": "off",
    "log.every": "1step",
    "save.every": "2step",
    "save.keep_last": "9",
    "engine.num_threads": "1",
}


def given(settings: dict[str, str]) -> list[tuple[str, object, str]]:
    return [(field, value, "--set") for field, value in settings.items()]


def bits(out: Path, step: int) -> dict[str, Tensor]:
    loaded = CheckpointStore(out / "checkpoints").load(out / "checkpoints" / f"step-{step:09d}")
    return {f"{part}/{name}": t for part, tensors in loaded.parts.items() for name, t in tensors.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class SlowDisk:
    """An `os.fsync` that blocks the writer thread until training reaches a step."""

    def __init__(self, until_step: int) -> None:
        self._real = os.fsync
        self._until_step = until_step
        self._reached = threading.Event()

    def fsync(self, file: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert self._reached.wait(60), "training waited for a background save"
        self._real(file)

    def observe(self, event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step >= self._until_step:
            self._reached.set()


def test_background_save_writes_the_state_at_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, background = Path.cwd() / "plain", Path.cwd() / "background"
    reconv.train("quickstart", out=plain, overrides=given({**TINY, "save.background": "false"}))
    disk = SlowDisk(until_step=3)  # the save of step 2 ends only when step 3 is done
    monkeypatch.setattr(os, "fsync", disk.fsync)
    result = reconv.train("quickstart", out=background, overrides=given(TINY), on_event=disk.observe)
    assert all(same(bits(plain, step), bits(background, step)) for step in (2, 4, 6))
    assert not same(bits(plain, 2), bits(plain, 4))
    events = [
        e for e in read_events(background / "events.jsonl") if isinstance(e, TrainProgress | CheckpointSaved | RunEnded)
    ]
    order = [(type(e).__name__, e.step) for e in events]
    assert order.index(("CheckpointSaved", 2)) > order.index(("TrainProgress", 3))
    assert order[-2:] == [("CheckpointSaved", 6), ("RunEnded", 6)]
    assert all(e.stall_s is not None and e.write_s is not None for e in events if isinstance(e, CheckpointSaved))
    assert result.summary["num_checkpoints"] == 3
    assert 0 < result.summary["save_stall_s_max"] <= result.summary["save_stall_s"]
    assert result.summary["save_write_s"] > 0


def train_and_die_in_a_save(out: str, settings: dict[str, str]) -> None:
    """Train, and kill this process while it writes the checkpoint of step 4, after step 5."""
    disk, real, num_files = SlowDisk(until_step=5), os.fsync, 0

    def fsync(file: int) -> None:
        nonlocal num_files
        if threading.current_thread() is threading.main_thread():
            return real(file)
        if any((Path(out) / "checkpoints").glob(".tmp-step-000000004-*")):
            disk.fsync(file)
            num_files += 1
            if num_files == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        return real(file)

    os.fsync = fsync
    reconv.train("quickstart", out=out, overrides=given(settings), on_event=disk.observe)


def test_kill_during_a_background_save_resumes_from_the_previous_checkpoint() -> None:
    plain, killed = Path.cwd() / "plain", Path.cwd() / "killed"
    reconv.train("quickstart", out=plain, overrides=given(TINY))
    [(process, _)] = start(1, train_and_die_in_a_save, str(killed), TINY)
    process.join(100)
    assert process.exitcode == -signal.SIGKILL
    left = sorted(path.name for path in (killed / "checkpoints").iterdir())
    assert [name for name in left if name.startswith("step")] == ["step-000000002"]
    assert any(name.startswith(".tmp-step-000000004") for name in left)
    reconv.train("quickstart", out=killed, resume=True, overrides=given(TINY))
    assert same(bits(plain, 6), bits(killed, 6))
    assert not any(name.name.startswith(".") for name in (killed / "checkpoints").iterdir())


@pytest.mark.parametrize(("save_every", "last_step"), [("2step", 6), ("6step", 6)])
def test_failed_save_ends_the_run_with_a_resource_error(save_every: str, last_step: int) -> None:
    out = Path.cwd() / "run"

    def spoil(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == 1:
            (out / "checkpoints").write_text("in the way")

    with pytest.raises(ResourceError) as refusal:
        reconv.train("quickstart", out=out, overrides=given({**TINY, "save.every": save_every}), on_event=spoil)
    assert refusal.value.code == ExitCode.RESOURCES
    [ended] = [e for e in read_events(out / "events.jsonl") if isinstance(e, RunEnded)]
    assert ended.exit_code == ExitCode.RESOURCES and ended.step <= last_step


def test_second_write_waits_for_the_first_and_errors_are_raised_once() -> None:
    writer, may_write, order = AsyncWriter(), threading.Event(), []

    def first() -> str:
        assert may_write.wait(60)
        order.append("first")
        return "written"

    def second() -> str:
        order.append("second")
        raise OSError(28, "No space left on device")

    writer.submit(first, lambda result, waited_s: order.append(f"logged {result}"))
    writer.wait(block=False)
    assert order == []
    may_write.set()
    writer.submit(second, lambda result, waited_s: order.append("never"))
    with pytest.raises(OSError, match="No space"):
        writer.wait()
    writer.wait()
    assert order == ["first", "logged written", "second"]


def test_error_of_the_last_write_is_added_as_a_note() -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match="the cause") as ended, AsyncWriter() as writer:
        writer.submit(fail, lambda result, waited_s: None)
        raise ValueError("the cause")
    assert "No space left" in ended.value.__notes__[0]
