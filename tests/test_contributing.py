"""The worked examples of CONTRIBUTING.md work: their code blocks are applied to a copy of the package and tested there.

The first line of a block is `# FILE`, for a new file, or `# FILE, after TEXT`, for lines to insert.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = re.compile(r"# (?P<file>[\w./-]+\.(?:py|yaml))(?:, after `(?P<anchor>.+)`)?")


def blocks() -> list[tuple[str, str | None, str]]:
    """File, anchor and text of every block that names a file."""
    found = []
    for block in re.findall(r"^```(?:python|yaml)\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.S | re.M):
        first, _, text = block.partition("\n")
        header = HEADER.fullmatch(first)
        assert header is not None, f"a block must start with the name of its file: {first}"
        found.append((header["file"], header["anchor"], text))
    return found


def apply(checkout: Path, file: str, anchor: str | None, text: str) -> None:
    path = checkout / file
    if anchor is None:
        assert not path.exists(), f"{file} exists: show what to insert and after which line"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return
    lines = path.read_text().splitlines(keepends=True)
    places = [number for number, line in enumerate(lines, 1) if anchor in line]
    assert len(places) == 1, f"{file}: {anchor!r} is in {len(places)} lines"
    lines.insert(places[0], text)
    path.write_text("".join(lines))


def test_the_worked_examples_of_contributing_pass_their_own_tests(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for name in ("reconv", "tests/support"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests/conftest.py", "tests/kernels/kernel_cases.py", "pyproject.toml"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    applied = blocks()
    for file, anchor, text in applied:
        apply(checkout, file, anchor, text)
    tests = [file for file, anchor, _ in applied if file.startswith("tests/") and anchor is None]
    assert len(tests) == 5  # of a model, a reader, a transform, a kernel and a recipe
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
