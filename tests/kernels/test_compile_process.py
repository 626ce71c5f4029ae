"""The compiler process: launches find its results in the cache, and its failures do no harm."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reconv.kernels.jit import compile_process as compiler
from reconv.kernels.jit.compile_process import CompilerProcess

TARGET = ("cuda", 90, 32)
TIMEOUT_S = 120

# In a process of its own: the interpreter that the other tests use compiles nothing.
CACHE_SCRIPT = """
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from reconv.kernels.jit.compile_variants import TargetGpu
from reconv.kernels.jit.compile_process import CompilerProcess
from reconv.kernels.jit.launch import variant_of
from reconv.kernels.triton.stem import space_to_depth

found = []
knobs.compilation.listener = lambda cache_hit, **about: found.append(cache_hit)
images = torch.empty(2, dtype=torch.float32), torch.empty(2, dtype=torch.bfloat16)
constants = {"AFTER": 1, "BEFORE": 2, "CHANNELS": 3, "DEPTH": 16, "PIXELS": 256}
variant = variant_of(space_to_depth, (*images, 1, 2, 3, 4, 5, 6, 7), constants)
target = ("cuda", 90, 32)
for future in CompilerProcess().compile(target, [variant.spec(), ("no_such_module", "kernel", [], {})]):
    future.result()
driver.set_active(TargetGpu(GPUTarget(*target)))
compiled = space_to_depth.warmup(*variant.arguments(), grid=(1,), **dict(variant.constants))
print(found, "cubin" in compiled.asm)
"""


def test_a_launch_finds_the_compiled_kernel_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # else Triton warns that this will not be the default
    monkeypatch.delenv("TRITON_INTERPRET")
    script = tmp_path / "script.py"
    script.write_text(CACHE_SCRIPT)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (ran.stdout.split("\n")[0], ran.stderr) == ("[True] True", "")


def test_a_compiler_without_work_exits() -> None:
    process = CompilerProcess()
    assert process.compile(TARGET, []) == []
    assert process.process.wait(TIMEOUT_S) == 0


def test_a_compiler_that_cannot_start_returns_no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    futures = CompilerProcess().compile(TARGET, [("module", "kernel", [], {})] * 3)
    assert [future.result(TIMEOUT_S) for future in futures] == [None] * 3


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CompilerProcess]]:
    """The started and not yet acquired compilers, on a machine that appears to have a GPU."""
    monkeypatch.setattr(compiler, "NVIDIA_DRIVER", Path("/dev/null"))
    monkeypatch.setattr(sys, "executable", "/bin/cat")  # waits for its input, as the program does
    yield compiler._started
    compiler.stop_compiler()


def test_the_compiler_starts_once_and_only_with_a_gpu(
    started: list[CompilerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.start_compiler("cpu")
    assert not started
    compiler.start_compiler("auto")
    compiler.start_compiler("cuda:1")
    [first] = started
    assert compiler.acquire_compiler() is first and not started
    first.compile(TARGET, [])
    first.process.wait(TIMEOUT_S)
    monkeypatch.setattr(compiler, "NVIDIA_DRIVER", Path("/no/such/device"))
    compiler.start_compiler("auto")
    assert not started


def test_an_unused_compiler_is_stopped(started: list[CompilerProcess]) -> None:
    compiler.start_compiler("cuda")
    [first] = started
    compiler.stop_compiler()
    assert not started
    first.process.wait(TIMEOUT_S)


TORCH_IMPORTING_KERNEL = """
from pathlib import Path

class Kernel:
    def warmup(self, *arguments, grid, **constants):
        try:
            import torch
        except ImportError:
            Path("torchless").touch()

kernel = Kernel()
"""


def test_kernels_cannot_import_torch_in_the_compiler_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_importer.py").write_text(TORCH_IMPORTING_KERNEL)
    monkeypatch.syspath_prepend(tmp_path)
    [future] = CompilerProcess().compile(TARGET, [("torch_importer", "kernel", [], {})])
    future.result(TIMEOUT_S)
    assert (tmp_path / "torchless").exists()


PRINTING_KERNEL = """
class Kernel:
    def warmup(self, *arguments, grid, **constants):
        print("a dump" * 10_000, flush=True)

kernel = Kernel()
"""


def test_output_of_the_compiler_does_not_corrupt_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "printer.py").write_text(PRINTING_KERNEL)
    monkeypatch.syspath_prepend(tmp_path)
    futures = CompilerProcess().compile(TARGET, [("printer", "kernel", [], {})] * 3)
    assert [future.result(TIMEOUT_S) for future in futures] == [None] * 3
