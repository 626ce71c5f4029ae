"""Prediction sees colours, sizes and brightness as training saw them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

import reconv

# Three kinds that only the order of the channels and the mean of each tell apart.
KINDS = {"red": (180, 60, 20), "green": (20, 180, 60), "blue": (60, 20, 180)}
FIELDS = {
    "data.source": "folder",
    "data.preprocess.channels": "3",
    "data.preprocess.size": "16",
    "data.preprocess.resize": "20",
    "data.preprocess.mean": "[0.6, 0.3, 0.1]",
    "data.preprocess.std": "[0.2, 0.3, 0.4]",
    "batch.size": "12",
    "length": "8ep",
    "ema.decay": "0",
}


def make_tree(root: Path) -> None:
    draw = np.random.default_rng(0)
    for split, num in (("train", 12), ("val", 6)):
        for kind, colour in KINDS.items():
            folder = root / split / kind
            folder.mkdir(parents=True)
            for number in range(num):
                pixels = np.array(colour) + draw.integers(-20, 21, (24, 30, 3))
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.png")


def test_a_picture_of_the_validation_set_gets_the_answer_that_evaluation_gave(tmp_path: Path) -> None:
    make_tree(tmp_path / "data")
    given = [(name, value, "--set") for name, value in FIELDS.items()]
    given.append(("data.path", str(tmp_path / "data"), "--data"))
    run = reconv.train("quickstart", out=tmp_path / "run", overrides=given).folder
    [score] = reconv.evaluate(run)
    assert score.metrics["top1"] == 1
    answers = reconv.predict(run, [tmp_path / "data" / "val"], top=3)
    assert len(answers) == score.num_samples == 18
    assert all(answer.labels[0][0] == answer.path.parent.name for answer in answers)
    losses = [-np.log(dict(answer.labels)[answer.path.parent.name]) for answer in answers]
    assert abs(float(np.mean(losses)) - score.metrics["loss"]) < 1e-5
