"""Measure cases of the registry and write the pages of results.

python -m benchmarks list                             # cases, and when each was last measured
python -m benchmarks run CASE ... [--data DIR]        # measure; docs/results/data/CASE.json
python -m benchmarks pages [--check]                  # README, docs/results and charts from these files
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import pages, results
from benchmarks.cases import CASES, Case

_JSON, _DATA = "{json}", "{data}"


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the cases, and when each was last measured")
    run = commands.add_parser("run", help="measure cases and store their figures")
    run.add_argument("cases", nargs="+", choices=sorted(CASES), metavar="CASE")
    run.add_argument("--data", type=Path, help="the data that the case needs; `list` says which")
    run.add_argument("--json", type=Path, help="take the figures from this file that the case's command wrote")
    run.add_argument("--out", type=Path, default=results.DATA, help="folder of the JSON files")
    made = commands.add_parser("pages", help="write README, docs/results and the charts from the stored figures")
    made.add_argument("--check", action="store_true", help="write nothing; fail if a page differs")
    options = parser.parse_args(args)
    if options.command == "list":
        return _list()
    if options.command == "pages":
        return _pages(options.check)
    for name in options.cases:
        print(measure(CASES[name], options.data, options.json, options.out))
    return 0


def measure(case: Case, data: Path | None, json_file: Path | None, out: Path) -> Path:
    """Run the case's command unless its JSON is given, and store the figures."""
    if case.rows is None:
        raise SystemExit(f"{case.name} has no reader: enter what its command prints in {out / case.name}.json")
    with tempfile.TemporaryDirectory(prefix="reconv-bench-") as folder:
        file = json_file or Path(folder) / "figures.json"
        if json_file is None:
            _run(case, data, file)
        rows = list(case.rows(json.loads(file.read_text(encoding="utf-8"))))
    if not rows:
        raise SystemExit(f"{case.name}: the command wrote no figures")
    command = case.command.replace(_JSON, "FILE").replace(_DATA, "DIR")
    return results.updated(results.describe(case.name, command, case.sources, rows), out).save(out)


def _run(case: Case, data: Path | None, file: Path) -> None:
    if _DATA in case.command and data is None:
        raise SystemExit(f"{case.name} needs --data DIR: {case.data}")
    if case.hardware == "cuda" and not _has_cuda():
        raise SystemExit(f"{case.name} needs a CUDA GPU")
    words = [word.replace(_JSON, str(file)).replace(_DATA, str(data)) for word in shlex.split(case.command)]
    words = [sys.executable, *words[1:]] if words[0] == "python" else [sys.executable, "-m", *words]
    subprocess.run(words, check=True, cwd=results.ROOT, env={**os.environ, "RECONV_COMMIT": results.commit()})


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _list() -> int:
    stored = set(pages.stored_cases())
    for case in CASES.values():
        measured = "never"
        if case.name in stored:
            result = results.load(case.name)
            changed = results.changed_sources(result)
            measured = result.date + (f", changed since: {', '.join(changed)}" if changed else "")
        needs = f"; --data: {case.data}" if case.data else ""
        print(f"{case.name:24} {case.hardware:5} {measured}{needs}")
    return 0


def _pages(check: bool) -> int:
    if not check:
        for path in pages.write_pages():
            print(path.relative_to(results.ROOT))
        return 0
    differing = [
        path for path, text in pages.generated() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in differing:
        print(f"{path.relative_to(results.ROOT)} differs from the stored figures: run `python -m benchmarks pages`")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
