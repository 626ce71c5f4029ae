"""Waiting for another process with a deadline that is printed while waiting.

Such a wait ends with exit code 7.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

from reconv.core.errors import RankLostError
from reconv.core.text import printable

WAIT_TIMEOUT_S = 300.0
_POLL_S = 0.1


@dataclass(slots=True)
class ProcessWait:
    """A wait for another process: a line now and then, and an error at the deadline."""

    notice_s: float = 10.0  # between two lines
    is_printed: bool = True
    start_s: float = field(default_factory=time.monotonic)
    _noticed_s: float = 0.0

    def tick(self, who: str, where: str, hint: str, sleep_s: float = _POLL_S) -> None:
        """Sleep a little and print what is waited for when it is time, or raise RankLostError at the deadline."""
        waited_s = time.monotonic() - self.start_s
        if waited_s >= WAIT_TIMEOUT_S:
            raise RankLostError(f"{who} did not respond within {WAIT_TIMEOUT_S:.0f} s", where=where, hint=hint)
        if waited_s - self._noticed_s >= self.notice_s:
            self._noticed_s = waited_s
            if self.is_printed:
                text = f"waiting for {printable(who)}, {waited_s:.0f} s of {WAIT_TIMEOUT_S:.0f}"
                print(text, file=sys.stderr, flush=True)
        time.sleep(sleep_s)
