"""Checks of the machine for `reconv doctor`: versions, devices, resources and settings, with advice.

Checks change nothing, and one that is not possible on this system reports that instead of failing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from reconv.core.compat import TESTED, installed_version, ranges_of, release_numbers
from reconv.core.machine import Machine, parse_number, read_system_file, usable_cores, usable_memory_bytes
from reconv.core.version import __version__

Level = Literal["ok", "note", "missing", "wrong"]

_GIB = 2**30
_LOW_DISK_BYTES = 5 * _GIB
_LOW_SHM_BYTES = _GIB
_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check as a value and as text, with advice if something can be improved."""

    topic: str
    name: str
    value: str | int | float | None
    text: str
    level: Level = "ok"
    advice: str = ""


def check_machine(machine: Machine | None = None) -> list[CheckResult]:
    """The results of all checks, grouped by topic."""
    here = machine or Machine()
    return [
        *_versions(),
        *_devices(here),
        _jpeg_decoder(),
        *_resources(here),
        *_threads(here),
        *_memory_settings(here),
        *_extras(),
    ]


def has_requirements(results: Sequence[CheckResult]) -> bool:
    """True if nothing required is missing or wrong."""
    return all(result.level not in ("missing", "wrong") for result in results)


def as_json(results: Sequence[CheckResult]) -> dict[str, Any]:
    """The results as plain data: values by topic and name, then the advice."""
    topics: dict[str, dict[str, Any]] = {}
    for result in results:
        topics.setdefault(result.topic, {})[result.name] = result.value
    advice = [
        {"topic": result.topic, "name": result.name, "level": result.level, "advice": result.advice}
        for result in results
        if result.advice
    ]
    return {"ok": has_requirements(results), **topics, "advice": advice}


@dataclass(frozen=True, slots=True)
class Requirement:
    """A dependency of this package."""

    name: str
    bounds: str
    extra: str


def requirements() -> list[Requirement]:
    """The dependencies in the metadata of the installed package; none if it is not installed."""
    found = []
    for line in _declared():
        spec, _, marker = line.partition(";")
        match = re.match(r"\s*([A-Za-z0-9._-]+)\s*(.*?)\s*$", spec)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", marker)
        if match is not None:
            found.append(Requirement(match[1], match[2].strip("() "), extra[1] if extra else ""))
    return found


def _declared() -> list[str]:
    try:
        return importlib.metadata.requires("reconv") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def is_within(version: str, bounds: str) -> bool:
    """True if a version is within bounds such as `>=2.7,<3`."""
    release = release_numbers(version)
    for clause in filter(None, bounds.split(",")):
        match = re.match(r"\s*(>=|<)\s*(.+)", clause)
        if match is not None and (release >= release_numbers(match[2])) != (match[1] == ">="):
            return False
    return True


def _versions() -> Iterator[CheckResult]:
    topic = "versions"
    python = platform.python_version()
    yield CheckResult(topic, "python", python, f"{python} ({platform.python_implementation()})")
    if installed_version("reconv") is None:
        text = f"{__version__}, not installed, so its dependencies cannot be checked"
        yield CheckResult(topic, "reconv", __version__, text, "note", "pip install -e .")
    else:
        yield CheckResult(topic, "reconv", __version__, __version__)
    yield CheckResult(topic, "system", platform.platform(), platform.platform())
    for need in requirements():
        if need.extra:
            continue
        version = installed_version(need.name)
        if version is None:
            advice = f"pip install '{need.name}{need.bounds}'"
            yield CheckResult(topic, need.name, None, "not installed", "missing", advice)
        elif not is_within(version, need.bounds):
            advice = f"pip install '{need.name}{need.bounds}'"
            yield CheckResult(topic, need.name, version, f"{version}, but {need.bounds} is required", "missing", advice)
        elif not ranges_of(need.name):
            yield CheckResult(topic, need.name, version, version)
    yield from _tested_versions()


def _tested_versions() -> Iterator[CheckResult]:
    """The installed packages of which only some releases are tested, with these."""
    for name in dict.fromkeys(tested.package for tested in TESTED):
        version, ranges = installed_version(name), ranges_of(name)
        if version is None:
            continue
        text = f"{version} (tested: {', '.join(map(str, ranges))})"
        if any(version in tested for tested in ranges):
            yield CheckResult("versions", name, version, text)
        else:
            advice = f"pip install '{name}=={ranges[-1].newest}.*' if results or errors look wrong"
            yield CheckResult("versions", name, version, f"{text[:-1]}, not this one)", "note", advice)


def _devices(machine: Machine) -> Iterator[CheckResult]:
    topic = "devices"
    yield CheckResult(topic, "cpu", _cpu_model(machine), _cpu_model(machine))
    try:
        import torch
    except (ImportError, OSError) as error:
        yield CheckResult(
            topic, "torch", None, f"cannot be imported: {error}", "missing", "pip install --force-reinstall torch"
        )
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        text = f"{properties.name}, {properties.total_memory / _GIB:.1f} GiB, capability {capability}"
        yield CheckResult(topic, f"cuda:{index}", properties.name, text)
    if importlib.util.find_spec("habana_frameworks") is not None:
        yield CheckResult(topic, "hpu", "installed", "the Gaudi packages are installed; `hl-smi` lists the devices")
    if torch.backends.mps.is_available():
        yield CheckResult(topic, "mps", "available", "available")
    elif torch.cuda.device_count() == 0:
        yield _no_accelerator(machine, torch.version.cuda)


def _no_accelerator(machine: Machine, torch_cuda: str | None) -> CheckResult:
    """No GPU: there is none, or torch cannot use it."""
    if not (machine.proc / "driver" / "nvidia" / "version").exists():
        return CheckResult("devices", "accelerator", None, "none: training runs on the CPU")
    why = "this torch is a CPU build" if torch_cuda is None else f"torch is built for CUDA {torch_cuda}"
    advice = "install the torch build for your driver (pytorch.org/get-started), or check CUDA_VISIBLE_DEVICES"
    return CheckResult(
        "devices", "accelerator", None, f"an NVIDIA driver is loaded, but {why} and sees no GPU", "note", advice
    )


def _cpu_model(machine: Machine) -> str:
    """The processor's name and the instruction sets that matter here."""
    text = read_system_file(machine.proc / "cpuinfo") or ""
    model = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    cpu_flags = set(flags[1].split()) if flags else set()
    units = [flag for flag in _CPU_FLAGS if flag in cpu_flags]
    name = model[1].strip() if model else platform.processor() or platform.machine()
    return f"{name} ({', '.join(units)})" if units else name


def _jpeg_decoder() -> CheckResult:
    """The decoder that `augment.decoder: auto` selects here."""
    from reconv.data.decode.native import native_support

    topic, name, support = "devices", "jpeg_decoder", native_support()
    if support.is_fast:
        return CheckResult(topic, name, "native", "native: compiled, with AVX2")
    if not support.problem:
        return CheckResult(topic, name, "pillow", "pillow: the compiled one is fast with AVX2 only")
    advice = "install the wheel for this platform, or install again with a C compiler on the machine"
    return CheckResult(topic, name, "pillow", f"pillow: of the compiled one, {support.problem}", "note", advice)


def _resources(machine: Machine) -> Iterator[CheckResult]:
    topic = "resources"
    cores = usable_cores(machine)
    online = os.cpu_count() or 1
    yield CheckResult(topic, "cores", cores, f"{cores} of {online} usable (CPU affinity and container quota)")
    memory = usable_memory_bytes(machine)
    yield CheckResult(topic, "memory_bytes", memory, "unknown" if memory is None else f"{memory / _GIB:.1f} GiB")
    free = shutil.disk_usage(machine.folder).free
    low = free < _LOW_DISK_BYTES
    advice = "free disk space for checkpoints, or write runs elsewhere with --out DIR" if low else ""
    text = f"{free / _GIB:.1f} GiB free in {machine.folder}"
    yield CheckResult(topic, "disk_free_bytes", free, text, "note" if low else "ok", advice)
    yield _shared_memory(machine)


def _shared_memory(machine: Machine) -> CheckResult:
    topic, name = "resources", "shared_memory_bytes"
    if not machine.shm.is_dir():
        return CheckResult(topic, name, None, f"{machine.shm} does not exist")
    total = shutil.disk_usage(machine.shm).total
    if total >= _LOW_SHM_BYTES:
        return CheckResult(topic, name, total, f"{total / _GIB:.1f} GiB in {machine.shm}")
    advice = "several processes need more: docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm"
    return CheckResult(topic, name, total, f"only {total / 2**20:.0f} MiB in {machine.shm}", "note", advice)


def _threads(machine: Machine) -> Iterator[CheckResult]:
    """Thread counts in the environment, compared with the usable cores."""
    topic = "threads"
    cores = usable_cores(machine)
    requested = [(name, parse_number(machine.environ.get(name, ""))) for name in _THREAD_VARIABLES]
    for name, threads in requested:
        if threads is not None and threads > cores:
            text = f"{threads} threads for {cores} usable cores"
            yield CheckResult(topic, name, threads, text, "note", f"export {name}={cores}")
        elif threads is not None:
            yield CheckResult(topic, name, threads, f"{threads} of {cores} usable cores")
    if all(threads is None for _, threads in requested):
        is_limited = cores < len(os.sched_getaffinity(0)) if platform.system() == "Linux" else False
        text = f"not set; engine.num_threads of the recipe applies ({cores} usable cores)"
        advice = f"export OMP_NUM_THREADS={cores}, the container's quota of cores" if is_limited else ""
        yield CheckResult(topic, "OMP_NUM_THREADS", None, text, "note" if is_limited else "ok", advice)


def _memory_settings(machine: Machine) -> Iterator[CheckResult]:
    topic = "allocation"
    allocator = allocator_name(machine)
    if allocator in _ALLOCATORS:
        yield CheckResult(topic, "allocator", allocator, f"{allocator}, loaded in this process")
    else:
        text = f"{allocator}; jemalloc or tcmalloc often uses less memory with many decoding threads"
        yield CheckResult(topic, "allocator", allocator, text, "note", _preload_advice(machine))
    pages = re.search(r"\[(\w+)\]", read_system_file(machine.sys / "kernel/mm/transparent_hugepage/enabled") or "")
    mode = pages[1] if pages else None
    if mode == "madvise" and machine.environ.get("THP_MEM_ALLOC_ENABLE") != "1":
        text = "madvise: only for programs that request them"
        yield CheckResult(
            topic, "huge_pages", mode, text, "note", "export THP_MEM_ALLOC_ENABLE=1, so that torch requests them"
        )
    elif mode == "never":
        advice = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled; export THP_MEM_ALLOC_ENABLE=1"
        yield CheckResult(topic, "huge_pages", mode, "never: disabled on this machine", "note", advice)
    else:
        yield CheckResult(topic, "huge_pages", mode, mode or "unknown on this system")


def allocator_name(machine: Machine) -> str:
    """The memory allocator in this process: a preloaded one, or the C library's."""
    maps = read_system_file(machine.proc / "self" / "maps") or ""
    loaded = [name for name in _ALLOCATORS if name in maps]
    return loaded[0] if loaded else platform.libc_ver()[0] or "system"


def _preload_advice(machine: Machine) -> str:
    """Advice on loading a faster allocator."""
    found = sorted(machine.libraries.glob("*/libjemalloc.so.2")) + sorted(machine.libraries.glob("*/libtcmalloc*.so.4"))
    if found:
        return f"export LD_PRELOAD={found[0]}"
    library = machine.libraries / f"{platform.machine()}-linux-gnu" / "libjemalloc.so.2"
    return f"apt-get install libjemalloc2, then export LD_PRELOAD={library}"


def _extras() -> Iterator[CheckResult]:
    """Extras that are not completely installed, and the command that installs them."""
    needed = [need for need in requirements() if need.extra]
    for extra in dict.fromkeys(need.extra for need in needed):
        absent = [need.name for need in needed if need.extra == extra and installed_version(need.name) is None]
        text = f"missing {', '.join(absent)}" if absent else "installed"
        advice = f"pip install 'reconv[{extra}]'" if absent else ""
        yield CheckResult("optional packages", extra, ", ".join(absent), text, "note" if absent else "ok", advice)
