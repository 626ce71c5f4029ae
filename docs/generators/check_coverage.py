"""Show that rows of docs/coverage.yaml are true: run the commands and tests of some of them, chosen at random.

    python docs/generators/check_coverage.py --rows 40 --seed 7
    python docs/generators/check_coverage.py --all --match Checkpoint

Commands run in a new folder each, with the data and the run that they name: `imagenet`, a tiny ImageNet as unpacked,
and `run`, a short run of the quickstart. All tests run in one pytest process. Exits with 1 if anything fails.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

DOCS = Path(__file__).resolve().parent.parent
ROOT = DOCS.parent
TABLE = DOCS / "coverage.yaml"
TIMEOUT_S = 600  # of one command
MAIN = [sys.executable, "-m", "reconv"]
RUN = "train quickstart --epochs 2 --set save.every=1ep --out run --quiet"
WNIDS = ("n01440764", "n01443537", "n01484850")
LAST_LINES = 15  # of what a failed command printed


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the check of a row ended; `why` is empty where it passed."""

    row: str
    check: str
    seconds: float
    why: str


def checks_of(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The checks of a row: {test: NODE_ID}, or {run: COMMAND, prints: PATTERN, writes: FILE}."""
    return list(row.get("check", []))


def check_commands(rows: Iterable[Mapping[str, Any]], scratch: Path) -> list[Outcome]:
    """Run the commands of rows, each in a folder of its own."""
    outcomes = []
    for row in rows:
        for check in checks_of(row):
            if "run" in check:
                start_s = time.perf_counter()
                why = _run_command(check, scratch)
                outcomes.append(Outcome(row["capability"], check["run"], time.perf_counter() - start_s, why))
                _print(outcomes[-1])
    return outcomes


def _run_command(check: Mapping[str, Any], scratch: Path) -> str:
    words = shlex.split(check["run"])
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        for fixture in ("imagenet", "run"):
            if any(word == fixture or word.startswith(f"{fixture}/") for word in words):
                shutil.copytree(_fixture(fixture, scratch), folder / fixture)
        try:
            done = _reconv(words[1:], folder)
        except subprocess.TimeoutExpired:
            return f"it took more than {TIMEOUT_S} s"
        printed = done.stdout + done.stderr
        last = "\n".join(printed.splitlines()[-LAST_LINES:])
        if done.returncode != 0:
            return f"exit code {done.returncode}:\n{last}"
        if not re.search(check.get("prints", ""), printed):
            return f"{check['prints']!r} was not printed:\n{last}"
        missing = [path for path in [check.get("writes")] if path and not list(folder.glob(path))]
        return f"it did not write {missing[0]}" if missing else ""


def _reconv(words: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment.pop("DATA_DIR", None)
    return subprocess.run(
        [*MAIN, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def _fixture(name: str, scratch: Path) -> Path:
    """A folder that commands name, made when it is first needed."""
    folder = scratch / "fixtures"
    folder.mkdir(exist_ok=True)
    if not (folder / name).exists():
        if name == "imagenet":
            make_imagenet(folder / name)
        else:
            done = _reconv(shlex.split(RUN), folder)
            assert done.returncode == 0, done.stderr
    return folder / name


def make_imagenet(root: Path) -> None:
    """Three classes in train/, six images in a flat validation/, and their labels in synset_labels.txt."""
    noise = np.random.default_rng(0)
    for wnid in WNIDS:
        (root / "train" / wnid).mkdir(parents=True)
    (root / "validation").mkdir()
    files = [root / "train" / wnid / f"{wnid}_{number}.JPEG" for wnid in WNIDS for number in range(8)]
    files += [root / "validation" / f"ILSVRC2012_val_{number:08}.JPEG" for number in range(1, 7)]
    for file in files:
        Image.fromarray(noise.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(file)
    (root / "synset_labels.txt").write_text("\n".join(2 * WNIDS) + "\n")


def check_tests(rows: Sequence[Mapping[str, Any]], scratch: Path) -> list[Outcome]:
    """Run the tests of rows in one pytest process."""
    nodes = list(dict.fromkeys(check["test"] for row in rows for check in checks_of(row) if "test" in check))
    found = _run_tests(nodes, scratch)
    outcomes = []
    for row in rows:
        for check in checks_of(row):
            if "test" in check:
                seconds, why = found[check["test"]]
                outcomes.append(Outcome(row["capability"], check["test"], seconds, why))
                _print(outcomes[-1])
    return outcomes


def _run_tests(nodes: Sequence[str], scratch: Path) -> dict[str, tuple[float, str]]:
    """Seconds of each test, and why it failed."""
    if not nodes:
        return {}
    report = scratch / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1"]
    command += ["-m", "not gpu and not external"]  # with the slow ones, which make test leaves out
    done = subprocess.run(
        [*command, f"--junitxml={report}", *nodes], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if not report.exists() or done.returncode not in (0, 1):  # one name is wrong: pytest then runs none of them
        if len(nodes) == 1:
            return {nodes[0]: (0.0, "\n".join((done.stdout + done.stderr).splitlines()[-LAST_LINES:]))}
        return {node: result for one in nodes for node, result in _run_tests([one], scratch).items()}
    cases = ElementTree.parse(report).iter("testcase")
    results = [(f"{case.get('file')}::{case.get('name')}", case) for case in cases]
    return {node: _result(node, results) for node in nodes}


def _result(node: str, results: Iterable[tuple[str, ElementTree.Element]]) -> tuple[float, str]:
    own = [case for name, case in results if name == node or name.startswith(f"{node}[")]
    bad = [child for case in own for child in case if child.tag in ("failure", "error", "skipped")]
    why = "it did not run" if not own else "" if not bad else f"{bad[0].tag}: {bad[0].get('message')}"
    return sum(float(case.get("time", 0)) for case in own), why


def _print(outcome: Outcome) -> None:
    state = "ok  " if not outcome.why else "FAIL"
    print(f"{state} {outcome.seconds:6.1f} s  {outcome.row[:48]:<48}  {outcome.check}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40, help="number of rows to choose (40)")
    parser.add_argument("--all", action="store_true", help="check every row")
    parser.add_argument("--seed", type=int, help="of the choice; printed, so that it can be repeated")
    parser.add_argument("--match", default="", help="only rows whose capability contains this")
    arguments = parser.parse_args()
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    rows = [row for section in table["sections"].values() for row in section]
    rows = [row for row in rows if checks_of(row) and arguments.match in row["capability"]]
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    count = len(rows) if arguments.all else min(arguments.rows, len(rows))
    chosen = random.Random(seed).sample(rows, count)
    print(f"{count} of {len(rows)} rows, seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="coverage-check-") as name:
        outcomes = [*check_commands(chosen, Path(name)), *check_tests(chosen, Path(name))]
    failed = [outcome for outcome in outcomes if outcome.why]
    for outcome in failed:
        print(f"\n{outcome.row}: {outcome.check}\n{outcome.why}")
    print(f"\n{len(outcomes) - len(failed)} of {len(outcomes)} checks of {count} rows passed (seed {seed})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
