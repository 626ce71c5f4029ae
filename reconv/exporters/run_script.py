"""Writes `run.py`, the script that runs an exported model with its runtime, numpy and Pillow alone."""

from __future__ import annotations

import re
from pathlib import Path

_TEMPLATES = Path(__file__).parent / "run_template"
_LOAD_MODEL = re.compile(r"^from reconv\..* import load_model\n+", re.MULTILINE)
_TYPES = re.compile(r"^from collections\.abc import Iterator$", re.MULTILINE)


def run_script(runtime: str) -> str:
    """The source of run.py for a runtime, `run_template/with_RUNTIME.py`: `main.py` with its `load_model`."""
    main = (_TEMPLATES / "main.py").read_text(encoding="utf-8")
    source = (_TEMPLATES / f"with_{runtime}.py").read_text(encoding="utf-8")
    body = source[source.index("\ndef ") :].rstrip("\n")
    main, num_imports = _LOAD_MODEL.subn("", main)
    main, num_types = _TYPES.subn("from collections.abc import Callable, Iterator", main)
    marker = "\n\ndef read_settings("
    assert num_imports == num_types == 1 and marker in main
    return main.replace(marker, f"\n{body}\n{marker}", 1)
