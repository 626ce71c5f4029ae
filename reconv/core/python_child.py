"""Python processes that find the modules this process finds, however it was started and wherever it has moved to."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from reconv.core.code_folders import PREFIX

_PACKAGE_ROOT = str(Path(__file__).absolute().parents[2])


def python_command(program: str, *arguments: str) -> list[str]:
    """The command that runs a program, given as source, with `sys.path` of this process from its first import on.

    PYTHONPATH alone does not do: a relative entry is another folder once the working directory has changed. Nor is it
    set to `sys.path`: programs that the child starts would inherit it, also those of another Python version.
    """
    is_code = [entry.startswith(PREFIX) for entry in sys.path]
    path = [
        entry if code else os.path.abspath(entry)  # "" is the working directory
        for entry, code in zip(sys.path, is_code, strict=True)
    ]
    if _PACKAGE_ROOT not in path:  # found through a working directory that was left, or an import hook
        path.append(_PACKAGE_ROOT)
    opened = "import reconv.core.code_folders\n" if any(is_code) else ""
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {path!r}\n{opened}{program}", *arguments]
