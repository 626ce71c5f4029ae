"""The doctor reads affinity, container limits, allocator and pages correctly, and its advice can be typed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from reconv import __version__
from reconv.cli import main
from reconv.cluster.environment_checks import (
    CheckResult,
    _jpeg_decoder,
    allocator_name,
    as_json,
    check_machine,
    has_requirements,
    is_within,
    requirements,
)
from reconv.core.machine import Machine, available_memory_bytes, usable_cores, usable_memory_bytes
from reconv.data.decode import native

GIB = 2**30


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine of plain files: 64 GiB, no limits, nothing set."""
    here = Machine(
        proc=tmp_path / "proc",
        sys=tmp_path / "sys",
        shm=tmp_path / "shm",
        libraries=tmp_path / "lib",
        folder=tmp_path,
        environ={},
    )
    _write(here.proc / "meminfo", f"MemTotal:       {64 * 2**20} kB\nMemFree: 1 kB\n")
    _write(here.proc / "cpuinfo", "model name\t: A Processor\nflags\t\t: fpu avx2 amx_bf16\n")
    _write(here.proc / "self/cgroup", "0::/box/inner\n")
    _write(here.proc / "self/maps", "7f00-7f01 r-xp 00000000 00:00 0 /usr/lib/libc.so.6\n")
    return here


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _check(machine: Machine, name: str) -> CheckResult:
    (found,) = [result for result in check_machine(machine) if result.name == name]
    return found


def test_without_limits_cores_come_from_the_affinity_and_memory_from_the_machine(machine: Machine) -> None:
    assert usable_cores(machine) == len(os.sched_getaffinity(0))
    assert usable_memory_bytes(machine) == 64 * GIB


def test_the_smallest_limit_of_all_parent_cgroups_applies_in_v2(machine: Machine) -> None:
    _write(machine.sys / "fs/cgroup/box/inner/cpu.max", "max 100000\n")
    _write(machine.sys / "fs/cgroup/box/cpu.max", "100000 100000\n")
    _write(machine.sys / "fs/cgroup/box/inner/memory.max", f"{8 * GIB}\n")
    _write(machine.sys / "fs/cgroup/box/memory.max", f"{4 * GIB}\n")
    _write(machine.sys / "fs/cgroup/memory.max", "max\n")
    assert usable_cores(machine) == 1
    assert usable_memory_bytes(machine) == 4 * GIB


def test_free_memory_is_bounded_by_the_tightest_limit_and_includes_the_page_cache(machine: Machine) -> None:
    assert available_memory_bytes(machine) is None
    _write(machine.proc / "meminfo", f"MemTotal: {64 * 2**20} kB\nMemAvailable: {32 * 2**20} kB\n")
    assert available_memory_bytes(machine) == 32 * GIB
    group = machine.sys / "fs/cgroup/box/inner"
    _write(group / "memory.max", f"{8 * GIB}\n")
    _write(group / "memory.current", f"{7 * GIB}\n")
    _write(group / "memory.stat", f"anon 1\ninactive_file {2 * GIB}\nactive_file 5\n")
    _write(machine.sys / "fs/cgroup/memory.stat", "anon 1\n")
    assert available_memory_bytes(machine) == 3 * GIB
    _write(group / "memory.max", "max\n")
    assert available_memory_bytes(machine) == 32 * GIB


def test_cgroup_v1_limits_apply(machine: Machine) -> None:
    _write(machine.proc / "self/cgroup", "5:memory:/box\n4:cpu,cpuacct:/\n0::/\n")
    _write(machine.sys / "fs/cgroup/cpu/cpu.cfs_quota_us", "150000")
    _write(machine.sys / "fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    _write(machine.sys / "fs/cgroup/memory/box/memory.limit_in_bytes", f"{2 * GIB}")
    _write(machine.sys / "fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    assert usable_cores(machine) == 1
    assert usable_memory_bytes(machine) == 2 * GIB


def test_a_cgroup_v1_quota_of_minus_1_is_unlimited(machine: Machine) -> None:
    _write(machine.proc / "self/cgroup", "4:cpu:/\n")
    _write(machine.sys / "fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    _write(machine.sys / "fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    assert usable_cores(machine) == len(os.sched_getaffinity(0))


def test_more_threads_than_cores_is_a_note_with_the_variable_to_export(machine: Machine) -> None:
    _write(machine.sys / "fs/cgroup/box/cpu.max", "100000 100000")
    crowded = Machine(
        machine.proc, machine.sys, machine.shm, machine.libraries, machine.folder, {"OMP_NUM_THREADS": "64"}
    )
    result = _check(crowded, "OMP_NUM_THREADS")
    assert result.level == "note"
    assert result.advice == "export OMP_NUM_THREADS=1"
    fitting = Machine(
        machine.proc, machine.sys, machine.shm, machine.libraries, machine.folder, {"OMP_NUM_THREADS": "1"}
    )
    assert _check(fitting, "OMP_NUM_THREADS").level == "ok"


@pytest.mark.parametrize("name", ["jemalloc", "tcmalloc", "mimalloc"])
def test_a_preloaded_allocator_is_recognized(machine: Machine, name: str) -> None:
    _write(machine.proc / "self/maps", f"7f00-7f01 r-xp 00000000 00:00 0 /usr/lib/lib{name}.so.2\n")
    assert allocator_name(machine) == name
    assert _check(machine, "allocator").level == "ok"


def test_the_advice_preloads_the_library_that_is_there(machine: Machine) -> None:
    assert "apt-get install libjemalloc2" in _check(machine, "allocator").advice
    library = machine.libraries / "x86_64-linux-gnu/libjemalloc.so.2"
    _write(library, "")
    assert _check(machine, "allocator").advice == f"export LD_PRELOAD={library}"


@pytest.mark.parametrize(
    ("text", "mode", "level"),
    [
        ("always [madvise] never", "madvise", "note"),
        ("[always] madvise never", "always", "ok"),
        ("always madvise [never]", "never", "note"),
    ],
)
def test_huge_pages_are_read(machine: Machine, text: str, mode: str, level: str) -> None:
    _write(machine.sys / "kernel/mm/transparent_hugepage/enabled", text)
    result = _check(machine, "huge_pages")
    assert (result.value, result.level) == (mode, level)
    assert ("export THP_MEM_ALLOC_ENABLE=1" in result.advice) == (level == "note")


def test_the_processor_and_its_vector_units_are_named(machine: Machine) -> None:
    assert _check(machine, "cpu").value == "A Processor (avx2, amx_bf16)"


def test_a_machine_without_system_files_is_checked(tmp_path: Path) -> None:
    empty = Machine(tmp_path, tmp_path, tmp_path / "none", tmp_path, tmp_path, {})
    results = check_machine(empty)
    assert {"versions", "devices", "resources", "threads", "allocation"} <= {result.topic for result in results}
    assert usable_memory_bytes(empty) is None


@pytest.mark.parametrize(
    ("version", "bounds", "within"),
    [
        ("2.13.0+cpu", ">=2.11", True),
        ("8.10", "<9,>=8.9", True),
        ("9.0.0", ">=8.9,<9", False),
        ("2.9.1", ">=2.11", False),
        ("6.0.3", "", True),
    ],
)
def test_versions_are_compared_as_numbers(version: str, bounds: str, within: bool) -> None:
    assert is_within(version, bounds) is within


def test_requirements_are_those_of_the_package() -> None:
    needed = requirements()
    base = {need.name.lower() for need in needed if not need.extra}
    assert base == {
        "torch",
        "numpy",
        "pillow",
        "simplejpeg",
        "pydantic",
        "pyyaml",
        "click",
        "rich",
        "safetensors",
        "google-crc32c",
    }
    assert {need.extra for need in needed if need.extra} >= {"test", "dev"}
    assert ">=2.11" in next(need.bounds for need in needed if need.name == "torch")


@pytest.mark.parametrize(
    ("support", "value", "level"),
    [
        (native.NativeSupport("", True), "native", "ok"),
        (native.NativeSupport("", False), "pillow", "ok"),
        (native.NativeSupport("it was not compiled", False), "pillow", "note"),
    ],
)
def test_the_jpeg_decoder_is_the_one_that_auto_selects(
    monkeypatch: pytest.MonkeyPatch, support: native.NativeSupport, value: str, level: str
) -> None:
    monkeypatch.setattr(native, "native_support", lambda: support)
    result = _jpeg_decoder()
    assert (result.value, result.level) == (value, level)
    assert result.value == native.choose_decoder("auto", None, [support])
    assert support.problem in result.text


def test_a_missing_package_fails_the_requirements() -> None:
    ok = CheckResult("versions", "torch", "2.13", "2.13")
    missing = CheckResult("versions", "rich", None, "not installed", "missing", "pip install rich")
    assert has_requirements([ok])
    assert not has_requirements([ok, missing])
    assert as_json([ok, missing])["ok"] is False


def test_the_command_prints_the_results_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--json"])
    assert end.value.code == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ok"] is True
    assert facts["resources"]["cores"] >= 1
    assert facts["versions"]["torch"].startswith("2.")
    with pytest.raises(SystemExit) as end:
        main(["doctor"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(
        word in text for word in ("versions", "allocator", "huge_pages", "shared_memory_bytes", "disk_free_bytes")
    )


def test_a_source_tree_that_is_not_installed_is_checked_too(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "site-packages" not in entry])
    found = _check(machine, "reconv")
    assert (found.value, found.level) == (__version__, "note")
    assert requirements() == []
