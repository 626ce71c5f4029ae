"""A few cases of the main classes of the fault matrix; `make faults` runs all of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

MATRIX = Path(__file__).parent / "matrix"
CLASSES = "kill -9 at every,power,failing system,failing reads,damaged,signals"
NUM_CLASSES, NUM_EACH = 6, 2


@pytest.mark.native  # the layer is compiled
def test_a_sample_of_the_main_classes_survives() -> None:
    command = [sys.executable, str(MATRIX), "--classes", CLASSES, "--sample", str(NUM_EACH)]
    done = subprocess.run([*command, "--workers", "1"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = re.findall(r"^\| ([^|*]+) \| (\d+) \| (\d+) \|", done.stdout, re.MULTILINE)
    assert len(rows) == NUM_CLASSES
    assert all(tried == survived == str(NUM_EACH) for _, tried, survived in rows), done.stdout
