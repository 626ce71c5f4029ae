"""`make audit` tells vulnerable packages from a service that cannot be reached."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "packaging" / "audit.py"
SKIPPED = {"name": "torch", "skip_reason": "Dependency not found and could not be audited: torch (2.11)"}
CLEAN = {"name": "click", "version": "8.2", "vulns": []}
FOUND = {"id": "CVE-2026-1", "fix_versions": ["12.1"], "aliases": [], "description": "x"}
VULNERABLE = {"name": "pillow", "version": "10.2", "vulns": [FOUND]}


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("dependencies", "text", "code"),
    [
        ([CLEAN, VULNERABLE], "pillow 10.2: CVE-2026-1, fixed in 12.1", 1),
        ([SKIPPED, VULNERABLE], "pillow 10.2", 1),
        ([CLEAN], "1 packages audited, no known vulnerabilities", 0),
        ([CLEAN, SKIPPED], "not audited: torch", 0),
        ([SKIPPED, SKIPPED], "packages were not audited", 0),
    ],
)
def test_vulnerable_packages_fail_the_audit(audit: ModuleType, dependencies: list[Any], text: str, code: int) -> None:
    message, found = audit.judge(json.dumps({"dependencies": dependencies}), "")
    assert found == code
    assert text in message


@pytest.mark.parametrize(
    ("stderr", "text", "code"),
    [
        ("ERROR: Could not connect to the vulnerability feed", "packages were not audited", 0),
        ("Traceback: KeyError: 'x'", "pip-audit failed:\nTraceback", 2),
    ],
)
def test_an_audit_that_says_nothing_is_told_from_a_clean_one(
    audit: ModuleType, stderr: str, text: str, code: int
) -> None:
    message, found = audit.judge("", stderr)
    assert (message.startswith(text), found) == (True, code)
