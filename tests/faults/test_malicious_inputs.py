"""Commands given malicious files end with a documented code, in bounded time and memory, and run no code of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from malicious_inputs import CASES
from malicious_runner import MaliciousRunner, Outcome

import reconv

# One case of each kind of attack that once hung, exhausted the memory or ended with exit code 1.
FAST = (
    "class-names-train/deep",
    "coco-json/deep",
    "coco-json/fifo",
    "coco-json/sparse",
    "coco-val-json/digits",
    "coco/category-name-long",
    "coco/category-name-surrogate",
    "coco/file-nul",
    "coco/file-surrogate",
    "coco/categories-deep",
    "coco/two-gigabyte-hole",
    "voc/billion-laughs",
    "voc/external",
    "voc/encoding",
    "voc/nan-box",
    "voc-stem/nul",
    "voc-stem/long",
    "yolo/alias-bomb",
    "yolo/deep",
    "yolo/gap",
    "yolo/timestamp-bad",
    "yolo-label/digits",
    "yolo-label/fifo",
    "csv-train/digits-label",
    "csv-train/long-header",
    "csv/nul-file",
    "csv/sparse",
    "tar-content/longname-chain",
    "tar-content/shard-number",
    "tfrecord-content/no-example",
    "tfrecord-content/length-max",
    "box-tfrecord-content/id-digits",
    "label-map-content/digits",
    "packed/loop",
    "packed-content/meta-deep",
    "packed-content/shard-count",
    "packed-content/shape",
    "shard-index/list",
    "shard-index/far-offset",
    "shard-index/huge-label",
    "cifar-pickle/labels-digits",
    "cifar-pickle/os-system",
    "imagenet-list/digits",
    "imagenet-devkit/sparse",
    "folder/class-is-proc",
    "folder/data-is-proc",
    "image-check/png-50000",
    "image-check/tiff-loop",
)
RUNS = (
    "predict/root",
    "predict/folder-of-special-files",
    "predict/not-utf8-json",
    "eval-manifest.json/fifo",
    "eval-recipe.yaml/fifo",
    "weights-file/fifo",
    "weights/deep",
    "manifest/size-inf",
    "manifest/name-nul",
    "report-events.jsonl/fifo",
    "report-classification.json/deep",
    "report-evaluations.csv/not-utf8",
    "report-run-json/classification-text",
    "report-recipe/alias-bomb",
    "resume-lock/zeros",
    "resume-run-json/summary-steps-text",
    "recipe/hex-digits",
    "recipe/many-keys",
    "command/long-eval",
    "command/set-long-field",
    "command/devices-huge",
    "command/resume-devices-huge",
    "command/bench-devices-huge",
    "command/init-open-bracket",
    "command/init-bad-host",
    "command/data-bad-host",
    "command/token-zero",
    "command/token-pipe",
    "command/migrate-doubling",
    "command/migrate-deep",
    "command/migrate-merge-keys",
    "events/devices-huge",
    "events/gap_px-1",
    "data-get/part-link",
    "data-get/part-pipe",
)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    settings = {"length": "2step", "schedule.warmup": "1step", "save.every": "1step", "evaluate.every": "1step"}
    overrides = [(name, value, "test") for name, value in {**settings, "data.num_workers": 0}.items()]
    out = tmp_path_factory.mktemp("runs") / "run"
    reconv.train("quickstart", out=out, overrides=overrides, device="cpu")
    return out


@pytest.fixture(scope="module")
def runner() -> Iterator[MaliciousRunner]:
    with MaliciousRunner() as started:
        yield started


def _outcome(name: str, tmp_path: Path, finished_run: Path, runner: MaliciousRunner) -> Outcome:
    folder = tmp_path / "case"
    folder.mkdir()
    return runner.run(name, folder, finished_run)


@pytest.mark.parametrize("name", (*FAST, *RUNS))
def test_a_malicious_input_is_refused_or_survived(
    name: str, tmp_path: Path, finished_run: Path, runner: MaliciousRunner
) -> None:
    assert _outcome(name, tmp_path, finished_run, runner).problem == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(CASES) - {*FAST, *RUNS}))
def test_every_malicious_input_is_refused_or_survived(
    name: str, tmp_path: Path, finished_run: Path, runner: MaliciousRunner
) -> None:
    assert _outcome(name, tmp_path, finished_run, runner).problem == ""


def test_there_are_many_cases() -> None:
    assert len(CASES) > 1400
