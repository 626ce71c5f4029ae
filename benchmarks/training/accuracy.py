"""Train recipes over several seeds as fresh processes; print and store the final metric and the time of each.

python -m benchmarks.training.accuracy RECIPE[+FIELD=VALUE...] ... [--seeds 3] [--data DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.training.time_to_result import time_process
from reconv.logging.run_dir import read_summary
from reconv.recipe.loader import load

FRACTIONS = ("top1", "top5", "map", "ap", "ap50", "voc07", "voc10")


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="with overrides: NAME+schedule.lr=0.1")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--data")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--option", action="append", default=[], metavar="OPTION", help="passed to `reconv train`")
    options = parser.parse_args(args)
    measured = []
    for recipe in options.recipes:
        seeds = range(options.first_seed, options.first_seed + options.seeds)
        measured.append(train_seeds(recipe, seeds, options.data, options.option))
        print(describe(measured[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(measured, indent=1) + "\n")


def train_seeds(recipe: str, seeds: Sequence[int], data: str | None, extra: Sequence[str] = ()) -> dict[str, Any]:
    """The final metric and the wall clock of a whole process for each seed."""
    name, *fields = recipe.split("+")
    command = [name, *(word for field in fields for word in ("--set", field)), *extra, "--quiet"]
    command += ["--data", data] if data else []
    values, wall_s, metric = [], [], ""
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            wall_s.append(time_process([*command, "--seed", str(seed)], Path(folder) / "run").wall_s)
            summary = read_summary(Path(folder) / "run")
        metric = summary["metric"]
        values.append(summary["value"] * (100 if metric in FRACTIONS else 1))
    expected = load(name).recipe.expect
    return {
        "name": recipe,
        "metric_name": metric,
        "is_fraction": metric in FRACTIONS,
        "metric": values,
        "deviation": statistics.stdev(values) if len(values) > 1 else 0.0,
        "wall_s": wall_s,
        "expected": None if expected is None else expected.value,
    }


def describe(measured: dict[str, Any]) -> str:
    """One line: the mean with its deviation, the range, n and the time."""
    values, wall_s = measured["metric"], measured["wall_s"]
    return (
        f"{measured['name']}: {measured['metric_name']} {statistics.fmean(values):.2f} "
        f"(sd {measured['deviation']:.2f}, {min(values):.2f} to {max(values):.2f}, n = {len(values)}), "
        f"{statistics.median(wall_s):.1f} s ({min(wall_s):.1f} to {max(wall_s):.1f})"
    )


if __name__ == "__main__":
    main()
