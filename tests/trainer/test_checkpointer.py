"""Background saves: a snapshot of their step, atomic, with errors raised in the training loop."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from ranks import start
from torch import Tensor

import reconv
from reconv.checkpoint.async_writer import AsyncWriter
from reconv.checkpoint.store import CheckpointStore
from reconv.core.errors import ExitCode, ResourceError
from reconv.device.cpu import Cpu
from reconv.logging.event_log import read_events
from reconv.logging.events import CheckpointSaved, Event, RunEnded, TrainProgress
from reconv.trainer.checkpointer import snapshot

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


def given(settings: Mapping[str, object]) -> list[tuple[str, object, str]]:
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


def test_a_snapshot_has_the_tensors_at_the_call_whatever_their_size_and_layout() -> None:
    large = torch.randn(8, 64, 8, 8).to(memory_format=torch.channels_last)
    model = {
        "large": large,
        "small": torch.randn(3, 4, 2, 2).to(memory_format=torch.channels_last),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "scalar": torch.tensor(7.5),
        "empty": torch.zeros(0, 3),
        "steps": torch.tensor(12),
        "half": torch.randn(5).half(),
    }
    parts = {"model": model, "optimizer": {name: tensor + 1 for name, tensor in model.items()}}
    before = {part: {name: tensor.clone() for name, tensor in tensors.items()} for part, tensors in parts.items()}
    wait = snapshot(parts, Cpu())
    for tensors in parts.values():
        for tensor in tensors.values():
            tensor.zero_()
    found = wait()
    assert {part: list(tensors) for part, tensors in found.items()} == {part: list(model) for part in parts}
    for part, tensors in before.items():
        assert all(torch.equal(found[part][name], tensor) for name, tensor in tensors.items())
        assert all(found[part][name].dtype == tensor.dtype for name, tensor in tensors.items())


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


class Writes:
    """An `AsyncWriter` whose writes end when they are told to, and what it has done."""

    def __init__(self) -> None:
        self.writer = AsyncWriter()
        self.written: list[int] = []
        self.logged: list[tuple[int, tuple[int, ...]]] = []
        self._may_end = threading.Semaphore(0)
        self._has_begun = threading.Semaphore(0)

    def submit(self, step: int, needed: tuple[int, ...] = ()) -> None:
        def write() -> int:
            self._has_begun.release()
            assert self._may_end.acquire(timeout=60)
            self.written.append(step)
            return step

        def log(result: int, blocked_s: float, replaced: tuple[int, ...]) -> None:
            self.logged.append((result, replaced))

        self.writer.submit(step, write, log, needed.__contains__)

    def wait_until_begun(self) -> None:
        assert self._has_begun.acquire(timeout=60)

    def let_end(self, count: int) -> None:
        self._may_end.release(count)


def test_a_write_replaces_the_one_in_the_queue() -> None:
    writes = Writes()
    writes.submit(1)
    writes.wait_until_begun()
    for step in (2, 3, 4):
        writes.submit(step)  # none of them blocks
    writes.writer.wait(block=False)
    assert writes.logged == []
    writes.let_end(2)
    writes.writer.wait()
    assert writes.written == [1, 4]
    assert writes.logged == [(1, ()), (4, (2, 3))]


def test_a_write_that_is_needed_is_waited_for() -> None:
    writes = Writes()
    writes.submit(1)
    writes.wait_until_begun()
    writes.submit(2)
    third = threading.Thread(target=writes.submit, args=(3, (2,)))
    third.start()
    third.join(0.05)
    assert third.is_alive()
    writes.let_end(3)
    third.join(60)
    writes.writer.wait()
    assert writes.written == [1, 2, 3]
    assert writes.logged == [(1, ()), (2, ()), (3, ())]


def test_an_error_of_a_write_is_raised_once_and_the_next_one_is_written() -> None:
    writes = Writes()

    def fail() -> int:
        raise OSError(28, "No space left on device")

    writes.writer.submit(1, fail, lambda result, blocked_s, replaced: None, ().__contains__)
    writes.writer.join(60)
    with pytest.raises(OSError, match="No space"):
        writes.submit(2)
    writes.submit(3)
    writes.let_end(1)
    writes.writer.wait()
    assert writes.logged == [(3, ())]


def test_a_queued_checkpoint_that_the_recipe_keeps_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing blocks until step 4, so the saves of steps 2 and 3 find it busy."""
    settings = {**TINY, "save.every": "1step", "save.keep_at": ["3step"], "save.keep_last": 2}
    out, disk = Path.cwd() / "run", SlowDisk(until_step=4)
    monkeypatch.setattr(os, "fsync", disk.fsync)
    reconv.train("quickstart", out=out, overrides=given(settings), on_event=disk.observe)
    saved = [e for e in read_events(out / "events.jsonl") if isinstance(e, CheckpointSaved)]
    assert (saved[0].step, saved[0].replaced) == (1, ())
    assert (saved[1].step, saved[1].replaced) == (3, (2,))
    assert sorted(step for e in saved for step in (e.step, *e.replaced)) == [1, 2, 3, 4, 5, 6]
    assert "interval, also for step 2" in (out / "report.html").read_text()


def test_no_checkpoint_is_replaced_in_a_run_that_keeps_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    out, real = Path.cwd() / "run", os.fsync

    def slow_fsync(file: int) -> None:
        time.sleep(0.02)  # slower than a step
        real(file)

    monkeypatch.setattr(os, "fsync", slow_fsync)
    settings = {**TINY, "save.every": "1step", "save.keep_last": 6}
    reconv.train("quickstart", out=out, overrides=given(settings))
    assert CheckpointStore(out / "checkpoints").steps() == [1, 2, 3, 4, 5, 6]


def test_error_of_the_last_write_is_added_as_a_note() -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match="the cause") as ended, AsyncWriter() as writer:
        writer.submit(1, fail, lambda result, blocked_s, replaced: None, ().__contains__)
        raise ValueError("the cause")
    assert "No space left" in ended.value.__notes__[0]
