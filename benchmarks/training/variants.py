"""Train a recipe with several sets of overrides, one after the other in one process, and compare what each reached.

    python -m benchmarks.training.variants VARIANTS.yaml --data DATA --out RUNS --json FILE [--images 100000]
                                           [--seeds 3]

VARIANTS has the recipe, the metric, the fields that all runs share, and the fields of each variant:

    recipe: ssd-resnet34-voc
    metric: voc10
    common: {schedule.name: cosine, schedule.milestones: []}
    variants:
      plain: {}
      fast: {schedule.lr: 0.05}

Each is an ordinary run in RUNS/NAME that sees --images images in batches of its own size. With --seeds N every variant
is trained with seeds 0 to N - 1 in RUNS/NAME-SEED, seed by seed, and the table has mean and standard deviation. A
variant that is rejected is reported, and the next one starts. No run starts that would end after --limit-s if it took
as long as the longest.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from benchmarks import as_overrides
from reconv import train
from reconv.core.errors import ReconvError
from reconv.logging.events import EvalFinished, Event
from reconv.recipe.loader import Override, load


@dataclass
class Result:
    """The result of one run."""

    name: str
    metric: str
    images: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    curve: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # images seen, metrics
    images_per_s: float = math.nan  # of training only
    wall_s: float = 0.0
    note: str = ""
    seed: int | None = None  # None: the recipe's

    def add_point(self, images: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of an evaluation."""
        self.images, self.metrics = images, dict(metrics)
        self.curve.append((images, self.metrics))
        print(f"{self.name}: {images:,} images, {self.metric} {self.last:.4f}", flush=True)

    @property
    def last(self) -> float:
        return self.metrics.get(self.metric, math.nan)

    @property
    def best(self) -> float:
        return max((metrics[self.metric] for _, metrics in self.curve), default=math.nan)


def train_run(
    result: Result, recipe: str, *, data: str, out: Path, overrides: Sequence[Override], device: str = "auto"
) -> Result:
    """Train, and add the metrics of every evaluation to the result."""
    batch = load(recipe, overrides).recipe.batch.size

    def on_event(event: Event) -> None:
        if isinstance(event, EvalFinished):
            result.add_point(event.step * batch, event.metrics)

    began_s = time.perf_counter()
    finished = train(recipe, data=data, out=out, overrides=overrides, device=device, on_event=on_event)
    result.wall_s = time.perf_counter() - began_s
    result.images_per_s = finished.summary["images_per_s"] or math.nan
    waited = finished.summary["data_wait_fraction"]
    result.note = f"waited for data {waited:.0%} of the time" if waited else ""
    return result


def for_images(recipe: str, overrides: Sequence[Override], images: int, points: int) -> list[Override]:
    """The overrides with the length in which a run sees so many images, evaluated at evenly spaced points."""
    steps = max(1, round(images / load(recipe, overrides).recipe.batch.size))
    fields = {"length": f"{steps}step", "evaluate.every": f"{max(1, -(-steps // points))}step"}
    return [*overrides, *((name, value, "--images") for name, value in fields.items())]


def parse_set(texts: Sequence[str]) -> list[Override]:
    """`FIELD=VALUE` of --set as overrides."""
    return [(text.partition("=")[0], text.partition("=")[2], "--set") for text in texts]


def write_json(path: Path, value: Any) -> None:
    """Write as JSON, NaN as null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    valid = json.loads(json.dumps(value), parse_constant=lambda _: None)
    path.write_text(json.dumps(valid, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    given = _arguments()
    plan = yaml.safe_load(given.variants.read_text(encoding="utf-8"))
    names = given.only.split(",") if given.only else list(plan["variants"])
    seeds: list[int | None] = [None] if given.seeds == 0 else list(range(given.seeds))
    began_s, results = time.perf_counter(), list[Result]()
    for seed, name in product(seeds, names):
        longest_s = max((result.wall_s for result in results), default=0.0)
        is_late = time.perf_counter() - began_s + longest_s > given.limit_s
        late = Result(name, plan["metric"], note="not started: no time left", seed=seed)
        results.append(late if is_late else _run_variant(name, seed, plan, given))
        write_json(given.json, [asdict(result) for result in results])
    print_table(results)
    if given.seeds > 1:
        print_spread(results, names)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", type=Path, help="a YAML file")
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True, type=Path, help="a folder for the runs")
    parser.add_argument("--json", required=True, type=Path, help="where the figures go")
    parser.add_argument("--images", type=int, default=100_000, help="seen by each run")
    parser.add_argument("--points", type=int, default=4, help="evaluations of each run")
    parser.add_argument("--seeds", type=int, default=0, help="number of seeds; 0: the recipe's own")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="seconds for all runs")
    parser.add_argument("--only", default="", metavar="NAME,NAME")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="overrides for all runs")
    return parser.parse_args()


def _run_variant(name: str, seed: int | None, plan: Mapping[str, Any], given: argparse.Namespace) -> Result:
    """One run, or why it was rejected."""
    own = {**plan["common"], **(plan["variants"][name] or {}), **({} if seed is None else {"seed": seed})}
    overrides = [*as_overrides(own, str(given.variants)), *parse_set(given.set)]
    out = given.out / (name if seed is None else f"{name}-{seed}")
    result, recipe = Result(name, plan["metric"], seed=seed), plan["recipe"]
    try:
        overrides = for_images(recipe, overrides, given.images, given.points)
        return train_run(result, recipe, data=given.data, out=out, overrides=overrides, device=given.device)
    except ReconvError as error:
        result.note = f"failed: {error}"
        print(f"{name}: {result.note}", flush=True)
        return result


def print_table(results: Sequence[Result]) -> None:
    """One result per line."""
    width = max(len(result.name) for result in results)
    print(f"\n{'':{width}}{results[0].metric:>8}{'best':>8}{'images':>9}{'images/s':>10}{'wall s':>8}")
    for result in results:
        print(
            f"{result.name:{width}}{result.last:8.4f}{result.best:8.4f}{result.images:9,}{result.images_per_s:10.0f}"
            f"{result.wall_s:8.1f}  {result.note}"
        )


def print_spread(results: Sequence[Result], names: Sequence[str]) -> None:
    """Mean and standard deviation over the seeds of each variant."""
    width = max(map(len, names))
    print(f"\n{'':{width}}{'n':>4}{'mean':>9}{'sd':>8}")
    for name in names:
        values = [result.last for result in results if result.name == name and math.isfinite(result.last)]
        mean = statistics.fmean(values) if values else math.nan
        deviation = statistics.stdev(values) if len(values) > 1 else math.nan
        print(f"{name:{width}}{len(values):4}{mean:9.4f}{deviation:8.4f}")


if __name__ == "__main__":
    main()
