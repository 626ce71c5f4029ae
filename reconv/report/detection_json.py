"""What a detector's last evaluation found, class by class and error by error, in `detection.json`.

Owns that file. Refuses to know how it is shown, and what boxes are. Invariant: plain data, written whole; a run without
it, or of a version that wrote another form, has none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reconv.io.atomic import write_atomic

FILE_NAME = "detection.json"
FORM = 1


def write_findings(run_dir: Path, findings: Mapping[str, Any]) -> None:
    """Replace the file by these findings."""
    text = json.dumps({"form": FORM, **findings}, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    write_atomic(run_dir / FILE_NAME, text + "\n")


def read_findings(run_dir: Path) -> Mapping[str, Any] | None:
    """The findings on file, if any."""
    file = run_dir / FILE_NAME
    if not file.exists():
        return None
    findings: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return findings if findings.get("form") == FORM else None
