"""Successive halving beside random search, at the same number of epochs; print and store what each finds.

python -m benchmarks.training.tune_search [RECIPE] [--data DIR] [--epochs 9] [--space A.B=LOW:HIGH ...] [--trials 18]
    [--random 5] [--seeds 3] [--confirm 3] [--out DIR] [--json FILE]

For each seed of the search, the best trial of each is trained with fresh seeds, beside the recipe as it is. A study
that is in --out is continued, so that the command may be killed and started again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import reconv

SPACE = ("schedule.lr=1e-3:10:log", "optimizer.weight_decay=1e-6:1e-1:log", "optimizer.momentum=0.1:0.99")


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="quickstart")
    parser.add_argument("--data")
    parser.add_argument("--epochs", type=float, default=9)
    parser.add_argument("--space", action="append", metavar="A.B=LOW:HIGH")
    parser.add_argument("--trials", type=int, default=18)
    parser.add_argument("--random", type=int, default=5, help="trials of random search, each trained to its end")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--confirm", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder)
        found = [measure(options, out, seed, search) for seed in range(options.seeds) for search in ("tpe", "random")]
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def measure(options: argparse.Namespace, out: Path, seed: int, search: str) -> dict[str, Any]:
    """One study: what it found, with fresh seeds, and what it cost."""
    start_s = time.monotonic()
    result = reconv.tune(
        options.recipe,
        data=options.data,
        space=options.space or SPACE,
        trials=options.trials if search == "tpe" else options.random,
        search=search,
        rungs=3 if search == "tpe" else 1,
        seed=seed,
        epochs=options.epochs,
        parallel=options.parallel,
        confirm=options.confirm,
        out=out / f"{search}-{seed}",
    )
    confirmed, trials = result.confirmation, result.trials
    values = {
        "search": search,
        "seed": seed,
        "recipe": options.recipe,
        "epochs_each": options.epochs,
        "num_trials": len(trials),
        "epochs": sum(result.costs),
        "metric": result.metric,
        "default": None if confirmed is None else statistics.fmean(confirmed.default),
        "best": None if confirmed is None else statistics.fmean(confirmed.best),
        "best_in_search": result.value_of(trials[result.best]),
        "is_better": result.kept != 0,
        "values": dict(trials[result.best].values),
        "wall_s": time.monotonic() - start_s,
    }
    print(f"{search}, seed {seed}: {sum(result.costs):g} epochs, {result.verdict}", flush=True)
    return values


if __name__ == "__main__":
    main()
