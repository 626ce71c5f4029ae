"""Compiles the optional JPEG decoder when a wheel or an editable install is built; `make native` runs it alone.

An install never fails for lack of a compiler: without one the package is pure Python and decodes with other libraries.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
LIBRARY = ROOT / "reconv" / "data" / "decode" / "_jpeg.so"
# No contraction: interpolation weights are doubles, and must not depend on whether a processor fuses multiply and add.
FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off")
HARDENING = ("-fstack-protector-strong", "-D_FORTIFY_SOURCE=2")  # it parses files of strangers
LINUX_HARDENING = ("-Wl,-z,relro,-z,now", "-Wl,-z,noexecstack")


def command(library: Path) -> list[str] | None:
    """The command that compiles the decoder to `library`; None without a compiler."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not compiler or shutil.which(compiler[0]) is None:
        return None
    sources = sorted(str(path) for path in (ROOT / "csrc").glob("*.c"))
    hardening = (*HARDENING, *(LINUX_HARDENING if sys.platform == "linux" else ()))
    return [*compiler, *FLAGS, *hardening, "-o", str(library), *sources, "-lm", "-lpthread"]


def compile_library(library: Path = LIBRARY) -> str:
    """Compile the decoder; returns the error message, empty on success."""
    line = command(library)
    if line is None:
        return "there is no C compiler"
    unfinished = library.with_suffix(f".{os.getpid()}.so")
    line[line.index("-o") + 1] = str(unfinished)
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode != 0:
        unfinished.unlink(missing_ok=True)
        return f"{shlex.join(line)} failed:\n{done.stderr}"
    unfinished.replace(library)  # a process that has mapped the old one keeps it
    return ""


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]  # the backend looks for this name
    """Adds the compiled decoder to the build where it compiles."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; on failure remove an older library, so that none built from other sources is shipped."""
        error = compile_library()
        if error:
            LIBRARY.unlink(missing_ok=True)
            self.app.display_info(f"without the fast JPEG decoder: {error}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"].append(str(LIBRARY.relative_to(ROOT)))


if __name__ == "__main__":
    sys.exit(compile_library() or None)
