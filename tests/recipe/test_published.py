"""Published figures are what presets, the planner and pages say of them, and are found for a recipe."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from reconv.cli import main
from reconv.planner.tables import read_table
from reconv.recipe.loader import load
from reconv.recipe.presets import preset_names, preset_vendor
from reconv.recipe.published import Figure, comparison, figures_for, network_of, newest, published_figures

ROOT = Path(__file__).resolve().parents[2]


def find(**known: object) -> list[Figure]:
    return [f for f in published_figures() if all(getattr(f, name) == value for name, value in known.items())]


def test_every_row_has_a_source_hardware_and_a_figure() -> None:
    figures = published_figures()
    assert len(figures) > 950
    for figure in figures:
        assert figure.source and figure.hardware and figure.image_size
        assert figure.top1 or figure.images_per_s or figure.hours
        assert (figure.kind == "accuracy") == (figure.top1 is not None)
        assert figure.devices or figure.source.startswith("Graphcore examples")
    rows = [tuple(f.as_json().items()) for f in figures]
    assert len(rows) == len(set(rows))


@pytest.mark.parametrize(
    ("precision", "devices", "images_per_s", "hours"),
    [
        ("half", 1, 747.3, 46),
        ("fp32", 1, 363.1, 90),
        ("half", 4, 2886.9, 14),
        ("fp32", 4, 1375.5, 26),
        ("half", 8, 5815.8, 8),
        ("fp32", 8, 2857.9, 14),
    ],
)
def test_rows_of_the_first_readme_are_there(precision: str, devices: int, images_per_s: float, hours: int) -> None:
    known = {"source": "NVIDIA DeepLearningExamples, RN50v1.5, Jun 2019", "hardware": "V100 16 GB", "kind": "training"}
    (figure,) = find(precision=precision, devices=devices, **known)
    assert (figure.images_per_s, figure.hours) == (images_per_s, hours)


def test_inference_has_every_batch_size_from_1_to_256() -> None:
    known = {"kind": "inference", "network": "resnet50", "precision": "half", "hardware": "V100 16 GB"}
    rates = {f.batch: f.images_per_s for f in find(source="NVIDIA DeepLearningExamples, RN50v1.5, Jun 2019", **known)}
    assert list(rates) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert (rates[1], rates[256]) == (131.8, 2696.7)
    (last,) = find(source="NVIDIA DeepLearningExamples, ConvNets, 2023", batch=256, **known)
    assert (last.images_per_s, last.latency_ms, last.p95_ms, last.p99_ms) == (3382, 84.14, 75.3, 80.08)


@pytest.mark.parametrize(
    ("network", "epochs", "top1", "gap", "images_per_s"),
    [("efficientnet_b0", 10, 77.12, 0.51, 2644.62), ("efficientnet_b4", 2, 82.54, 0.44, 310.41)],
)
def test_quantization_aware_training_has_its_epochs_accuracy_gap_and_speed(
    network: str, epochs: int, top1: float, gap: float, images_per_s: float
) -> None:
    (accuracy,) = find(kind="accuracy", precision="int8-qat", network=network)
    (training,) = find(kind="training", precision="int8-qat", network=network)
    assert (accuracy.epochs, accuracy.top1, training.images_per_s) == (epochs, top1, images_per_s)
    assert f"gap to fp32 {gap}" in accuracy.note
    assert "fp32" in training.note  # the speed without fake quantization


def test_presets_claim_what_is_published() -> None:
    checked = 0
    for name in preset_names():
        recipe = load(name).recipe
        if preset_vendor(name) not in ("nvidia", "graphcore"):
            continue
        figures = find(network=network_of(recipe), precision=recipe.precision.family)
        for claim in recipe.published:
            speeds, accuracies = {f.images_per_s for f in figures}, {f.top1 for f in figures}
            if claim.images_per_s is not None:
                assert claim.images_per_s in speeds, (name, claim)
                checked += 1
            if claim.value is not None and claim.metric == "top1" and claim.caveat.find("without runs") < 0:
                assert round(100 * claim.value, 2) in {round(v, 2) for v in accuracies if v}, (name, claim)
                checked += 1
    assert checked > 80


def test_the_planner_knows_the_same_speeds() -> None:
    with (ROOT / "benchmarks" / "scaling" / "published.csv").open(newline="") as file:
        scaling = [row for row in csv.DictReader(file) if row["table"].startswith(("NVIDIA ConvNets", "NVIDIA RN50"))]
    steps = [row for row in read_table("step_times.csv") if "DeepLearningExamples" in row["source"]]
    assert len(scaling) > 150 and len(steps) > 20
    for row in (*scaling, *steps):
        found = find(kind="training", network=row["network"].replace("widese_b", "b"), precision=row["precision"])
        found += find(kind="training", network=row["network"] + "_widese", precision=row["precision"])
        wanted = float(row["images_per_s"])
        assert any(f.images_per_s and abs(f.images_per_s - wanted) <= 0.06 for f in found), row


def test_figures_are_of_the_network_its_size_and_its_precision() -> None:
    recipe = load("efficientnet-b0-widese-nv-400ep-8gpu-mixed").recipe
    figures = figures_for(recipe, "training")
    assert {(f.network, f.precision) for f in figures} == {("efficientnet_b0_widese", "half")}
    assert len(newest(figures)) == 7
    tf32 = load("resnet50", [("precision.mode", "tf32", "test")]).recipe
    assert {f.precision for f in figures_for(tf32, "training")} == {"tf32"}
    assert figures_for(load("resnet50", [("data.preprocess.size", 160, "test")]).recipe, "training") == []
    assert figures_for(load("quickstart").recipe, "training") == []


def test_of_each_setting_the_newest_release_counts() -> None:
    recipe = load("resnet50-nv-90ep-8gpu-mixed").recipe
    (one,) = [f for f in newest(figures_for(recipe, "training")) if (f.hardware, f.devices) == ("V100 16 GB", 1)]
    assert (one.images_per_s, one.source[-4:]) == (1200, "2023")


def test_a_comparison_counts_each_device_and_has_no_empty_columns() -> None:
    ours = Figure(kind="training", network="a", hardware="H200", precision="half", source="ours", images_per_s=10_000.0)
    theirs = Figure(
        kind="training", network="a", hardware="V100", precision="half", source="x", devices=8, images_per_s=8000.0
    )
    head, rows = comparison([ours], [theirs])
    assert head == ["source", "hardware", "devices", "precision", "images/s", "ours, per device"]
    assert rows == [["ours", "H200", "", "half", "10,000", ""], ["x", "V100", "8", "half", "8,000", "10.00 x"]]


def test_show_prints_ours_above_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    for name, is_published in (("resnet50-nv-90ep-8gpu-mixed", True), ("quickstart", False)):
        with pytest.raises(SystemExit):
            main(["recipes", "show", name])
        lines = capsys.readouterr().out.splitlines()
        assert ("Published for this model, beside Reconv:" in lines) == is_published
        if is_published:
            table = lines[lines.index("Published for this model, beside Reconv:") + 1 :]
            assert table[1].startswith("Reconv, measured") and "NVIDIA H200" in table[1]
            assert any("V100 16 GB" in line and "8,322" in line for line in table)
            assert any("76.88 ± 0.16" in line or "77.09" in line for line in table)
