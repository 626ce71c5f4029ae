"""Times two exported models in turn: python speed_script.py FP32_FOLDER INT8_FOLDER BATCH_SIZES ROUNDS IMAGE...

It is run as a script in a fresh process, which has numpy and the runtime of the models, but not Reconv.
"""

from __future__ import annotations

import json
import runpy
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

_NUM_WARM_UP = 2
_MIN_ROUND_S = 0.02  # a faster model is called several times a round


def load(folder: Path) -> tuple[Any, Any, Any]:
    """A model, its settings and its preprocessing, by the run.py of its folder."""
    script = runpy.run_path(str(folder / "run.py"))
    settings = script["read_settings"](folder)
    return script["load_model"](folder, settings), settings, script["preprocess"]


def time_calls(model: Any, batch: Any, num_calls: int) -> float:
    """Seconds per call."""
    start = time.perf_counter()
    for _ in range(num_calls):
        model(batch)
    return (time.perf_counter() - start) / num_calls


def measure(models: list[Any], batch: Any, num_rounds: int) -> dict[str, Any]:
    """The median times of both models over alternating rounds, and quantiles of the ratio of each round."""
    fastest_s = min(time_calls(model, batch, 1) for _ in range(_NUM_WARM_UP) for model in models)
    num_calls = max(1, round(_MIN_ROUND_S / fastest_s))
    rounds = [[time_calls(model, batch, num_calls) for model in models] for _ in range(num_rounds)]
    fp32, int8 = zip(*rounds, strict=True)
    ratios = sorted(a / b for a, b in zip(fp32, int8, strict=True))
    return {
        "batch": len(batch),
        "rounds": num_rounds,
        "fp32_ms": 1000 * statistics.median(fp32),
        "int8_ms": 1000 * statistics.median(int8),
        "times_fp32": statistics.median(fp32) / statistics.median(int8),
        "times_fp32_10_90_percent": [ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]],
    }


def main() -> None:
    folders, batch_sizes, num_rounds, files = sys.argv[1:3], json.loads(sys.argv[3]), int(sys.argv[4]), sys.argv[5:]
    loaded = [load(Path(folder)) for folder in folders]
    _, settings, preprocess = loaded[0]
    images = np.stack([preprocess(Path(file).read_bytes(), settings) for file in files])
    batches = [np.resize(images, (size, *images.shape[1:])) for size in batch_sizes]
    print(json.dumps([measure([model for model, _, _ in loaded], batch, num_rounds) for batch in batches]))


if __name__ == "__main__":
    main()
