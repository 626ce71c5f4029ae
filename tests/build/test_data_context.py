"""The data pipeline of a run: backends, transfer dtypes, CPU cores, and the data wait log."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

import reconv
import reconv.data.stage_timing as stages_module
from reconv.core.errors import ResourceError, UsageError
from reconv.data.stage_timing import StageTimes, record_stage, timed
from reconv.logging.clock import RunClock
from reconv.logging.console import ConsoleLines
from reconv.logging.event_log import read_events
from reconv.logging.events import DataWait, Event
from reconv.logging.phases import PhaseTimer
from reconv.logging.run_logger import RunLogger
from reconv.recipe.loader import load
from reconv.recipe.parts.data import DataConfig, Decoder
from reconv.recipe.plan import Facts, Plan, make_plan
from reconv.recipe.schema import Recipe
from reconv.recipe.workers import check_worker_memory
from reconv.trainer.callbacks.data_wait import DataWaitLogger, data_wait_advice, slowest_stage
from reconv.trainer.dry_run import dry_run
from reconv.trainer.progress import Counters

SMALL = {
    "data.source": "folder",
    "data.preprocess.size": 16,
    "data.preprocess.resize": 16,
    "model.name": "resnet8_cifar",
    "batch.size": 4,
    "batch.group": "all",
    "length": "2ep",
    "engine.num_threads": 1,
    "data.num_workers": 1,
}


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        for name in ("ant", "bee"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(8):
                pixels = np.random.default_rng(number).integers(0, 256, (20, 20, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "images"


def trained(data: Path, out: Path, **settings: object) -> tuple[dict[str, object], bytes]:
    """The summary and the weights of a small run."""
    names = {name.replace("__", "."): value for name, value in settings.items()}
    overrides = [(name, value, "test") for name, value in {**SMALL, **names}.items()]
    result = reconv.train("resnet18", data=data, out=out, overrides=overrides, device="cpu")
    [last] = sorted((out / "checkpoints").glob("step-*/model.safetensors"))[-1:]
    return result.summary, last.read_bytes()


def test_worker_processes_and_transfer_dtypes_equal_threads_and_uint8(image_folder: Path, tmp_path: Path) -> None:
    _, expected = trained(image_folder, tmp_path / "threads")
    assert trained(image_folder, tmp_path / "processes", data__backend="processes")[1] == expected
    for name in ("float16", "bfloat16", "float32"):
        assert trained(image_folder, tmp_path / name, data__transfer_dtype=name)[1] == expected


def test_auto_backend_uses_processes_without_the_native_decoder() -> None:
    chosen = {
        "many images": plan_of(decoder="pillow"),
        "few images": plan_of(decoder="pillow", num_train=9_999),
        "a short epoch of many": plan_of(decoder="pillow", epoch_samples=9_999),
        "one worker": plan_of(decoder="pillow", num_workers=1),
        "a cache of one process": plan_of(decoder="pillow", cache="ram"),
        "nothing to decode": plan_of("cifar10", decoder="pillow", num_workers=2),
        "a resize that the decoder has not": plan_of(preprocess={"interpolation": "nearest"}),
    }
    taken = {name for name, (_, plan) in chosen.items() if plan.backend == "processes"}
    assert taken == {"many images", "a resize that the decoder has not"}


def plan_of(
    source: str = "folder",
    cores: int = 4,
    decoder: Decoder = "native",
    num_train: int = 10_000,
    num_val: int = 100,
    fills_from_files: bool = False,
    **data: object,
) -> tuple[Recipe, Plan]:
    recipe = Recipe(data=DataConfig.model_validate(data))
    facts = Facts(num_train, num_val, 10, source=source, cores=cores, decoder=decoder)
    return recipe, make_plan(recipe, replace(facts, fills_from_files=fills_from_files))


def test_processes_for_validation_images_must_fit_into_the_memory() -> None:
    recipe, plan = plan_of(fills_from_files=True, num_val=10_000, num_workers=16)
    assert (plan.backend, plan.eval_backend) == ("threads", "processes")
    with pytest.raises(ResourceError, match="16 decoding processes"):
        check_worker_memory(plan, recipe, 1, available_bytes=1_000_000_000)
    check_worker_memory(plan, recipe, 1, available_bytes=100_000_000_000)
    recipe, plan = plan_of(fills_from_files=True, num_workers=16)
    check_worker_memory(plan, recipe, 1, available_bytes=1_000_000_000)


def test_jpeg_files_are_decoded_by_threads_on_any_number_of_cores() -> None:
    _, plan = plan_of(cores=16, fills_from_files=True)
    assert (plan.backend, plan.eval_backend, plan.workers) == ("threads", "threads", 16)
    assert not any("for validation images" in line for line in plan.lines)
    _, plan = plan_of(cores=16, fills_from_files=True, num_val=10_000)
    assert (plan.backend, plan.eval_backend) == ("threads", "processes")
    assert any("processes for validation images" in line for line in plan.lines)
    _, plan = plan_of(cores=4, fills_from_files=True, num_val=10_000)
    assert (plan.backend, plan.eval_backend) == ("threads", "threads")
    _, plan = plan_of(cores=16, fills_from_files=True, decoder="pillow")
    assert (plan.backend, plan.eval_backend) == ("processes", "processes")
    _, plan = plan_of(cores=16, fills_from_files=True, num_val=10_000, backend="threads")
    assert (plan.backend, plan.eval_backend) == ("threads", "threads")


def test_auto_backend_uses_threads_where_processes_are_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    for cores in (4, 16):
        _, plan = plan_of(cores=cores, decoder="pillow")
        assert plan.backend == "threads" and plan.workers == min(cores, 8)


def test_auto_backend_explains_its_choice() -> None:
    _, plan = plan_of()
    [line] = [line for line in plan.lines if line.startswith("data.backend")]
    assert plan.backend == "threads" and "threads" in line and "processes" in line
    _, plan = plan_of(cores=16)
    [line] = [line for line in plan.lines if line.startswith("data.backend")]
    assert plan.backend == "processes" and plan.workers == 16 and "would wait for the GIL" in line
    _, plan = plan_of(cores=16, backend="threads")
    assert plan.backend == "threads" and plan.workers == 8
    _, plan = plan_of(cores=16, cache="ram")
    assert plan.backend == "threads" and plan.workers == 8
    _, plan = plan_of(backend="processes")
    assert plan.backend == "processes" and "data.backend: processes, as set" in plan.lines
    _, plan = plan_of("digits", backend="processes")
    assert plan.backend == "caller" and any("no effect: data.backend" in line for line in plan.lines)
    _, plan = plan_of(transfer_dtype="float32")
    assert any("4 times the bytes" in line for line in plan.lines)


def test_each_second_is_counted_in_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([10.0, 13.0, 19.0, 21.0])
    monkeypatch.setattr(stages_module, "time", SimpleNamespace(perf_counter=lambda: next(readings)))

    def task() -> None:
        record_stage("disk", 10.0)
        record_stage("decode", 14.0)

    assert timed(task) == {"disk": 3.0, "decode": 5.0, "augment": 3.0}


def test_stage_times_add_up_and_only_count_inside_a_task() -> None:
    stages = StageTimes()
    stages.add({"disk": 1.5, "copy": 0.25})
    stages.add({"disk": 0.5})
    assert stages.seconds == {"disk": 2.0, "decode": 0.0, "augment": 0.0, "copy": 0.25}
    record_stage("disk", 0.0)
    assert timed(lambda: None).keys() == {"augment"}


@pytest.mark.parametrize(
    ("seconds", "wait_s", "expected"),
    [
        ({"disk": 5.0, "decode": 2.0, "augment": 1.0, "copy": 0.1}, 3.0, "disk"),
        ({"disk": 1.0, "decode": 9.0, "augment": 1.0, "copy": 0.1}, 3.0, "decode"),
        ({"disk": 1.0, "decode": 2.0, "augment": 8.0, "copy": 0.1}, 3.0, "augment"),
        ({"disk": 1.0, "decode": 9.0, "augment": 1.0, "copy": 2.0}, 3.0, "copy"),
    ],
)
def test_bottleneck_is_the_slowest_stage(seconds: dict[str, float], wait_s: float, expected: str) -> None:
    assert slowest_stage(seconds, wait_s) == expected


def test_advice_depends_on_the_stage_and_the_settings() -> None:
    def said(stage: str, source: str = "folder", **data: object) -> str:
        recipe, plan = plan_of(source, **data)
        return data_wait_advice(stage, recipe, plan, source, num_cores=4)

    assert "data.cache=ram" in said("disk")
    assert "data.cache" not in said("disk", cache="ram")
    assert said("decode", num_workers=2) == "--workers 4"
    assert "--to packed" in said("decode", num_workers=4)
    assert "--raw" in said("decode", "packed", num_workers=4)
    assert "augment.auto_augment" in said("augment", "packed", num_workers=4)
    assert "data.transfer_dtype=uint8" in said("copy", transfer_dtype="float32")
    assert "bus" in said("copy")
    assert "data.preload=device" in said("augment", "cifar10")


def waiting(clock: RunClock, events: list[Event]) -> DataWaitLogger:
    recipe, plan = plan_of(num_workers=2)
    stages = StageTimes()
    stages.add({"disk": 1.0, "decode": 6.0, "augment": 2.0, "copy": 0.0})
    return DataWaitLogger(recipe, plan, "folder", 4, clock, stages, RunLogger(events.append))


def clock_that_waited(share: float) -> RunClock:
    times = iter([0.0, 0.0, share, 1.0])
    clock = RunClock(warmup_steps=0, now=lambda: next(times), phases=PhaseTimer())
    with clock.waiting():
        pass
    clock.count_step(1)
    return clock


def test_data_wait_is_logged_after_the_first_evaluation_and_at_the_end() -> None:
    events: list[Event] = []
    watch = waiting(clock_that_waited(0.4), events)
    for step, hook in ((5, watch.on_evaluate_end), (7, watch.on_evaluate_end), (9, watch.teardown)):
        hook(Mock(counters=Counters(step)))
    waits = [event for event in events if isinstance(event, DataWait)]
    assert [(event.step, event.fraction, event.bottleneck, event.advice) for event in waits] == [
        (5, 0.4, "decode", "--workers 4"),
        (9, 0.4, "decode", "--workers 4"),
    ]
    screen = ConsoleLines(None)
    assert [screen.lines(event) for event in waits] == [
        [
            "waited for data 40 % of the time, mostly for decode "
            "(disk 11 %, decode 67 %, augment 22 %, copy 0 %); try: --workers 4"
        ],
        [],
    ]


def test_short_data_wait_names_no_bottleneck() -> None:
    events: list[Event] = []
    waiting(clock_that_waited(0.01), events).log(3)
    assert events == [DataWait(3, 0.01, {"disk": 1.0, "decode": 6.0, "augment": 2.0, "copy": 0.0})]
    assert ConsoleLines(None).lines(events[0]) == []


def test_a_wait_of_less_than_two_seconds_is_no_reason_for_advice() -> None:
    events: list[Event] = []
    logger = waiting(clock_that_waited(0.4), events)
    total = logger.plan.total_steps
    logger.log(int(total * 0.4 / 1.8))  # 1.8 s in the whole run
    logger.log(int(total * 0.4 / 2.2))
    assert [event.bottleneck for event in events if isinstance(event, DataWait)] == ["", "decode"]


def test_summary_has_the_data_time_by_stage(image_folder: Path, tmp_path: Path) -> None:
    summary, _ = trained(image_folder, tmp_path / "run")
    stages = summary["data_stage_s"]
    assert isinstance(stages, dict) and set(stages) == {"disk", "decode", "augment", "copy"}
    assert stages["disk"] > 0 and stages["decode"] > 0
    [*_, last] = [event for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, DataWait)]
    assert summary["data_bottleneck"] == (last.bottleneck or None)
    if last.bottleneck:
        assert f"mostly for {last.bottleneck}" in (tmp_path / "run" / "report.html").read_text()


@pytest.fixture
def cores() -> Iterator[set[int]]:
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def test_a_run_on_one_core_plans_for_one_core(image_folder: Path, tmp_path: Path, cores: set[int]) -> None:
    seen: list[Event] = []
    settings = {**SMALL, "engine.cpu_affinity": str(min(cores)), "data.num_workers": "auto", "length": "1step"}
    overrides = [(name, value, "test") for name, value in settings.items()]
    reconv.train("resnet18", data=image_folder, out=tmp_path / "run", overrides=overrides, on_event=seen.append)
    text = " ".join(str(event) for event in seen)
    assert f"bound to cores {min(cores)}" in text and "1 decoding worker" in text
    assert os.sched_getaffinity(0) == cores


def test_unavailable_cores_are_an_error_in_dry_run_and_training(image_folder: Path, tmp_path: Path) -> None:
    overrides = [
        (name, value, "test") for name, value in {**SMALL, "engine.cpu_affinity": "9000", "length": "1step"}.items()
    ]
    with pytest.raises(UsageError, match="none of the cores 9000"):
        dry_run("resnet18", data=image_folder, steps=1, overrides=overrides)
    with pytest.raises(UsageError, match="none of the cores 9000"):
        reconv.train("resnet18", data=image_folder, out=tmp_path / "run", overrides=overrides)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", ["some", "1-", "-3", "0 1", ""])
def test_malformed_list_of_cores_is_an_error(value: str) -> None:
    with pytest.raises(Exception, match=r"engine\.cpu_affinity"):
        load("quickstart", [("engine.cpu_affinity", value, "test")])
