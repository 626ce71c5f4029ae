"""A study whose process is killed (SIGKILL) again and again ends with the trials, values and best of another one."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

STUDY = [
    *("quickstart", "--set", "data.subset_percent=20", "--set", "data.num_workers=0", "--epochs", "4"),
    *("--trials", "4", "--rungs", "2", "--confirm", "2", "--parallel", "2"),
    *("--space", "schedule.lr=0.01:1:log", "--space", "optimizer.momentum=0.5|0.9"),
]
KILLS = 6


def command(out: Path) -> list[str]:
    return [sys.executable, "-m", "reconv", "tune", *STUDY, "--out", str(out), "--quiet"]


def result(out: Path) -> dict[str, Any]:
    content = json.loads((out / "study.json").read_text())
    return {name: value for name, value in content.items() if name not in ("folder", "recipe_file", "report")}


@pytest.mark.slow
def test_a_study_that_is_killed_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(whole), check=True, timeout=300)
    draw, num_killed = random.Random(0), 0
    for _ in range(KILLS):
        process = subprocess.Popen(command(killed))
        journal = killed / "study.journal"
        before = journal.stat().st_size if journal.exists() else 0
        limit_s = time.monotonic() + 120
        while process.poll() is None and (not journal.exists() or journal.stat().st_size <= before):
            assert time.monotonic() < limit_s
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 2))
        num_killed += process.poll() is None
        process.kill()
        process.wait()
    assert num_killed >= 4
    subprocess.run(command(killed), check=True, timeout=300)
    assert result(killed) == result(whole)
    assert result(whole)["best"] != 0
    names = [path.name for path in sorted(killed.glob("*/checkpoints/*")) if path.is_dir()]
    assert names == [path.name for path in sorted(whole.glob("*/checkpoints/*")) if path.is_dir()]
    weights = [path.relative_to(whole) for path in sorted(whole.glob("**/checkpoints/*/model.safetensors"))]
    assert len(weights) >= 4
    assert [name for name in weights if (whole / name).read_bytes() != (killed / name).read_bytes()] == []
