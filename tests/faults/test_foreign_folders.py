"""Folders of strangers are safe to open: a sample of the class of the fault matrix, and that its traps are live."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from foreign_traps import TRAPS, recipe_fields

MATRIX = Path(__file__).parent / "matrix"
NUM_SAMPLED = 24


def run_matrix(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(MATRIX), *options]
    return subprocess.run([*command, "--workers", "1"], capture_output=True, text=True, timeout=500)


@pytest.mark.native  # the layer of the matrix is compiled
def test_a_sample_of_commands_fields_and_traps_is_safe() -> None:
    done = run_matrix("--classes", "foreign", "--sample", str(NUM_SAMPLED))
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(rf"\| foreign folders \| {NUM_SAMPLED} \| {NUM_SAMPLED} \|", done.stdout)


@pytest.mark.native
def test_the_traps_are_live() -> None:
    """With consent the code of a foreign run is executed, and the oracle says so."""
    case: dict[str, Any] = {"in": "recipe", "field": "metrics", "shape": "list", "trap": "a file of code"}
    request = {"class": "foreign folders", "case": {**case, "command": "eval", "trust": True}}
    done = run_matrix("--case", json.dumps(request))
    assert done.returncode == 1
    assert "without consent: " in done.stdout and "evil.py" in done.stdout


def test_every_field_of_the_recipe_that_takes_a_text_has_traps() -> None:
    fields = {field for field, _, _ in recipe_fields()}
    assert fields >= {"data.path", "model.init", "distill.teacher_recipe", "callbacks", "code_path", "model.options"}
    of_code = {field for field, trap, _ in recipe_fields() if trap == "a module"}
    assert of_code == fields, "an import path is a text"
    assert len(recipe_fields()) >= len(TRAPS) * 20
