"""Time how long a loader takes to start in the middle of an epoch, from its construction to the first batch.

python -m benchmarks.data.epoch_seek [--samples 1281167] [--tries 5]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.train_loader import make_train_loader
from reconv.data.readers.synthetic import SyntheticDataset
from reconv.recipe.parts.batch import BatchConfig
from reconv.recipe.parts.data import AugmentConfig, DataConfig, PreprocessConfig
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.schema import Recipe

EPOCH = 45  # started in its middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_281_167)
    parser.add_argument("--tries", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for drop_last in (True, False):
        for epoch_samples in (None, options.samples // 3):
            times_s = [seek_s(options.samples, drop_last, epoch_samples, seed) for seed in range(options.tries)]
            epoch = "all samples" if epoch_samples is None else f"{epoch_samples:,} samples"
            print(
                f"drop_last {drop_last}, an epoch of {epoch}: {statistics.median(times_s):.3f} s "
                f"({min(times_s):.3f} to {max(times_s):.3f}, n = {len(times_s)})"
            )


def seek_s(num_samples: int, drop_last: bool, epoch_samples: int | None, seed: int) -> float:
    """Seconds to the first batch of a step in the middle of an epoch."""
    spec = PreprocessConfig(size=8, resize=None)
    data = DataConfig.model_validate(
        {"preprocess": spec, "drop_last": drop_last, "epoch_samples": epoch_samples, "num_workers": 0}
    )
    recipe = Recipe(seed=seed, data=data, augment=AugmentConfig(crop="none"), batch=BatchConfig(size=256))
    source = SyntheticDataset("train", num_samples, 1000, 8, 3)
    plan = make_plan(recipe, Facts(num_samples, 1, 1000))
    step = round((EPOCH + 0.5) * plan.steps_per_epoch)
    began_s = time.perf_counter()
    stream = make_train_loader(source, recipe, plan, DataContext.on_host()).steps(step, step + 1)
    [batch] = next(stream)
    taken_s = time.perf_counter() - began_s
    assert int(batch.positions[0]) == step * 256
    return taken_s


if __name__ == "__main__":
    main()
