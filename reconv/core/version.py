"""The version, and when this process imported it."""

from __future__ import annotations

import time

__version__ = "0.2.0"

IMPORTED_S = time.perf_counter()  # about when the process started, where the system does not say
