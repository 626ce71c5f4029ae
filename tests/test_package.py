"""What is shipped, and rules about the source that no linter checks."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "reconv"
FORBIDDEN_FILE_NAMES = {"utils", "helpers", "common", "misc", "base", "manager", "core"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in the wheel the build backend makes of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    script = f"import hatchling.build; print(hatchling.build.build_wheel({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(folder / done.stdout.split()[-1]) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_file_of_the_package(wheel: set[str]) -> None:
    files = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*") if path.is_file()}
    wanted = {name for name in files if "__pycache__" not in name}
    assert len(wanted) > 60
    assert wanted <= wheel


def test_the_wheel_holds_recipes_digits_their_licence_and_the_type_marker(wheel: set[str]) -> None:
    assert "reconv/py.typed" in wheel
    assert "reconv/recipes/quickstart.yaml" in wheel
    assert "reconv/data/digits.npz" in wheel
    assert "reconv/data/digits.LICENSE.txt" in wheel
    assert any(name.endswith("licenses/LICENSE") for name in wheel)
    assert not any(name.startswith("tests") for name in wheel)


def test_the_source_archive_holds_what_its_tests_read(tmp_path: Path) -> None:
    script = f"import hatchling.build; print(hatchling.build.build_sdist({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    with tarfile.open(tmp_path / done.stdout.split()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tools = {f"tools/{path.name}" for path in (ROOT / "tools").glob("*.py")}
    assert len(tools) >= 2
    assert {*tools, ".ci/run", "Makefile", "README.md", "docs/report.png", "tests/test_coverage.py"} <= names


def test_python_is_new_enough_to_unpack_archives_safely() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11.4"
    assert "Python 3.11.4 or newer" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", ["chromium", "google-chrome", ""])
def test_make_test_leaves_browser_tests_out_only_where_there_is_no_browser(tmp_path: Path, name: str) -> None:
    if name:
        (tmp_path / name).symlink_to(sys.executable)
    make = shutil.which("make")
    assert make is not None, "the Makefile is tested with make; install it, as in: apt-get install make"
    done = subprocess.run([make, "-n", "test"], cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("are left out" in done.stdout) == (not name)
    assert ('-m "not slow and not browser"' in done.stdout) == (not name)
    assert ('-m "not slow" ' in done.stdout) == bool(name)


def _imports(path: Path) -> set[str]:
    """Every module a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_only_parallel_imports_torch_distributed() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 60
    guilty = [file for file in files if any(name.startswith("torch.distributed") for name in _imports(file))]
    assert [file for file in guilty if file.parent != PACKAGE / "parallel"] == []


def test_nothing_imports_torchvision_and_nothing_writes_a_pickle() -> None:
    banned = {"torchvision", "pickle", "cloudpickle", "dill"}
    readers_of_foreign_pickles = {PACKAGE / "data/sources/cifar.py"}
    for file in sorted(PACKAGE.rglob("*.py")):
        roots = {name.partition(".")[0] for name in _imports(file)}
        allowed = {"pickle"} if file in readers_of_foreign_pickles else set()
        assert not (roots & banned) - allowed, file
        assert not re.search(r"(?<![.\w])torch\.save\b", file.read_text()), file


def test_file_names_say_what_is_inside() -> None:
    assert {path.stem for path in PACKAGE.rglob("*.py")}.isdisjoint(FORBIDDEN_FILE_NAMES)


def test_torch_is_bounded_and_torchvision_absent() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "torch>=2.11,<2.14" in project["dependencies"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    assert not any(line.startswith("torchvision") for line in project["dependencies"] + extras)
