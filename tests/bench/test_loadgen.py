"""`bench infer --loadgen`: what is answered to LoadGen, and what is read from its files.

tests/external/test_mlperf_loadgen.py runs the real one.
"""

from __future__ import annotations

import array
import ctypes
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from reconv.bench.loadgen import Samples, System, read_accuracy, read_summary
from reconv.cli import main
from reconv.core.errors import ReconvError
from reconv.inference.predictions import ClassScore, Prediction

SUMMARY = """================================================
MLPerf Results Summary
================================================
SUT name : PySUT
Scenario : Server
Mode     : PerformanceOnly
Completed samples per second    : 49.50

Result is : {result}
  Performance constraints satisfied : Yes
Recommendations:
 * Reduce target QPS to improve latency.
TTFT Early Stopping Result:

================================================
Additional Stats
================================================
Scheduled samples per second : 50.42

50.00 percentile latency (ns)   : 15500000
99.00 percentile latency (ns)   : 20600000
99.90 percentile latency (ns)   : 31000000
"""


@dataclass(frozen=True)
class Sample:
    id: int
    index: int


class StandInLoadGen:
    """Receives responses as LoadGen does: it copies the bytes at an address when they are completed."""

    def __init__(self) -> None:
        self.responses: dict[int, int] = {}
        self.all_there = threading.Event()
        self.expected = 0

    def QuerySampleResponse(self, number: int, address: int, size: int) -> tuple[int, int, int]:
        return number, address, size

    def QuerySamplesComplete(self, responses: Sequence[tuple[int, int, int]]) -> None:
        for number, address, size in responses:
            assert number not in self.responses, "a sample is completed once"
            self.responses[number] = array.array("i", ctypes.string_at(address, size))[0]
        if len(self.responses) == self.expected:
            self.all_there.set()


class BrightestRow:
    """Stands in for a predictor of 8 classes: the class is the number in an image's first pixel."""

    def __init__(self, broken: bool = False) -> None:
        self.sizes: list[int] = []
        self.warmed: Sequence[int] = ()
        self.broken = broken

    def warm_up(self, sizes: Sequence[int]) -> None:
        self.warmed = sizes

    def predict_pixels(self, pixels: torch.Tensor, *, top: int, batch_size: int) -> Any:
        if self.broken:
            raise ReconvError("the GPU is lost")
        self.sizes.append(len(pixels))
        return [_prediction(int(image[0, 0, 0])) for image in pixels]


def _prediction(index: int) -> Prediction:
    return Prediction(None, classes=(ClassScore(str(index), 1.0, index),))


def pixels(count: int) -> Samples:
    images = torch.zeros(count, 1, 2, 2, dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.arange(count) % 8
    return Samples(images, None, "test")


def asked(system: System, loadgen: StandInLoadGen, queries: Sequence[Sequence[Sample]]) -> None:
    loadgen.expected = sum(map(len, queries))
    with system:
        for query in queries:
            system.issue(query)
        assert loadgen.all_there.wait(10)


def test_every_sample_is_answered_once_with_its_class_in_batches_that_were_warmed_up() -> None:
    loadgen, predictor = StandInLoadGen(), BrightestRow()
    system = System(loadgen, predictor, pixels(20), max_batch=6)  # type: ignore[arg-type]
    queries = [[Sample(100 + n, n % 20) for n in range(45)], [Sample(7, 3)], [Sample(8, 4), Sample(9, 5)]]
    asked(system, loadgen, queries)
    assert loadgen.responses == {sample.id: sample.index % 8 for query in queries for sample in query}
    assert predictor.warmed == [1, 2, 4, 6]
    assert set(predictor.sizes) <= {1, 2, 4, 6} and predictor.sizes[0] == 6


def test_after_an_error_loadgen_does_not_wait_for_ever() -> None:
    loadgen = StandInLoadGen()
    system = System(loadgen, BrightestRow(broken=True), pixels(4), max_batch=4)  # type: ignore[arg-type]
    asked(system, loadgen, [[Sample(n, n) for n in range(4)], [Sample(9, 1)]])
    assert set(loadgen.responses.values()) == {-1}
    assert str(system.error) == "the GPU is lost"


@pytest.mark.parametrize(("result", "valid"), [("VALID", True), ("INVALID", False)])
def test_the_summary_is_read(tmp_path: Path, result: str, valid: bool) -> None:
    file = tmp_path / "mlperf_log_summary.txt"
    file.write_text(SUMMARY.format(result=result))
    found = read_summary(file)
    assert found["valid"] is valid
    assert found["images_per_s"] == 49.5
    assert found["latency_ms"] == {"p50": 15.5, "p99": 20.6, "p99.9": 31.0}
    assert found["recommendations"] == ([] if valid else ["Reduce target QPS to improve latency."])


def test_a_summary_without_a_result_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "mlperf_log_summary.txt"
    file.write_text("")
    with pytest.raises(ReconvError, match="no result"):
        read_summary(file)


def test_accuracy_is_read_from_the_log_and_needs_every_response(tmp_path: Path) -> None:
    file = tmp_path / "mlperf_log_accuracy.json"
    entries = [
        {"seq_id": n, "qsl_idx": n, "data": array.array("i", [value]).tobytes().hex()}
        for n, value in enumerate([5, 1, 2, 300])
    ]
    file.write_text(json.dumps(entries))
    assert read_accuracy(file, (5, 1, 3, 300)) == 0.75
    with pytest.raises(ReconvError, match="4 responses of 5"):
        read_accuracy(file, (5, 1, 3, 300, 0))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--loadgen", "single", "--batches", "1"], "--batches cannot be used here"),
        (["--target-qps", "5"], "--target-qps cannot be used here"),
        (["--out", "logs"], "--out cannot be used here"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "infer", "quickstart", *words])
    assert end.value.code == 2 and message in capsys.readouterr().err
