"""On a GPU, faults of kernels and of the device end a run with a clear error, and the next start resumes its bits.

Each fault is caused in a process of its own, whose CUDA context is lost.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bit_flips import last_bits

from reconv.core.errors import ExitCode
from reconv.logging.run_dir import read_summary

CODE = """
import ctypes, os
import reconv
import torch

def memory():
    return [torch.empty(1 << 34, dtype=torch.uint8, device="cuda") for _ in range(64)]

def illegal_access():
    import kernels
    kernels.write_anywhere[(1,)](torch.zeros(1, device="cuda"), 1 << 44)

def lost_context():
    library = next(line.split()[-1] for line in open("/proc/self/maps") if "libcudart" in line)
    ctypes.CDLL(library).cudaDeviceReset()
    torch.ones(1, device="cuda").sum().item()

def assertion():
    torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")].sum().item()

class Fault(reconv.Callback):
    def __init__(self, kind):
        self.kind, self.steps = kind, 0

    def on_step_end(self, run):
        self.steps += 1
        if self.steps == 4 and "NO_FAULT" not in os.environ:
            globals()[self.kind]()
            torch.cuda.synchronize()
"""
KERNELS = """
import triton
import triton.language as tl

@triton.jit
def write_anywhere(x, offset):
    tl.store(x + tl.cast(offset, tl.int64), 1.0)
"""
NETWORK = '''
from torch import nn

class Waits(nn.Module):
    """A network that reads a value on the host, which a CUDA graph cannot capture."""

    def __init__(self, num_classes):
        super().__init__()
        self.fc = nn.Linear(64, num_classes)

    def forward(self, images):
        x = images.flatten(1)
        return self.fc(x * float(x.abs().max().item() > -1))
'''
SETTINGS = ("length=8step", "schedule.warmup=1step", "save.every=1step", "evaluate.every=off", "data.num_workers=0")


def train(folder: Path, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "faults.py").write_text(CODE)
    (folder / "kernels.py").write_text(KERNELS)
    (folder / "network.py").write_text(NETWORK)
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    command = [sys.executable, "-m", "reconv", "train", "quickstart", "--device", "cuda", *words, *options]
    return subprocess.run(command, cwd=folder, env={**_environ(), **environ}, capture_output=True, text=True)


def _environ() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}


@pytest.mark.parametrize("kind", ["memory", "illegal_access", "lost_context", "assertion"])
def test_a_fault_is_an_error_and_the_next_start_resumes(kind: str, tmp_path: Path) -> None:
    fault = ("--set", f"callbacks=[{{name: faults:Fault, options: {{kind: {kind}}}}}]", "--set", "code_path=[.]")
    assert train(tmp_path, *fault, "--out", "undisturbed", NO_FAULT="1").returncode == ExitCode.OK
    done = train(tmp_path, *fault, "--out", "run")
    assert done.returncode == ExitCode.RESOURCES, done.stderr
    assert "Traceback" not in done.stderr and "--resume" in done.stderr + "--resume" * (kind == "memory")
    assert read_summary(tmp_path / "run")["exit_code"] == ExitCode.RESOURCES
    assert train(tmp_path, *fault, "--out", "run", "--resume", NO_FAULT="1").returncode == ExitCode.OK
    assert last_bits(tmp_path / "run") == last_bits(tmp_path / "undisturbed")


def test_a_network_that_waits_for_the_device_says_how_to_train_it(tmp_path: Path) -> None:
    network = ("--set", "model.name=network:Waits", "--set", "code_path=[.]", "--set", "data.preprocess.channels=1")
    done = train(tmp_path, *network, "--set", "engine.cuda_graphs=on", "--out", "run")
    assert done.returncode in (ExitCode.RESOURCES, ExitCode.USAGE), done.stderr
    assert "engine.cuda_graphs" in done.stderr and "Traceback" not in done.stderr
    assert train(tmp_path, *network, "--set", "engine.cuda_graphs=off", "--out", "eager").returncode == ExitCode.OK
