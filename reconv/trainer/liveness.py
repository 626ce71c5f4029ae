"""The file `alive` of a run: its modification time says when the training loop last made progress.

A probe, as of Kubernetes, compares it with the clock. The loop itself touches the file, not a thread that would go on
while the loop hangs.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path


class LivenessFile:
    """Touched by the training loop after steps and evaluation batches; without a path nothing is touched."""

    interval_s = 5.0  # at most one system call in so many seconds

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._touched_s = float("-inf")

    def touch(self) -> None:
        """Set the modification time to now, unless that was done just before."""
        now_s = time.monotonic()
        if self._path is None or now_s - self._touched_s < self.interval_s:
            return
        self._touched_s = now_s
        with suppress(OSError):  # of a full disk: the next save reports it
            self._path.touch()
