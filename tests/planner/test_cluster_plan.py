"""`reconv plan`: step times, devices, networks, and the command itself."""

from __future__ import annotations

import csv
import html
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from reconv.cli import reconv
from reconv.core.errors import UsageError
from reconv.models import model_spec
from reconv.planner.device_kinds import DEVICE_KINDS, find_device_kind, with_network
from reconv.planner.step_time import known_step_time, measured_step_time
from reconv.planner.tables import read_table
from reconv.recipe.loader import load


def run(*args: str) -> dict:
    result = CliRunner().invoke(reconv, ["plan", *args, "--json"], catch_exceptions=False)
    return json.loads(result.output)


def write_measured(path: Path, batch: int, images_per_s: float, **fields: object) -> Path:
    recipe = load("resnet50").recipe
    result = {
        "bench": "train",
        "batch_per_device": batch,
        "images_per_s_per_device": images_per_s,
        "image_size": 224,
        "precision": "bf16",
        "device": "a device",
        "devices": 1,
        "recipe": recipe.model_dump(mode="json"),
        **fields,
    }
    path.write_text(json.dumps(result))
    return path


def test_sizes_of_networks_are_those_of_the_networks() -> None:
    rows = read_table("networks.csv")
    assert len(rows) == 51
    for row in rows[::5]:
        with torch.device("meta"):
            network = model_spec(row["network"], int(row["num_classes"])).build()
        assert int(row["parameters"]) == sum(p.numel() for p in network.parameters()), row["network"]


def test_known_step_times_are_those_that_were_measured() -> None:
    text = (Path(__file__).parents[2] / "benchmarks/LOG.md").read_text(encoding="utf-8")
    ours = [row for row in read_table("step_times.csv") if "benchmarks/LOG.md" in row["source"]]
    assert len(ours) == 16
    for row in ours:
        assert f"{int(row['images_per_s']):,}" in text, row


def test_two_batch_sizes_give_the_fixed_part_of_a_step() -> None:
    step_time = known_step_time(load("resnet50").recipe, DEVICE_KINDS["h200"])
    assert 256 / step_time.seconds(256) == pytest.approx(10554)
    assert 512 / step_time.seconds(512) == pytest.approx(11167)
    assert step_time.seconds(2048) == pytest.approx(4 * step_time.seconds(512))
    assert step_time.uncertainty == 0


def test_another_device_is_scaled_from_ours_and_less_certain() -> None:
    recipe = load("resnet50").recipe
    h100, h200 = (known_step_time(recipe, DEVICE_KINDS[name]) for name in ("h100", "h200"))
    assert h100.seconds(256) == pytest.approx(h200.seconds(256) / 0.901)
    assert h100.uncertainty > 0.1


def test_a_network_without_a_step_time_says_how_to_measure_it() -> None:
    with pytest.raises(UsageError, match="no step time") as error:
        known_step_time(load("cifar10-fast").recipe, DEVICE_KINDS["h100"])
    assert "reconv bench train cifar10-fast --json" in error.value.hint


def test_measured_files_give_step_time_contention_and_gradient_bytes(tmp_path: Path) -> None:
    recipe = load("resnet50").recipe
    scaling = {"alone_step_ms": 100.0, "apart_step_ms": 110.0, "gradient_bytes": 1000}
    path = write_measured(tmp_path / "8.json", 256, 1.0, devices=8, scaling=scaling)
    found = measured_step_time([path], recipe)
    assert found.seconds(256) == pytest.approx(0.1)
    assert found.shared_host == pytest.approx(0.1)
    assert found.gradient_bytes == 1000
    other = write_measured(tmp_path / "32.json", 64, 2000.0)
    found = measured_step_time([path, other], recipe)
    assert (found.seconds(64), found.seconds(256)) == pytest.approx((0.032, 0.1))


@pytest.mark.parametrize(
    "fields", [{"bench": "infer"}, {"batch_per_device": 0}, {"images_per_s_per_device": "x"}, {"recipe": None}]
)
def test_files_that_are_no_result_are_refused(tmp_path: Path, fields: dict) -> None:
    with pytest.raises(UsageError, match="no result of `bench train`"):
        measured_step_time([write_measured(tmp_path / "x.json", 256, 1.0, **fields)], load("resnet50").recipe)


def test_a_result_of_another_network_is_refused(tmp_path: Path) -> None:
    path = write_measured(tmp_path / "x.json", 256, 1.0)
    with pytest.raises(UsageError, match="measured resnet50 at 224 px in bf16, and the recipe trains resnet18"):
        measured_step_time([path], load("resnet18").recipe)


def test_networks_are_parsed() -> None:
    h100 = find_device_kind("H100")
    assert with_network(h100, "100gbps").network.bytes_per_s == 12.5e9
    assert with_network(h100, "100gbps").network.latency_s == h100.network.latency_s
    slow = with_network(h100, "25Gbit/s-ethernet").network
    assert slow.bytes_per_s == 3.125e9
    assert slow.latency_s > h100.network.latency_s
    assert with_network(h100, "infiniband") == h100
    for text in ("fast", "", "0gbps", "1.2.3gbps", "400", "-5gbps"):
        with pytest.raises(UsageError, match="is not a network"):
            with_network(h100, text)


def test_unknown_devices_list_the_known_ones() -> None:
    with pytest.raises(UsageError, match="unknown device kind 'b900'") as error:
        find_device_kind("b900")
    assert "a100-40gb" in error.value.why and "ipu-mk2" in error.value.why


def test_plan_predicts_speed_time_and_cost() -> None:
    result = run(
        "resnet50", "--devices", "1,8,64", "--device-kind", "h200", "--batch-per-device", "256", "--price", "2"
    )
    one, eight, many = result["predictions"]
    assert one["images_per_s"] == pytest.approx(10554)
    assert one["efficiency"] < 1  # 512 images are faster than 256
    assert one["images_per_s"] > eight["images_per_s"] / 8 > many["images_per_s"] / 64 > 0.7 * one["images_per_s"]
    for row in result["predictions"]:
        assert row["images_per_s_range"][0] <= row["images_per_s"] <= row["images_per_s_range"][1]
        assert row["cost"] == pytest.approx(2 * row["devices"] * row["hours"])
        assert row["input_bytes_per_s"] == pytest.approx(row["images_per_s"] * 110_000)
        assert sum(v for k, v in row["step"].items() if k != "step_s") == pytest.approx(row["step"]["step_s"])


def test_a_global_batch_is_divided_and_impossible_counts_are_named() -> None:
    result = run("resnet50", "--devices", "8,64,4096", "--device-kind", "h100")
    assert [row["batch_per_device"] for row in result["predictions"]] == [256, 32]
    assert list(result["impossible"]) == ["4096"]


def test_the_page_plots_scaling_and_parts_and_requests_nothing(tmp_path: Path) -> None:
    out = tmp_path / "plan.html"
    run("resnet50", "--devices", "8,64", "--device-kind", "h100", "--network", "400gbps", "--out", str(out))
    text = html.unescape(out.read_text(encoding="utf-8"))
    assert "Thousand images per second" in text and "Where the time of a step goes" in text
    assert "compute 8" in text  # the fraction, in percent
    assert "default-src 'none'" in text and "script-src 'sha256-" in text
    assert not re.search(r"(src|href)=\"(?!data:)", text)


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys; from reconv.cli import main\n"
        "try: main(['plan', 'resnet50'])\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_published_rows_are_complete() -> None:
    path = Path(__file__).parents[2] / "benchmarks/scaling/published.csv"
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 236
    assert all(row["images_per_s"] or row["minutes"] for row in rows)
