"""Restarts by torchrun: a run resumes, and an error that would happen again is not retried."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

import reconv
from reconv.core.errors import ExitCode, RecipeError, RemoteRankError

SETTINGS = {
    "length": "30step",
    "schedule.warmup": "0ep",
    "batch.group": "32",
    "save.every": "10step",
    "evaluate.every": "30step",
    "engine.num_threads": "1",
    "parallel.reduce": "ordered",
}

# One rank of the first attempt is killed once the first checkpoint is there.
KILLED_RANK = """
import os, signal, sys, threading, time
from pathlib import Path
from reconv.cli import main

def die():
    while not list(Path(sys.argv[-1]).glob("checkpoints/step-*")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    threading.Thread(target=die, daemon=True).start()
main(sys.argv[1:])
"""


def set_options(settings: dict[str, str]) -> list[str]:
    return [argument for name, value in settings.items() for argument in ("--set", f"{name}={value}")]


@pytest.mark.slow
def test_torchrun_resumes_after_a_killed_rank_with_the_same_final_weights(tmp_path: Path) -> None:
    """Slow: torchrun starts two processes twice, each of which imports torch."""
    script = tmp_path / "killed_rank.py"
    script.write_text(KILLED_RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    command += [
        str(script),
        "train",
        "quickstart",
        *set_options(SETTINGS),
        "--quiet",
        "--out",
        str(tmp_path / "killed"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    overrides = [(name, value, "--set") for name, value in SETTINGS.items()]
    reconv.train("quickstart", out=tmp_path / "uninterrupted", overrides=overrides)
    tensors = [
        safetensors.torch.load_file(tmp_path / name / "checkpoints/step-000000030/model.safetensors")
        for name in ("killed", "uninterrupted")
    ]
    assert [name for name in tensors[0] if not torch.equal(tensors[0][name], tensors[1][name])] == []
    assert (tmp_path / "killed/events.jsonl").read_text().count('"kind":"attempt"') == 2


def test_a_restarted_process_exits_at_once_with_the_first_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [("length", "2step", "--set"), ("schedule.warmup", "0ep", "--set")]
    reconv.train("quickstart", out=tmp_path / "run", overrides=overrides)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "job"}.items():
        monkeypatch.setenv(name, value)
    other = [*overrides, ("seed", "7", "--set")]
    with pytest.raises(RecipeError, match="another recipe"):
        reconv.train("quickstart", out=tmp_path / "run", overrides=other, resume=True)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(RemoteRankError, match="another recipe") as exc_info:
        reconv.train("quickstart", out=tmp_path / "run", overrides=overrides)
    assert exc_info.value.code == ExitCode.USAGE
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert reconv.train("quickstart", out=tmp_path / "run", overrides=overrides, resume=True).was_finished
