"""What a wheel and a source archive contain, what they require, and what `make test` selects."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import reconv
from reconv.core.compat import ranges_of, release_numbers

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "reconv"
LIBRARIES = {"reconv/data/decode/_jpeg.so", "reconv/inference/backends/_winograd.so"}


def _build_wheel(folder: Path, compiler: str) -> tuple[str, set[str]]:
    """The wheel the build backend makes of a copy of this checkout, and the names in it."""
    checkout = folder / "checkout"
    checkout.mkdir()
    for name in ("reconv", "csrc"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    for library in LIBRARIES:
        (checkout / library).write_bytes(b"left from another build")
    script = f"import hatchling.build; print(hatchling.build.build_wheel({str(folder)!r}))"
    environment = {**os.environ, "CC": compiler}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=checkout, env=environment, capture_output=True, text=True, check=True
    )
    built = done.stdout.split()[-1]
    with zipfile.ZipFile(folder / built) as archive:
        return built, set(archive.namelist())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in the wheel that is made where there is no C compiler."""
    built, names = _build_wheel(tmp_path_factory.mktemp("wheel"), "no-such-compiler")
    assert built.endswith("-py3-none-any.whl")
    return names


@pytest.mark.native
def test_a_wheel_made_with_a_compiler_holds_the_libraries_and_is_for_this_platform(tmp_path: Path) -> None:
    built, names = _build_wheel(tmp_path, os.environ.get("CC", "cc"))
    assert names >= LIBRARIES
    assert not built.endswith("-any.whl")


def test_a_wheel_made_without_a_compiler_does_not_hold_the_libraries_of_another_build(wheel: set[str]) -> None:
    assert not wheel & LIBRARIES


@pytest.mark.native
def test_a_compiler_that_fails_leaves_a_wheel_without_the_libraries(tmp_path: Path) -> None:
    built, names = _build_wheel(tmp_path, "false")
    assert built.endswith("-py3-none-any.whl")
    assert not names & LIBRARIES


def test_the_wheel_holds_every_file_of_the_package(wheel: set[str]) -> None:
    files = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*") if path.is_file()}
    wanted = {name for name in files if "__pycache__" not in name} - LIBRARIES
    assert len(wanted) > 60
    assert wanted <= wheel


def test_the_wheel_has_recipes_digits_with_license_and_py_typed(wheel: set[str]) -> None:
    assert "reconv/py.typed" in wheel
    assert "reconv/recipes/reconv/quickstart.yaml" in wheel
    assert "reconv/data/readers/digits.npz" in wheel
    assert "reconv/data/readers/digits.LICENSE.txt" in wheel
    assert any(name.endswith("licenses/LICENSE") for name in wheel)
    assert not any(name.startswith("tests") for name in wheel)


def test_the_source_archive_holds_what_its_tests_read(tmp_path: Path) -> None:
    script = f"import hatchling.build; print(hatchling.build.build_sdist({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    with tarfile.open(tmp_path / done.stdout.split()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert {"csrc/jpeg.h", "csrc/decode.c", "csrc/winograd/kernels.h"} <= sources
    assert {
        *sources,
        "hatch_build.py",
        ".ci/run",
        ".github/workflows/release.yml",
        "Makefile",
        "README.md",
        "docs/images/report.png",
        "docs/generators/code_blocks.py",
        "mkdocs.yml",
        "CITATION.cff",
        "benchmarks/training/throughput.py",
        "packaging/constraints.txt",
        "packaging/requirements.txt",
        "tests/test_package.py",
    } <= names


def test_the_citation_has_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == reconv.__version__
    assert citation["license"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]


def test_python_is_new_enough_to_unpack_archives_safely() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11.4"
    assert "Python 3.11.4 or newer" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("has_compiler", [True, False])
@pytest.mark.parametrize("name", ["chromium", "google-chrome", ""])
def test_make_test_leaves_out_only_what_has_no_browser_or_no_compiler(
    tmp_path: Path, name: str, has_compiler: bool
) -> None:
    for program in (name, "cc" if has_compiler else ""):
        if program:
            (tmp_path / program).symlink_to(sys.executable)
    make = shutil.which("make")
    assert make is not None, "the Makefile is tested with make; install it, as in: apt-get install make"
    done = subprocess.run([make, "-n", "test"], cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("tests in a browser are left out" in done.stdout) == (not name)
    assert ("compiled libraries are left out" in done.stdout) == (not has_compiler)
    left_out = ("" if name else " and not browser") + ("" if has_compiler else " and not native")
    assert f'-m "not slow and not gpu and not external{left_out}" ' in done.stdout


def test_torch_and_its_companions_have_the_oldest_tested_release_and_no_upper_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [Requirement(line) for lines in (project["dependencies"], *extras.values()) for line in lines]
    found = {(need.name, str(need.specifier)) for need in needed if ranges_of(need.name)}
    oldest = {name: min(map(release_numbers, map(attrgetter("oldest"), ranges_of(name)))) for name, _ in found}
    assert found == {(name, ">=" + ".".join(map(str, numbers))) for name, numbers in oldest.items()}
    assert set(oldest) == {"torch", "torchvision", "timm", "triton"}
    assert not any(line.startswith(("torchvision", "timm", "triton")) for line in project["dependencies"])


def pinned_versions() -> dict[str, str]:
    """The versions of packaging/constraints.txt."""
    lines = (ROOT / "packaging" / "constraints.txt").read_text().splitlines()
    return {name: version for name, _, version in (line.partition("==") for line in lines if line[:1] != "#")}


def test_the_constraints_have_a_tested_version_of_all_that_make_and_ci_install() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned, extras = pinned_versions(), project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in ("test", "dev", "docs", "serve") for line in extras[extra])]
    needed = {canonicalize_name(need.name): need for need in map(Requirement, lines)}
    del needed["triton"]  # each build of torch requires its own
    assert len(pinned) > len(needed) > 30
    assert [name for name, need in needed.items() if not need.specifier.contains(pinned.get(name, "0"))] == []
    assert all(pinned[name] in tested for name in needed for tested in ranges_of(name))
    assert not any("+" in version for version in pinned.values())  # pip finds no such version on other platforms


def test_everything_is_installed_with_the_constraints() -> None:
    lines = [line.strip() for line in (ROOT / "Makefile").read_text().splitlines() if "pip install" in line]
    free = [
        line for line in lines if "$(CONSTRAINTS)" not in line and not re.search(r"\$\((AUDIT|RELEASE)\)/bin", line)
    ]
    assert len(lines) > len(free) == 0


def test_the_container_has_the_tested_versions_of_what_it_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned, dockerfile = pinned_versions(), (ROOT / "Dockerfile").read_text()
    lines = (ROOT / "packaging" / "requirements.txt").read_text().splitlines()
    names = {line for line in lines if line[:1] != "#"}
    extras = [line for extra in ("serve", "onnx", "detection") for line in project["optional-dependencies"][extra]]
    needed = {canonicalize_name(need.name) for need in map(Requirement, project["dependencies"] + extras)}
    assert names <= {*pinned}
    assert needed - names == {"torch"}
    assert re.findall(r"^ARG TORCH_VERSION=(\S+)$", dockerfile, re.MULTILINE) == [pinned["torch"]] * 2


def test_renewed_constraints_are_free_of_what_belongs_to_a_build_of_torch() -> None:
    of_torch = ["torch==2.13.0+cpu", "triton==3.9.0", "nvidia-nccl-cu13==2.28", "cuda-bindings==13.0"]
    renew = runpy.run_path(str(ROOT / "packaging" / "renew_constraints.py"))
    text = renew["constraints"]([*of_torch, "reconv==0.1.0", "jinja2==3.1.6"])
    assert [line for line in text.splitlines() if line[:1] != "#"] == ["jinja2==3.1.6", "torch==2.13.0"]
    assert text.startswith((ROOT / "packaging" / "constraints.txt").read_text().partition("\nabsl")[0])


def test_no_package_hides_a_name_of_the_api() -> None:
    # The import of a package sets an attribute of its parent: `reconv.export` would become the module.
    packages = {path.stem for path in Path(reconv.__file__).parent.iterdir()}
    assert packages & set(reconv.__all__) == set()
