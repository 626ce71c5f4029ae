"""The start of a command that needs torch: what takes long runs in threads while Python imports modules.

All of it affects speed only: what fails here is tried again, and reported, where it is needed.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread

# Modules with shared libraries that recipes need. The system loads one library at a time: after torch's has begun, they
# would have to wait for it.
_WITH_LIBRARIES = (
    *("array", "csv", "decimal", "fcntl", "google_crc32c", "heapq", "mmap", "numpy", "pydantic.types", "queue"),
    *("resource", "socket", "sqlite3", "ssl", "uuid", "yaml", "zoneinfo"),
)
# Modules that import neither torch nor any more libraries.
_WITHOUT_LIBRARIES = ("reconv.recipe.loader", "reconv.logging.events", "reconv.report.html")
_torch_imported = Event()


@contextmanager
def pause_gc() -> Iterator[None]:
    """No garbage collection while torch is imported: it would be a tenth of the time, and the objects stay anyway."""
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def start_cuda(device: str, devices: int | None) -> None:
    """Start what a run on a GPU needs while torch is imported, unless this process only launches others.

    That is the kernel compiler, a process, and the CUDA context with the first kernels; which GPU a launcher's process
    uses is decided later.
    """
    from reconv.core.cuda_context import start_cuda_context
    from reconv.distributed.environment import read_launch_env
    from reconv.kernels.jit import compile_process

    if devices is None:
        compile_process.start_compiler(device)
        if read_launch_env().world_size == 1:
            start_cuda_context(device, _load_kernels)


def _load_kernels(index: int) -> None:
    """Load the kernels that most steps begin with, and Triton for our own, as soon as torch is imported."""
    _torch_imported.wait()
    from reconv.device import load_cuda_kernels
    from reconv.kernels.jit.compile_ahead import import_triton

    with suppress(Exception):
        load_cuda_kernels(index)
        import_triton()


def import_torch() -> None:
    """Import torch, and the classes of recipes and reports while its shared libraries are loaded.

    On two cores, torch took 0.85 s, of which its libraries 0.2 to 0.3 s, in which Python holds the interpreter lock.
    """
    if "torch" not in sys.modules:
        for name in _WITH_LIBRARIES:
            with suppress(ImportError):
                importlib.import_module(name)
        load_torch_libraries()
        for name in _WITHOUT_LIBRARIES:
            importlib.import_module(name)
    for name in ("reconv.device", "reconv.kernels.jit.compile_ahead"):
        importlib.import_module(name)  # here: two threads must not import the same modules in another order
    _torch_imported.set()


def load_torch_libraries() -> Thread | None:
    """Load torch's largest library in a thread; None where that could change which libraries torch finds."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "lib"
    # As torch itself does it. Between the two it loads CUDA's libraries from Python packages, so that others in
    # LD_LIBRARY_PATH are not found; of these, the CPU library needs the profiler's alone.
    libraries = [(folder / "libtorch_global_deps.so", os.RTLD_GLOBAL), (folder / "libtorch_cpu.so", os.RTLD_LOCAL)]
    if not all(path.exists() for path, _ in libraries) or _has_profiler_library():
        return None

    import ctypes

    def load() -> None:
        open_library = ctypes.CDLL(None).dlopen  # unlike ctypes.CDLL, a call of it releases the interpreter lock
        open_library.argtypes, open_library.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
        for path, flag in libraries:
            open_library(os.fsencode(path), os.RTLD_NOW | flag)

    thread = Thread(target=load, name="reconv-torch", daemon=True)
    thread.start()
    return thread


def _has_profiler_library() -> bool:
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return any(any(Path(folder).glob("libcupti*")) for folder in folders if folder)
