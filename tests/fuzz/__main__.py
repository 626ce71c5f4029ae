"""Fuzz the parsers: `python tests/fuzz` mutates the corpus of every target and prints a table.

python tests/fuzz --seconds 60 --targets tar,csv --seed 2
python tests/fuzz --repeat tar FILE    # one input again, with its traceback
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("DATA_DIR", None)
sys.path[1:1] = [str(HERE.parent / "support"), str(HERE.parents[1])]

from fuzz_runner import Result, corpus, fuzz, run_one  # noqa: E402
from fuzz_targets import TARGETS  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="in all (60)")
    parser.add_argument("--targets", default="", help="names or parts of names, separated by commas")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--failures", type=Path, default=Path(tempfile.gettempdir()) / "reconv-fuzz")
    parser.add_argument("--repeat", nargs=2, metavar=("TARGET", "FILE"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reconv-fuzz-") as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch
        if arguments.repeat:
            name, file = arguments.repeat
            print(f"returned {run_one(TARGETS[name], Path(scratch) / name, Path(file).read_bytes())!r:.200}")
            return 0
        names = [name for name in TARGETS if any(part in name for part in arguments.targets.split(","))]
        if not names:
            parser.error(f"no target has such a name; targets: {', '.join(TARGETS)}")
        return _run(names, arguments, Path(scratch))


def _run(names: list[str], arguments: argparse.Namespace, scratch: Path) -> int:
    print(f"{'target':<20} {'executions':>10} {'per s':>7} {'failures':>8}", flush=True)
    saved: list[str] = []
    for name in names:
        share_s = arguments.seconds / len(names)
        result = fuzz(TARGETS[name], scratch / name, corpus(name), seconds=share_s, seed=arguments.seed)
        speed = result.executions / result.seconds
        print(f"{name:<20} {result.executions:>10,} {speed:>7,.0f} {result.num_failures:>8}", flush=True)
        saved += _save(name, result, arguments.failures)
    print("\n".join(saved) if saved else "no failures")
    return 1 if saved else 0


def _save(name: str, result: Result, folder: Path) -> list[str]:
    """Write the inputs that failed; returns what to read and type about each."""
    lines = []
    for failure in result.failures:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{name}-{hashlib.sha256(failure.data).hexdigest()[:8]}"
        file.write_bytes(failure.data)
        file.with_suffix(".txt").write_text(failure.problem, errors="backslashreplace")
        lines += [f"\n{name}: {failure.problem.splitlines()[0]!r}"]
        lines += [f"  {sys.executable} {HERE} --repeat {name} {file}"]
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
