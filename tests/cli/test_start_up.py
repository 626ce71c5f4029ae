"""The start of a command: torch's libraries are loaded while recipes are imported, and nothing waits for them."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from threading import Event, Thread

import pytest
import torch

from reconv.cli import start_up
from reconv.device import load_cuda_kernels

SHARED_LIBRARIES = """
import sys
from reconv.cli import start_up

def libraries():
    files = {str(getattr(module, "__file__", "")) for module in list(sys.modules.values())}
    return {file for file in files if file.endswith(".so")}

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("torch", *sorted(libraries() - before))
            raise SystemExit

def at_start():
    global before
    before = libraries()

start_up.load_torch_libraries = at_start
sys.meta_path.insert(0, NoTorch())
start_up.import_torch()
"""

LOADED = """
import sys
from reconv.cli import start_up

thread = start_up.load_torch_libraries()
thread.join()
maps = open("/proc/self/maps").read()
print("torch" in sys.modules, *(f"libtorch_{name}.so" in maps for name in ("global_deps", "cpu", "python")))
import torch
print(torch.ones(2).sum().item())
"""


def run(code: str, **environment: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_library_is_loaded_while_torchs_are() -> None:
    assert run(SHARED_LIBRARIES).split() == ["torch"]


def test_torchs_libraries_are_loaded_without_importing_it() -> None:
    assert run(LOADED).split("\n")[:2] == ["False True True False", "2.0"]


def test_libraries_are_left_to_torch_where_the_search_path_has_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "libcupti.so.13").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    assert start_up.load_torch_libraries() is None


def test_a_missing_gpu_has_no_kernels_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[object] = []
    monkeypatch.setattr(torch, "zeros", lambda *args, **_: launched.append(args))
    load_cuda_kernels(torch.cuda.device_count())
    for thread in threading.enumerate():
        if thread.name == "reconv-kernels":
            thread.join(10)
    assert launched == []


def test_kernels_are_loaded_once_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = Event()
    monkeypatch.setattr(start_up, "_torch_imported", imported)
    thread = Thread(target=start_up._load_kernels, args=(torch.cuda.device_count(),))  # no such GPU: nothing to load
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    start_up.import_torch()
    thread.join(30)
    assert not thread.is_alive()
