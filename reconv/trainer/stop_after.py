"""`--stop-after`: end a command early on the untouched schedule, with a checkpoint to resume from."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field

from reconv.core.errors import UsageError

_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(step|ep|s|min|h)s?\s*")
_MAX_NUMBER = 1e15
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class StopAfter:
    """How long a command trains, counted from its own first step or from its start; None: to the end of the run."""

    text: str = ""  # as typed
    step: int | None = None  # number of steps of the run after which to stop
    seconds: float | None = None
    start_s: float = field(default_factory=time.monotonic)

    @classmethod
    def parse(cls, text: str | None, *, first_step: int, steps_per_epoch: float) -> StopAfter:
        """The limit that `100step`, `2ep`, `30min` or `3h` sets on a run that starts or continues at a step."""
        if text is None:
            return cls()
        match = _PATTERN.fullmatch(text)
        number, unit = (float(match[1]), match[2]) if match else (0.0, "")
        if not 0 < number < _MAX_NUMBER or (unit == "step" and number != int(number)):
            raise UsageError(
                f"--stop-after takes a number of steps or epochs or a time, not {text!r:.80}",
                then="for example --stop-after 100step, 2ep, 30min or 3h",
            )
        if unit in _SECONDS:
            return cls(text.strip(), seconds=number * _SECONDS[unit])
        steps = number if unit == "step" else number * steps_per_epoch
        return cls(text.strip(), step=first_step + max(1, math.ceil(steps)))

    def is_reached(self, step: int) -> bool:
        """Whether the limit in steps is reached; every rank finds the same."""
        return self.step is not None and step >= self.step

    def time_is_up(self) -> bool:
        """Whether the limit in time is reached on this rank."""
        return self.seconds is not None and time.monotonic() - self.start_s >= self.seconds
