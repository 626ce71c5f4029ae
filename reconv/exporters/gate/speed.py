"""The speed of an int8 model beside the same model in fp32, in the same runtime and process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reconv.exporters.gate.check import run_isolated

BATCH_SIZES = (1, 16)
NUM_ROUNDS = 15
_SCRIPT = Path(__file__).with_name("speed_script.py")


def measure_speed(
    fp32: Path, int8: Path, files: Sequence[Path], hidden_packages: Sequence[str], batch: int | None
) -> list[dict[str, Any]]:
    """For each batch size the times of both models in alternating rounds, and how many times as fast is int8."""
    sizes = BATCH_SIZES if batch is None else (batch,)
    arguments = [str(fp32), str(int8), json.dumps(sizes), str(NUM_ROUNDS), *map(str, files[: max(sizes)])]
    measured: list[dict[str, Any]] = json.loads(run_isolated(_SCRIPT, arguments, hidden_packages).splitlines()[-1])
    return measured
