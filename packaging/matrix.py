"""Run the test suite with every supported pair of releases, one environment after the other: `make matrix`.

    python packaging/matrix.py [--only 3.11:2.15] [--workers 2] [--folder DIR] [--keep]

Each environment of matrix.toml is made in a temporary folder, runs `make test`, repeats what failed alone, adds its row
to the table in docs/reference/versions.md, and is deleted. It ends with 1 if a test failed twice. Builds of torch for
CUDA take 5 GB each.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "versions.md"
START, END = "<!-- matrix -->\n", "<!-- end of matrix -->"
COLUMNS = ("Python", "torch", "torchvision", "Triton", "passed", "failed", "failed under load", "seconds", "date")
NOT_RUN = "not run"

# Each release of torch has its own bounds of setuptools.
OF_TORCH = re.compile(r"(torch|setuptools)==")


@dataclass(frozen=True, slots=True)
class Environment:
    """Releases that are installed together."""

    python: str
    torch: str
    torchvision: str = ""

    @property
    def name(self) -> str:
        return f"py{self.python}-torch{self.torch}"

    @property
    def requirements(self) -> list[str]:
        return [f"torch=={self.torch}"] + ([f"torchvision=={self.torchvision}"] if self.torchvision else [])

    def row(self, *cells: object) -> tuple[str, ...]:
        """Its row of the table; without cells one that says that it was not run."""
        cells = cells or ("", NOT_RUN, "", "", "", "")
        return (self.python, self.torch, self.torchvision or "–", *map(str, cells))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The numbers of tests that passed and failed."""

    passed: int
    failed: int

    @classmethod
    def of(cls, report: Path) -> Outcome:
        """Counts from pytest's JUnit XML. An error in a teardown counts as a failure beside the test that passed."""
        (suite,) = ElementTree.parse(report).iter("testsuite")
        count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
        failed = count["failures"] + count["errors"]
        return cls(count["tests"] - failed - count["skipped"], failed)


def environments(only: Sequence[str]) -> list[Environment]:
    """The environments of matrix.toml, or those of them that `only` names, as 3.11:2.15."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["environment"]
    found = [Environment(**table) for table in tables]
    return [each for each in found if not only or any(f"{each.python}:{each.torch}".startswith(name) for name in only)]


def install(environment: Environment, folder: Path) -> Path:
    """Install the releases and the tested set of everything else; returns the environment's Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([f"python{environment.python}", "-m", "venv", folder], check=True)
    lines = (ROOT / "packaging" / "constraints.txt").read_text().splitlines()
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{line}\n" for line in lines if not OF_TORCH.match(line)))
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--constraint", constraints]
    subprocess.run([*pip, *environment.requirements, "--editable", f"{ROOT}[test]"], check=True)
    for stamp in (".installed", ".installed-dev"):  # of the Makefile, which would install its own set
        (folder / stamp).touch()
    return python


def run_tests(folder: Path, workers: int, *arguments: str) -> Outcome:
    """Run `make test` in an environment."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    options = " ".join(("-q", f"--junitxml={report}", *arguments))
    subprocess.run(["make", "test", f"VENV={folder}", f"WORKERS={workers}", f"ARGS={options}"], cwd=ROOT, check=False)
    return Outcome.of(report)


def measure(environment: Environment, folder: Path, workers: int) -> tuple[tuple[str, ...], int]:
    """The row of an environment, and how many tests failed twice: with others beside them, and alone."""
    python = install(environment, folder)
    started_s = time.monotonic()
    first = run_tests(folder, workers)
    seconds = time.monotonic() - started_s
    again = run_tests(folder, 0, "--last-failed") if first.failed else Outcome(0, 0)
    show = "import importlib.metadata as m; print(m.version('triton'))"
    triton = subprocess.run([python, "-c", show], check=True, capture_output=True, text=True).stdout.strip()
    passed, today = first.passed + again.passed, datetime.date.today().isoformat()
    load_failures = first.failed - again.failed
    return environment.row(triton, passed, again.failed, load_failures, round(seconds), today), again.failed


def table(rows: Iterable[Sequence[str]]) -> str:
    """Rows as a Markdown table."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_rows(page: str, known: Sequence[Environment], new: Mapping[tuple[str, str], tuple[str, ...]]) -> str:
    """The page with new rows by Python and torch, and the rows that it has of the other environments."""
    before, rest = page.split(START)
    old, after = rest.split(END)
    cells = [tuple(cell.strip() for cell in line.strip()[1:-1].split("|")) for line in old.splitlines()[2:]]
    rows = {row[:2]: row for row in cells} | dict(new)
    return before + START + table(rows.get((e.python, e.torch), e.row()) for e in known) + END + after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="PYTHON:TORCH", help="as in 3.11:2.15")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="of pytest; default: all cores")
    parser.add_argument("--folder", type=Path, help="where the environments are made; those there are used again")
    parser.add_argument("--keep", action="store_true", help="do not delete the environments")
    options = parser.parse_args()
    if not (chosen := environments(options.only)):
        parser.error(f"no environment is called {' or '.join(options.only)}")
    parent = options.folder or Path(tempfile.mkdtemp(prefix="reconv-matrix-"))
    num_failed = 0
    for environment in chosen:
        folder = parent / environment.name
        try:
            row, failed = measure(environment, folder, options.workers)
        finally:
            if not options.keep:
                shutil.rmtree(folder, ignore_errors=True)
        num_failed += failed
        PAGE.write_text(with_rows(PAGE.read_text(), environments(()), {row[:2]: row}))
        print(" ".join(row), flush=True)
    if not options.folder and not options.keep:
        parent.rmdir()
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
