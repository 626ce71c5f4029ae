"""The fault matrix: `python tests/faults/matrix` runs every case, prints a table and can write it to a file.

python tests/faults/matrix --classes "kill,failing" --sample 200
python tests/faults/matrix --case '{"class": "failing system calls", "case": {...}}'    # one case again
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preload import compile_layer

HERE = Path(__file__).resolve().parent


@dataclass(slots=True)
class Tally:
    """What became of the cases of a class."""

    tried: int = 0
    survived: int = 0
    slowest_s: float = 0.0
    total_s: float = 0.0
    failures: list[tuple[Any, str]] = field(default_factory=list)


class Worker:
    """A process that runs cases."""

    def __init__(self, folder: Path, library: Path) -> None:
        environment = {
            **os.environ,
            "LD_PRELOAD": str(library),
            "FAULTS_FOLDER": str(folder),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")]),
        }
        for name in ("DATA_DIR", "RANK", "WORLD_SIZE"):
            environment.pop(name, None)
        self._process = subprocess.Popen(
            [sys.executable, str(HERE), "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._receive()

    def ask(self, **request: Any) -> Any:
        """The answer to a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a worker has died")
        return json.loads(line)

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def run_class(name: str, cases: Sequence[Any], workers: Sequence[Worker], tally: Tally) -> None:
    """Run cases on all workers."""
    left, lock = list(reversed(cases)), threading.Lock()

    def work(worker: Worker) -> None:
        while True:
            with lock:
                if not left:
                    return
                case = left.pop()
            outcome = worker.ask(**{"class": name, "case": case})
            with lock:
                tally.tried += 1
                tally.survived += not outcome["problem"]
                tally.slowest_s = max(tally.slowest_s, outcome["seconds"])
                tally.total_s += outcome["seconds"]
                if tally.tried % 100 == 0:
                    print(f"{name}: {tally.tried} tried, {tally.survived} survived", file=sys.stderr, flush=True)
                if outcome["problem"]:
                    tally.failures.append((case, outcome["problem"]))
                    request = json.dumps({"class": name, "case": case})
                    print(f"NOT SURVIVED {request}\n    {outcome['problem']}", file=sys.stderr, flush=True)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_soak(minutes: float, workers: Sequence[Worker], tally: Tally) -> None:
    """Run trainings with random faults until the time is up."""
    end_s, seed = time.monotonic() + 60 * minutes, 0
    while time.monotonic() < end_s:
        run_class("soak", [{"seed": seed + number} for number in range(4 * len(workers))], workers, tally)
        seed += 4 * len(workers)


def sampled(cases: Sequence[Any], count: int | None, seed: int) -> Sequence[Any]:
    """At most so many cases, spread evenly."""
    if count is None or len(cases) <= count:
        return cases
    stride = len(cases) / count
    return [cases[int(stride * number + seed) % len(cases)] for number in range(count)]


def table(tallies: dict[str, Tally]) -> str:
    """The table as Markdown."""
    lines = ["| class | tried | survived | slowest | mean |", "|---|---:|---:|---:|---:|"]
    for name, tally in tallies.items():
        mean_s = tally.total_s / max(1, tally.tried)
        lines.append(f"| {name} | {tally.tried:,} | {tally.survived:,} | {tally.slowest_s:.1f} s | {mean_s:.2f} s |")
    tried, survived = sum(t.tried for t in tallies.values()), sum(t.survived for t in tallies.values())
    slowest_s = max((t.slowest_s for t in tallies.values()), default=0.0)
    return "\n".join([*lines, f"| **all** | **{tried:,}** | **{survived:,}** | {slowest_s:.1f} s | |"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", default="", help="parts of the names of classes, separated by commas")
    parser.add_argument("--sample", type=int, help="at most so many cases per class")
    parser.add_argument("--whole", action="store_true", help="all cases, also of classes that are sampled by default")
    parser.add_argument("--seed", type=int, default=0, help="which cases are in the sample")
    parser.add_argument("--part", default="1/1", help="a part of the cases of each class: 3/20 is the third of twenty")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--soak-minutes", type=float, default=0.0, help="random faults one after the other for so long")
    parser.add_argument("--case", help="one case, as it was printed")
    parser.add_argument("--markdown", type=Path, help="write the table here, with date and duration")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        from worker import serve

        serve()
        return 0
    start_s = time.monotonic()
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # its fsync takes no time
    with tempfile.TemporaryDirectory(prefix="reconv-faults-", dir=base, ignore_cleanup_errors=True) as folder:
        library = compile_layer(Path(folder))
        workers = [Worker(Path(folder), library) for _ in range(1 if options.case else options.workers)]
        try:
            if options.case:
                outcome = workers[0].ask(**json.loads(options.case))
                print(outcome["problem"] or "survived")
                return int(bool(outcome["problem"]))
            tallies = run_all(options, workers)
        finally:
            for worker in workers:
                worker.close()
    wall_s = time.monotonic() - start_s
    text = table(tallies)
    print(text)
    print(f"{wall_s / 60:.1f} minutes, {len(workers)} processes")
    if options.markdown:
        write_page(options.markdown, text, wall_s, len(workers))
    return int(any(tally.failures for tally in tallies.values()))


def run_all(options: argparse.Namespace, workers: Sequence[Worker]) -> dict[str, Tally]:
    wanted = [part.strip() for part in options.classes.split(",") if part.strip()]
    part, num_parts = map(int, options.part.split("/"))
    tallies: dict[str, Tally] = {}
    for name in workers[0].ask(do="names"):
        if wanted and not any(part in name for part in wanted):
            continue
        if name == "soak":
            if options.soak_minutes:
                tallies[name] = Tally()
                run_soak(options.soak_minutes, workers, tallies[name])
            continue
        listed = workers[0].ask(**{"class": name, "sample": options.sample})
        limit = None if options.whole else listed["limit"]
        cases = sampled(listed["cases"], options.sample or limit, options.seed)
        tallies[name] = Tally()
        run_class(name, cases[part - 1 :: num_parts], workers, tallies[name])
        tally = tallies[name]
        print(f"{name}: {tally.survived} of {tally.tried}", file=sys.stderr, flush=True)
    return tallies


def write_page(path: Path, text: str, wall_s: float, num_workers: int) -> None:
    """Put the table between the marks of a page."""
    begin, end = "<!-- table -->", "<!-- end of table -->"
    page = path.read_text()
    before, rest = page.split(begin)
    after = rest.split(end)[1]
    date = time.strftime("%Y-%m-%d")
    note = f"{date}, {num_workers} CPU cores, {wall_s / 60:.0f} minutes."
    path.write_text(f"{before}{begin}\n{note}\n\n{text}\n{end}{after}")


if __name__ == "__main__":
    sys.exit(main())
