"""Real processes that are killed while they hold the lock of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reconv.core.errors import RunLockedError
from reconv.logging.run_dir import RunDir

HOLDER = """
import os, sys, time
from pathlib import Path
from reconv.logging.run_dir import RunDir

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
