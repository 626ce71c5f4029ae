"""A detector that trains in seconds on synthetic boxes."""

from __future__ import annotations

from pathlib import Path

RECIPE = """\
name: tiny-detector
task: detection
length: 4step
model:
  name: ssd_resnet34
  options: {depths: [1, 1, 1], width: 8, extra_widths: [16, 16]}
data:
  source: synthetic
  num_samples: 40
  num_classes: 3
  num_workers: 0
  preprocess: {size: 64, resize: null}
augment: {crop: none}
batch: {size: 4}
schedule: {lr: 0.01}
detection:
  metric: voc10
  anchors: {scales: [0.2, 0.4, 0.6, 0.8], aspect_ratios: [[2], [2], [2]]}
evaluate: {batch_size: 3}
engine: {num_threads: 1}
"""


def write_recipe(folder: Path, **replaced: str) -> Path:
    """Write the recipe; `metric="ap"` replaces its line `metric: ...`."""
    text = RECIPE
    for name, value in replaced.items():
        line = next(line for line in RECIPE.splitlines() if line.strip().startswith(f"{name}:"))
        text = text.replace(line, line[: line.index(":")] + f": {value}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny-detector.yaml"
    path.write_text(text)
    return path
