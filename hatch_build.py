"""Compiles the optional libraries when a wheel or an editable install is built; `make native` runs it alone.

An install never fails for lack of a compiler: without one the package is pure Python and uses other libraries.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
HARDENING = ("-fstack-protector-strong", "-D_FORTIFY_SOURCE=2")
FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", *HARDENING)
LINUX_HARDENING = ("-Wl,-z,relro,-z,now", "-Wl,-z,noexecstack")


class Library(NamedTuple):
    """A shared library that is loaded by ctypes from the package."""

    name: str
    path: Path
    sources: Path  # the folder of its C files
    flags: tuple[str, ...]


JPEG = Library(
    "fast JPEG decoder",
    ROOT / "reconv" / "data" / "decode" / "_jpeg.so",
    ROOT / "csrc",
    # Interpolation weights are doubles, and must not depend on whether a processor fuses multiply and add.
    ("-ffp-contract=off",),
)
WINOGRAD = Library(
    "Winograd convolutions",
    ROOT / "reconv" / "inference" / "backends" / "_winograd.so",
    ROOT / "csrc" / "winograd",
    ("-ffp-contract=fast",),  # fused multiply-add is half of their speed
)
LIBRARIES = (JPEG, WINOGRAD)


def command(library: Library, output: Path) -> list[str] | None:
    """The command that compiles a library to `output`; None without a compiler."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not compiler or shutil.which(compiler[0]) is None:
        return None
    sources = sorted(str(path) for path in library.sources.glob("*.c"))
    flags = (*FLAGS, *library.flags, *(LINUX_HARDENING if sys.platform == "linux" else ()))
    return [*compiler, *flags, "-o", str(output), *sources, "-lm", "-lpthread"]


def compile_library(library: Library, output: Path | None = None) -> str:
    """Compile a library, to its place in the package or to `output`; returns the error message, empty on success."""
    output = output or library.path
    unfinished = output.with_suffix(f".{os.getpid()}.so")
    line = command(library, unfinished)
    if line is None:
        return "there is no C compiler"
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode != 0:
        unfinished.unlink(missing_ok=True)
        return f"{shlex.join(line)} failed:\n{done.stderr}"
    unfinished.replace(output)  # a process that has mapped the old one keeps it
    return ""


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]  # the backend looks for this name
    """Adds the libraries to the build that compile."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; on failure remove an older library, so that none built from other sources is shipped."""
        for library in LIBRARIES:
            error = compile_library(library)
            if error:
                library.path.unlink(missing_ok=True)
                self.app.display_info(f"without the {library.name}: {error}")
                continue
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            build_data["artifacts"].append(str(library.path.relative_to(ROOT)))


if __name__ == "__main__":
    sys.exit("\n".join(filter(None, map(compile_library, LIBRARIES))) or None)
