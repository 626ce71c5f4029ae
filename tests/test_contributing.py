"""The worked examples of CONTRIBUTING.md work: their code blocks are applied to a copy of the package and tested there.

The first line of a block is `# FILE`, for a new file, or `# FILE, after TEXT`, `before` or `replacing`, for lines that
go after, before or in the place of the line with the text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
HEADER = re.compile(r"# (?P<file>[\w./-]+\.(?:py|yaml))(?:, (?P<where>after|before|replacing) `(?P<anchor>.+)`)?")
# Files beside the tests: the thing itself, for some its declaration without torch, and a list.
FILES = {
    "model": 3,  # and the names for shell completion
    "dataset reader": 3,
    "transform": 3,
    "learning-rate schedule": 1,
    "metric": 2,
    "optimizer": 3,
    "export format": 2,
    "launch target": 2,
    "kernel": 4,  # device code, the autograd function, the module and the list of swaps
    "recipe": 1,
}


class Block(NamedTuple):
    """Text for a new file, or lines for an existing one."""

    file: str
    where: str | None
    anchor: str | None
    text: str


def examples() -> dict[str, list[Block]]:
    """The blocks of every example by the thing that it adds."""
    _, *sections = re.split(r"^### Add an? ", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.M)
    return {section.partition("\n")[0]: blocks(section) for section in sections}


def blocks(section: str) -> list[Block]:
    parsed = []
    for block in re.findall(r"^```(?:python|yaml)\n(.*?)^```", section, re.S | re.M):
        first, _, text = block.partition("\n")
        header = HEADER.fullmatch(first)
        assert header is not None, f"a block must start with the name of its file: {first}"
        parsed.append(Block(header["file"], header["where"], header["anchor"], text))
    return parsed


def apply(checkout: Path, block: Block) -> None:
    path = checkout / block.file
    if block.anchor is None:
        assert not path.exists(), f"{block.file} exists: show what to change and where"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)
        return
    lines = path.read_text().splitlines(keepends=True)
    places = [number for number, line in enumerate(lines) if block.anchor in line]
    assert len(places) == 1, f"{block.file}: {block.anchor!r} is in {len(places)} lines"
    first = places[0] + (block.where == "after")
    lines[first : places[0] + (block.where != "before")] = [block.text]
    path.write_text("".join(lines))


def test_an_example_touches_few_files() -> None:
    touched = {
        name: len({block.file for block in blocks if not block.file.startswith("tests/")})
        for name, blocks in examples().items()
    }
    assert touched == FILES
    tests = {name: sum(block.file.startswith("tests/") for block in blocks) for name, blocks in examples().items()}
    assert tests == dict.fromkeys(FILES, 1)


def test_the_worked_examples_of_contributing_pass_their_own_tests(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for name in ("reconv", "tests/support"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests/conftest.py", "tests/kernels/kernel_cases.py", "pyproject.toml"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    applied = [block for blocks in examples().values() for block in blocks]
    for block in applied:
        apply(checkout, block)
    tests = [block.file for block in applied if block.file.startswith("tests/")]
    assert len(tests) == len(FILES)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
