"""The report's section on published figures."""

from __future__ import annotations

from pathlib import Path

import yaml

from reconv.logging.event_log import EventLog
from reconv.logging.events import AttemptStarted, RunEnded, RunPlanned
from reconv.recipe.loader import load
from reconv.report.html import render


def write_run(folder: Path, preset: str = "resnet50-nv-90ep-8gpu-mixed", num_classes: int = 1000) -> Path:
    folder.mkdir()
    (folder / "recipe.yaml").write_text(yaml.safe_dump(load(preset).recipe.model_dump(mode="json")))
    plan = RunPlanned(preset, "classification", 180, 2.0, 2048, ("plan",), num_devices=8, num_classes=num_classes)
    with EventLog(folder / "events.jsonl") as log:
        log.write(AttemptStarted(1, 0, ("reconv", "train", preset), {"device": "NVIDIA H200"}))
        log.write(plan)
        log.write(RunEnded(180, 0, "finished", 7200.0, 180 * 2048, 0))
    return folder


def test_a_run_stands_above_the_published_figures_of_its_network(tmp_path: Path) -> None:
    page = render([write_run(tmp_path / "run")]).partition("Beside published figures")[2]
    ours = page.partition("this run")[2].partition("</tr>")[0]
    assert "NVIDIA H200" in ours and ">8<" in ours and ">90<" in ours and ">2<" in ours  # devices, epochs, hours
    assert ">8,322<" in page and "77.12 ± 0.11" in page and "IPU Mk2" in page


def test_other_data_and_other_networks_have_no_such_section(tmp_path: Path) -> None:
    assert "published figures" not in render([write_run(tmp_path / "a", num_classes=10)])
    assert "published figures" not in render([write_run(tmp_path / "b", "quickstart")])
    damaged = write_run(tmp_path / "c")
    (damaged / "recipe.yaml").write_text("model: {name: 7, none: 1}\nprecision: what\n")
    assert "published figures" not in render([damaged])
