"""The pages of results say what the stored figures say, and a figure whose code has changed is marked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import pages, results, vendors
from benchmarks.cases import CASES, HEADLINES, process_rows, server_rows, training_rows
from benchmarks.results import Result, Row

SERVERS = ("serve-h200", "serve-cpu")
RESULT = Result(
    case="training-h200",
    command="python -m benchmarks.training.throughput",
    hardware="a GPU",
    date="2026-11-19",
    commit="abc",
    versions={"torch": "2.13"},
    sources={},
    rows=(Row(name="ResNet-50", value=1200.0, unit="images/s", low=1100.0, high=1300.0, n=5, baseline=800.0),),
)


def test_pages_and_charts_are_those_of_the_stored_figures() -> None:
    texts = dict(pages.generated())
    assert len(texts) > 15
    assert [str(path) for path, text in texts.items() if path.read_text(encoding="utf-8") != text] == []


def test_a_changed_figure_changes_readme_and_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in pages.stored_cases():
        result = results.load(name)
        rows = tuple(replace(row, value=row.value * 2) for row in result.rows)
        replace(result, rows=rows if name == "training-h200" else result.rows).save(tmp_path)
    monkeypatch.setattr(results.load, "__defaults__", (tmp_path,))
    differing = {path.name for path, text in pages.generated() if path.read_text(encoding="utf-8") != text}
    assert differing >= {"README.md", "training.md", "training-h200-dark.svg", "headlines-light.svg"}
    assert "serve.md" not in differing


def test_every_stored_result_belongs_to_a_case_and_every_page_shows_stored_ones() -> None:
    assert set(pages.stored_cases()) <= set(CASES)
    files = [path for pattern in pages.PAGES for path in results.ROOT.glob(pattern)]
    shown = {name for path in files for name in pages.cases_of(path.read_text())}
    assert set(pages.stored_cases()) <= shown


def test_a_page_has_one_table_of_figures_and_all_are_short() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in results.ROOT.glob("docs/results/*.md")}
    counts = {name: sum(match[2] != "chart" for match in pages.BLOCK.finditer(text)) for name, text in texts.items()}
    assert {name: count for name, count in counts.items() if count > 1} == {}
    assert sum(len(text.split()) for text in texts.values()) < 8000


def test_vendors_tables_have_each_chip_one_h200_and_predictions_for_8_and_64() -> None:
    overview = vendors.table("overview")
    assert "| network | devices | A100 80 GB | Gaudi | V100 16 GB | H200, measured | H200, predicted |" in overview
    for network in ("ResNet-50", "EfficientNet-B4", "SSD-ResNet34"):
        rows = {cells[1]: cells for line in overview.splitlines() if (cells := line[2:-2].split(" | "))[0] == network}
        assert list(rows) == ["1", "8", "64"]
        assert rows["1"][-2] and rows["8"][-1] and rows["64"][-1]
    for name in ("training", "time", "accuracy", "inference", "serving"):
        head = vendors.table(name).partition("\n")[0]
        assert "V100 16 GB" in head
        assert ("H200, measured" in head) == (name in ("training", "inference", "serving"))


def test_processes_are_columns_and_other_cases_rows_of_one_table() -> None:
    process = replace(RESULT, case="photos-time-h200", rows=(Row(name="imports", value=2.0, unit="s", n=3),))
    other = replace(
        process, case="quickstart-time-cpu", rows=(Row(name="saves", value=1.0, unit="s", low=0.5, high=2.0),)
    )
    table = pages.table(process, other)
    assert "| imports | 2 |  |\n| saves |  | 1 (0.50 to 2) |" in table
    servers = [replace(RESULT, case=name, rows=(Row(name=name, value=9.0, unit="requests/s"),)) for name in SERVERS]
    table = pages.table(servers[0], replace(servers[1], date="2026-01-01"))
    assert "| serve-h200 | H200 | 9 |  | 2026-11-19 |\n| serve-cpu | 2 CPU cores | 9 |  | 2026-01-01 |" in table
    assert "python -m benchmarks run serve-cpu" in table


def test_headlines_name_rows_that_exist() -> None:
    for name, row_name, _ in HEADLINES:
        assert row_name in [row.name for row in results.load(name).rows], (name, row_name)


def test_a_result_is_read_as_it_was_saved(tmp_path: Path) -> None:
    path = RESULT.save(tmp_path)
    assert results.load("training-h200", tmp_path) == RESULT
    assert json.loads(path.read_text())["rows"][0]["ratio"] == 1.5


def test_rows_of_an_earlier_run_are_kept_with_their_date(tmp_path: Path) -> None:
    earlier = (Row(name="ResNet-18", value=1.0, unit="images/s"), Row(name="ResNet-50", value=2.0, unit="images/s"))
    replace(RESULT, date="2026-01-01", rows=earlier).save(tmp_path)
    rows = results.updated(RESULT, tmp_path).rows
    assert [(row.name, row.value, row.date) for row in rows] == [
        ("ResNet-18", 1.0, "2026-01-01"),
        ("ResNet-50", 1200.0, ""),
    ]


def test_a_source_that_changes_is_named(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    source = tmp_path / "kernels" / "norm.py"
    source.write_text("a = 1\n")
    result = replace(RESULT, sources=results.digests(("kernels",), tmp_path))
    assert results.changed_sources(result, tmp_path) == []
    source.write_text("a = 2\n")
    assert results.changed_sources(result, tmp_path) == ["kernels"]


def test_a_ratio_above_one_is_better_than_the_baseline() -> None:
    assert Row(name="rate", value=3.0, unit="images/s", baseline=2.0).ratio == 1.5
    assert Row(name="time", value=2.0, unit="s", baseline=3.0, lower_is_better=True).ratio == 1.5


def test_a_table_has_the_range_the_baseline_and_the_conditions() -> None:
    table = pages.table(RESULT)
    assert "| ResNet-50 | 1,200 (1,100 to 1,300) | 800 | **1.50** | 5 |" in table
    assert "2026-11-19, a GPU; torch 2.13, commit `abc`" in table
    assert "python -m benchmarks run training-h200" in table


def test_throughput_becomes_rows_with_their_baselines() -> None:
    training = {"kind": "train", "batch": 256, "images_per_s": 900.0, "lowest": 890.0, "highest": 910.0, "n": 5}
    training |= {"baseline": 600.0, "baseline_name": "torchvision compiled", "roofline_fraction": 0.4}
    inference = {"kind": "infer", "batch": 1, "images_per_s": 1.0}
    content = {"networks": {"resnet50": {"rows": [training, inference]}}}
    (row,) = training_rows(content)
    assert (row.name, row.value, row.ratio, row.more) == ("ResNet-50", 900.0, 1.5, {"roofline": "40 %"})


def test_phases_are_medians_over_processes() -> None:
    processes = [
        {
            "wall_s": wall,
            "startup_s": 1.0,
            "last_step_s": 2.0,
            "after_last_step_s": 0.5,
            "phases_s": {"data_wait": wall},
        }
        for wall in (3.0, 9.0, 4.0)
    ]
    rows = {row.name: row for row in process_rows(processes)}
    assert (rows["whole process"].value, rows["whole process"].high, rows["data wait"].n) == (4.0, 9.0, 3)


def test_servers_are_compared_with_the_fastest_litserve_of_their_precision() -> None:
    def closed(server: str, precision: str, rate: float) -> dict[str, object]:
        return {"server": server, "precision": precision, "options": "x", "per_s": [rate], "p99_ms": 1.0}

    content = [closed("LitServe", "bf16", 10.0), closed("LitServe", "bf16", 20.0), closed("reconv serve", "bf16", 60.0)]
    *_, ours = server_rows({"closed": content})
    assert ours.ratio == 3.0


def test_a_case_that_needs_data_says_which(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="predict-cpu needs --data DIR: a folder of photographs"):
        command.main(["run", "predict-cpu"])


def test_figures_of_a_file_are_stored(tmp_path: Path) -> None:
    runs = [{"wall_s": 3.0, "startup_s": 1.0, "last_step_s": 2.0, "after_last_step_s": 0.5, "phases_s": {}}]
    file = tmp_path / "times.json"
    file.write_text(json.dumps(runs))
    assert command.main(["run", "quickstart-time-cpu", "--json", str(file), "--out", str(tmp_path)]) == 0
    stored = results.load("quickstart-time-cpu", tmp_path)
    assert stored.rows[0] == Row(name="whole process", value=3.0, unit="s", n=1)
    assert set(stored.sources) == set(CASES["quickstart-time-cpu"].sources)
