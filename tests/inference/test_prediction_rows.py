"""One row for each evaluated image agrees with the metrics, and is linked from the report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import reconv
from reconv.cli import main
from reconv.core.errors import DataError, UsageError
from reconv.inference.prediction_rows import read_rows


def photos(root: Path) -> Path:
    random = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 4)):
        for name, value in (("dark", 40), ("light", 200), ("né\u202e", 120)):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = np.clip(random.normal(value, 20, (20, 20, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"a, {i}.png")
    return root


@pytest.fixture
def run(tmp_path: Path) -> Path:
    settings = {"data.source": "auto", "batch.size": 12, "length": "2ep", "schedule.warmup": "1step"}
    return reconv.train("quickstart", data=photos(tmp_path / "data"), out=tmp_path / "run", overrides=settings).folder


def test_rows_agree_with_the_metrics_and_the_report_links_them(run: Path, tmp_path: Path) -> None:
    for split, count in (("train", 36), ("val", 12)):
        file = run / f"predictions-{split}.csv"
        (result,) = reconv.evaluate(run, split=split, predictions=file)
        rows = read_rows(file)
        assert len(rows) == result.num_samples == count and set(rows.split) == {split}
        assert all(Path(path).is_file() for path in rows.path)
        assert [Path(path).parent.name for path in rows.path] == list(rows.target)
        correct = [target == predicted for target, predicted in zip(rows.target, rows.predicted, strict=True)]
        assert np.mean(correct) == result.metrics["top1"]
        assert np.mean(rows.loss) == pytest.approx(result.metrics["loss"], rel=1e-4)
        assert all(0 < score <= 1 for score in rows.score)
    report = (run / "report.html").read_text()
    assert 'href="predictions-train.csv"' in report and 'href="predictions-val.csv"' in report


def test_files_that_cannot_be_written_are_refused_before_the_evaluation(run: Path, tmp_path: Path) -> None:
    for file, message in (("rows.txt", "neither"), (str(tmp_path / "no" / "rows.csv"), "there is no folder")):
        with pytest.raises(UsageError, match=message):
            reconv.evaluate("no such run", predictions=file)
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(run), "--all", "--predictions", "rows.csv"])
    assert ended.value.code == 2
    (tmp_path / "rows.csv").write_text("path,target\na,b\n")
    with pytest.raises(DataError, match="loss"):
        read_rows(tmp_path / "rows.csv")
