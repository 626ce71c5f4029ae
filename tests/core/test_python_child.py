"""Python processes that are started find the modules of their parent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reconv.core.python_child import python_command

PACKAGE_ROOT = Path(__file__).resolve().parents[2]

# A parent that has left the folder to which the entries of its PYTHONPATH are relative.
PARENT = """
import os, subprocess, sys
from reconv.core.python_child import python_command
os.chdir("elsewhere")
command = python_command("import found, sys; print(found.__file__, *sys.argv[1:])", "one", "two words")
sys.exit(subprocess.run(command).returncode)
"""


def test_relative_entries_of_pythonpath_survive_a_change_of_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "found.py").touch()
    relative = os.path.relpath(PACKAGE_ROOT, tmp_path)
    environ = {**os.environ, "PYTHONPATH": f"modules{os.pathsep}{relative}"}
    ran = subprocess.run([sys.executable, "-c", PARENT], env=environ, capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == (f"{tmp_path / 'modules' / 'found.py'} one two words\n", "")


def test_a_child_has_the_path_of_its_parent_and_always_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "it's a \\ folder:with\nodd \udcff characters"
    monkeypatch.setattr(sys, "path", ["", str(odd), *(entry for entry in sys.path if entry != str(PACKAGE_ROOT))])
    (tmp_path / "json.py").write_text("raise RuntimeError")  # -P: nothing is imported from here before the path is set
    printed = subprocess.check_output(python_command("print(ascii(sys.path))"), text=True)
    expected = [str(tmp_path), *sys.path[1:], str(PACKAGE_ROOT)]
    assert printed == ascii([os.path.abspath(entry) for entry in expected]) + "\n"


def test_the_environment_of_programs_that_a_child_starts_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    program = "import os; print([name for name in os.environ if name.startswith('PYTHON')])"
    expected = [name for name in os.environ if name.startswith("PYTHON")]
    assert subprocess.check_output(python_command(program), text=True) == f"{expected}\n"
