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
PATIENCE_S = 120

# In a process of its own: the interpreter that the other tests use compiles nothing.
FOUND = """
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from reconv.kernels.jit.compile_variants import TargetGpu
from reconv.kernels.jit.compile_process import CompilerProcess
from reconv.kernels.jit.launch import variant_of
from reconv.kernels.stem.triton import space_to_depth

found = []
knobs.compilation.listener = lambda cache_hit, **about: found.append(cache_hit)
images = torch.empty(2, dtype=torch.float32), torch.empty(2, dtype=torch.bfloat16)
constants = {"AFTER": 1, "BEFORE": 2, "CHANNELS": 3, "DEPTH": 16, "PIXELS": 256}
variant = variant_of(space_to_depth, (*images, 1, 2, 3, 4, 5, 6, 7), constants)
target = ("cuda", 90, 32)
for answer in CompilerProcess().compile(target, [variant.spec(), ("no_such_module", "kernel", [], {})]):
    answer.result()
driver.set_active(TargetGpu(GPUTarget(*target)))
compiled = space_to_depth.warmup(*variant.arguments(), grid=(1,), **dict(variant.constants))
print(found, "cubin" in compiled.asm)
"""


def test_what_the_compiler_leaves_in_the_cache_is_what_a_launch_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # else Triton warns that this will not be the default
    monkeypatch.delenv("TRITON_INTERPRET")
    script = tmp_path / "script.py"
    script.write_text(FOUND)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ran.stdout.split("\n")[0], ran.stderr) == ("[True] True", "")


def test_a_compiler_without_work_ends() -> None:
    process = CompilerProcess()
    assert process.compile(TARGET, []) == []
    assert process.process.wait(PATIENCE_S) == 0


def test_a_compiler_that_cannot_run_leaves_everything_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    answers = CompilerProcess().compile(TARGET, [("module", "kernel", [], {})] * 3)
    assert [answer.result(PATIENCE_S) for answer in answers] == [None] * 3


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CompilerProcess]]:
    """Those that were begun and not taken, on a machine that seems to have a GPU."""
    monkeypatch.setattr(compiler, "_NVIDIA", Path("/dev/null"))
    monkeypatch.setattr(sys, "executable", "/bin/cat")  # waits for its input, as the program does
    yield compiler._started
    compiler.stop_compiler()


def test_a_compiler_is_begun_once_and_only_for_a_gpu_that_may_be_there(
    begun: list[CompilerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.start_compiler("cpu")
    assert not begun
    compiler.start_compiler("auto")
    compiler.start_compiler("cuda:1")
    [first] = begun
    assert compiler.acquire_compiler() is first and not begun
    first.compile(TARGET, [])
    first.process.wait(PATIENCE_S)
    monkeypatch.setattr(compiler, "_NVIDIA", Path("/no/such/device"))
    compiler.start_compiler("auto")
    assert not begun


def test_a_compiler_that_is_not_needed_is_let_go(begun: list[CompilerProcess]) -> None:
    compiler.start_compiler("cuda")
    [first] = begun
    compiler.stop_compiler()
    assert not begun
    first.process.wait(PATIENCE_S)


TORCHLESS = """
from pathlib import Path

class Kernel:
    def warmup(self, *arguments, grid, **constants):
        try:
            import torch
        except ImportError:
            Path("torchless").touch()

kernel = Kernel()
"""


def test_what_is_compiled_finds_no_torch_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asking.py").write_text(TORCHLESS)
    monkeypatch.syspath_prepend(tmp_path)
    [answer] = CompilerProcess().compile(TARGET, [("asking", "kernel", [], {})])
    answer.result(PATIENCE_S)
    assert (tmp_path / "torchless").exists()


TALKATIVE = """
class Kernel:
    def warmup(self, *arguments, grid, **constants):
        print("a dump" * 10_000, flush=True)

kernel = Kernel()
"""


def test_prints_while_compiling_do_not_mix_with_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "talking.py").write_text(TALKATIVE)
    monkeypatch.syspath_prepend(tmp_path)
    answers = CompilerProcess().compile(TARGET, [("talking", "kernel", [], {})] * 3)
    assert [answer.result(PATIENCE_S) for answer in answers] == [None] * 3
