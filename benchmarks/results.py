"""Measured figures as JSON files, one per case: `docs/results/data/CASE.json`.

A file says what was measured, when, from which commit, on what and by which command; pages are made from them alone.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "results" / "data"
VERSIONED = ("torch", "torchvision", "timm", "triton", "numpy", "pillow", "onnxruntime", "openvino")
DIGEST_LENGTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure: the median, its range over n measurements, and the baseline of the same run, if it has one."""

    name: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    n: int | None = None
    baseline: float | None = None
    baseline_name: str = ""
    date: str = ""  # if it differs from the file's
    more: Mapping[str, str] = field(default_factory=dict)  # further columns, as text
    lower_is_better: bool = False

    @property
    def ratio(self) -> float | None:
        """Times the baseline; above 1 is better than it."""
        if not self.baseline:
            return None
        return self.baseline / self.value if self.lower_is_better else self.value / self.baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All figures of one run of a case; `sources` has a digest for each path of the code that it measures."""

    case: str
    command: str
    hardware: str
    date: str
    commit: str
    versions: Mapping[str, str]
    sources: Mapping[str, str]
    rows: tuple[Row, ...]

    def save(self, folder: Path = DATA) -> Path:
        """Write the file that `load` reads, with the ratio of each row beside its figures."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {name: getattr(self, name) for name in self.__slots__ if name != "rows"}
        content["rows"] = [_row_content(row) for row in self.rows]
        path = folder / f"{self.case}.json"
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return path


def load(case: str, folder: Path = DATA) -> Result:
    """The stored result of a case."""
    content = json.loads((folder / f"{case}.json").read_text(encoding="utf-8"))
    rows = tuple(Row(**{k: v for k, v in row.items() if k != "ratio"}) for row in content.pop("rows"))
    return Result(**content, rows=rows)


def updated(result: Result, folder: Path = DATA) -> Result:
    """The result with the rows that an earlier file has and this run does not, each marked with its date."""
    try:
        earlier = load(result.case, folder)
    except FileNotFoundError:
        return result
    measured = {row.name for row in result.rows}
    kept = [replace(row, date=row.date or earlier.date) for row in earlier.rows if row.name not in measured]
    order = {row.name: number for number, row in enumerate(earlier.rows)}
    rows = sorted((*result.rows, *kept), key=lambda row: order.get(row.name, len(order)))
    return replace(result, rows=tuple(rows))


def describe(case: str, command: str, sources: Sequence[str], rows: Iterable[Row]) -> Result:
    """A result of this machine and checkout."""
    return Result(
        case=case,
        command=command,
        hardware=hardware(),
        date=datetime.date.today().isoformat(),
        commit=commit(),
        versions=versions(),
        sources=digests(sources),
        rows=tuple(rows),
    )


def digests(sources: Sequence[str], root: Path = ROOT) -> dict[str, str]:
    """A digest of the contents of each path, which may be a file or a folder."""
    return {source: _digest(root / source, root) for source in sources}


def changed_sources(result: Result, root: Path = ROOT) -> list[str]:
    """The paths whose contents are no longer those that were measured."""
    return [source for source, digest in result.sources.items() if _digest(root / source, root) != digest]


def hardware() -> str:
    """The accelerator, if there is one, and the cores of this machine."""
    import torch

    cores = len(os.sched_getaffinity(0))
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {cores} CPU cores"
    return f"{_cpu_name()}, {cores} cores"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a figure may depend on."""
    import importlib.metadata

    known = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            known[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return known


def commit() -> str:
    """The commit of this checkout; empty outside of a repository, with a plus sign if files differ from it."""
    if os.environ.get("RECONV_COMMIT"):  # a copy of a checkout, on a machine without git
        return os.environ["RECONV_COMMIT"]
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _digest(path: Path, root: Path) -> str:
    files = sorted(f for f in path.rglob("*") if f.suffix in {".py", ".c", ".h", ".yaml", ".csv", ".toml"})
    digest = hashlib.sha256()
    for file in files if path.is_dir() else [path]:
        if file.is_file():
            digest.update(f"{file.relative_to(root)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:DIGEST_LENGTH]


def _row_content(row: Row) -> dict[str, Any]:
    content = {name: getattr(row, name) for name in row.__slots__}
    if row.ratio is not None:
        content["ratio"] = round(row.ratio, 3)
    return {name: value for name, value in content.items() if value not in (None, "", {}, False)}
