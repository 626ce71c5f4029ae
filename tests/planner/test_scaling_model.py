"""The scaling model: laws it must obey, and its error against published results."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from benchmarks.scaling.check_plan import errors, fit_loss, predict_rows, read_rows
from reconv.planner.cluster import RANGE
from reconv.planner.device_kinds import DEVICE_KINDS, Link
from reconv.planner.model import (
    FITTED,
    InputLimits,
    ScalingParameters,
    Workload,
    all_reduce_s,
    calibrate,
    predict_step,
)

H100 = DEVICE_KINDS["h100"]
NO_LATENCY = replace(H100, link=Link(100e9, 0.0), network=Link(10e9, 0.0))
WORK = Workload(compute_s=0.03, batch_per_device=256, gradient_bytes=102e6, is_half_precision=True)
IDEAL = ScalingParameters(straggler=0.0, shared_host=0.0, run_overhead_s=0.0)


def test_median_error_of_held_out_rows_is_below_10_percent() -> None:
    predicted = predict_rows(read_rows())
    held_out = errors(predicted, "held out")
    assert len(held_out) == 93
    assert statistics.median(map(abs, held_out)) < 0.05
    multi_node = [v / row.published - 1 for row, v in predicted if row.devices > row.kind.devices_per_node]
    assert len(multi_node) == 20  # between machines
    assert statistics.median(map(abs, multi_node)) < 0.10


def test_the_parameters_fit_best_and_the_range_holds_80_percent() -> None:
    rows = read_rows()
    best = fit_loss(rows, FITTED)
    for name in ("straggler", "shared_host", "run_overhead_s"):
        for factor in (0.93, 1.07):
            other = replace(FITTED, **{name: factor * getattr(FITTED, name)})
            assert fit_loss(rows, other) > best, (name, factor)
    ratios = [row.published / value for row, value in predict_rows(rows) if row.use == "held out"]
    assert 0.8 <= sum(RANGE[0] <= ratio <= RANGE[1] for ratio in ratios) / len(ratios) <= 0.9


def test_fitted_rows_and_held_out_rows_are_disjoint() -> None:
    rows = read_rows()
    fitted = {row.network for row in rows if row.use == "fit"}
    assert fitted == {"resnet50"}
    assert all(row.devices <= 64 for row in rows if row.use == "fit")
    assert {row.use for row in rows} == {"base", "fit", "held out", "left out"}


def test_ring_all_reduce_sends_twice_the_bytes_less_one_part() -> None:
    one_bucket = 8e6
    assert all_reduce_s(one_bucket, 8, NO_LATENCY) == pytest.approx(2 * 7 / 8 * one_bucket / 80e9)
    between = 2 * 1 / 2 * (one_bucket / 8) / 8e9  # each device sends its eighth to the other machine
    assert all_reduce_s(one_bucket, 16, NO_LATENCY) == pytest.approx(2 * 7 / 8 * one_bucket / 80e9 + between)
    assert all_reduce_s(one_bucket, 1, H100) == 0


def test_only_the_last_bucket_is_exposed_until_the_backward_pass_is_too_short() -> None:
    step = predict_step(WORK, 16, NO_LATENCY, IDEAL)
    assert step.communication_s == pytest.approx(step.total_communication_s / 4)  # 102 MB are four buckets
    short = predict_step(replace(WORK, compute_s=1e-4), 16, NO_LATENCY, IDEAL)
    assert short.communication_s == pytest.approx(short.total_communication_s - 1e-4 * 2 / 3)
    ipu = predict_step(WORK, 16, DEVICE_KINDS["ipu-mk2"], IDEAL)
    assert ipu.communication_s == ipu.total_communication_s > 0


def test_one_device_takes_its_own_time_and_more_devices_never_take_less() -> None:
    assert predict_step(WORK, 1, H100).step_s == WORK.compute_s
    steps = [predict_step(WORK, 2**n, H100).step_s for n in range(13)]
    assert steps == sorted(steps)


def test_slow_storage_limits_the_speed() -> None:
    step = predict_step(WORK, 8, H100, limits=InputLimits(storage_images_per_s=20_000))
    assert 8 * 256 / step.step_s == pytest.approx(20_000)
    assert step.input_s > step.compute_s
    assert predict_step(WORK, 8, H100, limits=InputLimits(1e9, 1e9)).input_s == 0


def test_calibration_gives_back_the_measured_step() -> None:
    found = calibrate(WORK, 0.05, 16, H100)
    assert predict_step(found, 16, H100).step_s == pytest.approx(0.05)
    assert found.compute_s < 0.05
