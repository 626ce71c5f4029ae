"""Real processes that are killed in the middle of saves, or while they hold the lock."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reconv.checkpoint.run_dir import RunDir
from reconv.checkpoint.store import CheckpointStore
from reconv.errors import RunLockedError

NUM_KILLS = 12

# Pays for the import of torch once; each line on stdin forks a child that saves step after step until it is killed.
FORK_SERVER = """
import os, sys
from pathlib import Path
import torch
from reconv.checkpoint.store import CheckpointStore

store = CheckpointStore(Path(sys.argv[1]))
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        step = int(line)
        while True:
            tensors = {"w": torch.full((64, 1024), float(step)), "n": torch.tensor(step)}
            store.save(step, {"model": tensors, "ema": tensors, "optimizer": tensors}, {"step": step})
            store.prune(keep_last=2)
            os.write(1, b"%d saved\\n" % step)
            step += 1
    os.write(1, b"%d child\\n" % child)
    os.waitpid(child, 0)
    os.write(1, b"0 dead\\n")
"""

HOLDER = """
import os, sys, time
from pathlib import Path
from reconv.checkpoint.run_dir import RunDir

lock = RunDir(Path(sys.argv[1])).lock()
# A forked child prints its own pid: only once it runs has it released the lock.
if sys.argv[2] == "alone" or os.fork() == 0:
    os.write(1, b"%d\\n" % os.getpid())
time.sleep(600)
"""


@contextmanager
def program(text: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a Python program with pipes; it is killed when the block ends."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", text, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read(process: subprocess.Popen[str], label: str) -> list[int]:
    """The numbers that the program prints, up to and including the first line with `label`."""
    assert process.stdout is not None
    numbers = []
    for line in process.stdout:
        number, printed = line.split()
        numbers.append(int(number))
        if printed == label:
            return numbers
    raise AssertionError(f"the program ended before it printed {label!r}")


def test_sigkill_at_random_moments_of_saving_leaves_a_valid_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    draw = random.Random(20)
    next_step, num_torn = 1, 0
    with program(FORK_SERVER, str(folder)) as fork_server:
        assert fork_server.stdin is not None
        for _ in range(NUM_KILLS):
            fork_server.stdin.write(f"{next_step}\n")
            fork_server.stdin.flush()
            child = read(fork_server, "child")[-1]
            saved = read(fork_server, "saved")[-1]
            time.sleep(draw.uniform(0, 0.03))
            os.kill(child, signal.SIGKILL)
            saved = max(saved, *read(fork_server, "dead"))
            num_torn += any(name.startswith(".") for name in os.listdir(folder))
            store = CheckpointStore(folder)
            newest = store.newest()
            assert newest.skipped == ()
            assert newest.path is not None
            loaded = store.load(newest.path)
            assert saved <= loaded.step <= saved + 1
            assert loaded.state == {"step": loaded.step}
            for part in ("model", "ema", "optimizer"):
                assert (loaded.parts[part]["w"] == loaded.step).all()
            next_step = loaded.step + draw.randrange(2)  # as after a resume: sometimes the same step comes again
    assert num_torn > 0, "no kill fell into a save: nothing was tested"


def test_a_second_process_is_rejected_until_the_first_one_dies(tmp_path: Path) -> None:
    with program(HOLDER, str(tmp_path), "alone") as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(RunLockedError, match=f"process {holder.pid} on"):
            RunDir(tmp_path).lock()
        holder.kill()
        holder.wait()
        RunDir(tmp_path).lock().release()


def test_a_forked_worker_does_not_keep_the_lock_of_a_killed_parent(tmp_path: Path) -> None:
    with program(HOLDER, str(tmp_path), "with-child") as holder:
        assert holder.stdout is not None
        worker = int(holder.stdout.readline())
        try:
            with pytest.raises(RunLockedError):
                RunDir(tmp_path).lock()
            holder.kill()
            holder.wait()
            RunDir(tmp_path).lock().release()
            os.kill(worker, 0)
        finally:
            os.kill(worker, signal.SIGKILL)
