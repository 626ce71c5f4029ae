"""`reconv recipes` shows every recipe, and every value of one with its origin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reconv.cli import main
from reconv.cli.commands.recipes import flatten, layout
from reconv.recipe.field_reference import field_names
from reconv.recipe.loader import load
from reconv.recipe.presets import preset_names, recommended_presets


def _run(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0
    return capsys.readouterr().out


def test_every_preset_is_in_the_table_and_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    names = preset_names()
    assert "quickstart" in names
    table = _run(["recipes", "--all"], capsys)
    listed = [line.split()[0] for line in table.splitlines()[1:-1]]
    assert listed == names
    entries = json.loads(_run(["recipes", "--all", "--json"], capsys))
    assert [entry["name"] for entry in entries] == names
    assert all(entry["expect"] is None or entry["expect"]["source"] for entry in entries)


def test_the_list_separates_published_from_measured_results(capsys: pytest.CaptureFixture[str]) -> None:
    entries = {entry["name"]: entry for entry in json.loads(_run(["recipes", "--all", "--json"], capsys))}
    claim = entries["resnet50-nv-90ep-8gpu-mixed"]["published"][0]
    assert (claim["value"], claim["spread"], claim["images_per_s"], claim["hours"]) == (0.7723, 0.0004, 5815.8, 8)
    assert entries["resnet50-nv-90ep-8gpu-mixed"]["measured"] == []
    assert entries["quickstart"]["published"] == []
    assert entries["quickstart"]["measured"][0]["n"] == 7
    lines = {line.split()[0]: line for line in _run(["recipes", "--all"], capsys).splitlines()}
    assert "top1 77.23 % ± 0.04   not yet" in lines["resnet50-nv-90ep-8gpu-mixed"]
    assert "top1 75.96 % ± 0.09*  not yet" in lines["resnet50-gc-pod16-lars"]
    assert "no result             not yet" in lines["resnet50-habana-8card-bf16"]
    assert "top1 99.44 % ± 0.23 (n=7, 2026-11-15)" in lines["quickstart"]


def test_json_is_written_to_the_given_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "deep" / "list.json"
    assert _run(["recipes", "--all", "--json", str(file)], capsys) == ""
    assert len(json.loads(file.read_text())) == len(preset_names())


def test_without_options_a_dozen_recommended_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    entries = json.loads(_run(["recipes", "--json"], capsys))
    assert [entry["name"] for entry in entries] == recommended_presets()
    assert 9 < len(entries) < 15
    left_out = len(preset_names()) - len(entries)
    assert f"{left_out} more presets: reconv recipes --all" in _run(["recipes"], capsys)


def test_presets_are_filtered_by_vendor_and_network(capsys: pytest.CaptureFixture[str]) -> None:
    entries = json.loads(_run(["recipes", "--vendor", "nvidia", "--model", "ResNeXt", "--json"], capsys))
    assert len(entries) > 5
    assert {entry["model"] for entry in entries} == {"resnext101_32x4d", "se_resnext101_32x4d"}
    assert all("-nv-" in entry["name"] for entry in entries)


@pytest.mark.parametrize("words", [["--vendor", "nobody"], ["--model", "vgg"], ["explain", "batch.sizee"]])
def test_unknown_vendor_network_or_field_is_an_error_that_lists_what_there_is(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["recipes", *words])
    assert end.value.code == 2
    printed = capsys.readouterr().err
    assert any(word in printed for word in ("habana", "resnet50", "batch.size"))


def test_explain_prints_description_values_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    text = _run(["recipes", "explain", "batch.group"], capsys)
    assert "batch.group  (default: all)" in text and "Ghost batch norm" in text and "one of all, micro" in text


def test_fields_lists_every_field_with_values_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    lines = _run(["recipes", "fields"], capsys).splitlines()
    assert len(lines) == len(field_names()) + 2  # the columns' names first, a hint last
    (group,) = (line for line in lines if line.startswith("batch.group "))
    assert "Ghost batch norm" in group and group.endswith(
        "Takes a whole number, above 0, or one of all, micro; default: all."
    )
    options = json.loads(_run(["recipes", "fields", "model.options.", "--model", "googlenet", "--json"], capsys))
    assert {"name": "model.options.aux_heads", "default": "true"}.items() <= next(
        option.items() for option in options if option["name"].endswith("aux_heads")
    )


@pytest.mark.parametrize("name", preset_names()[::15])
def test_show_prints_every_field_with_the_origin_that_load_gives(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    resolved = load(name)
    fields = dict(flatten(resolved.recipe.model_dump(mode="json")))
    shown = json.loads(_run(["recipes", "show", name, "--json"], capsys))
    assert len(shown) > 60
    assert {field: entry["value"] for field, entry in shown.items()} == fields
    text = _run(["recipes", "show", name], capsys)
    for field, entry in shown.items():
        line = next(line for line in reversed(text.splitlines()) if line.split()[:1] == [field])  # the header is first
        assert line.endswith(entry["origin"])


def test_show_names_the_option_that_set_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(_run(["recipes", "show", "quickstart", "--set", "optimizer.momentum=0.5", "--json"], capsys))
    assert shown["optimizer.momentum"] == {"value": 0.5, "origin": "--set"}
    assert shown["schedule.lr"]["origin"].startswith("quickstart.yaml:")
    assert shown["engine.deterministic"]["origin"] == "default"


def test_show_puts_a_blank_line_between_sections_and_aligns_the_origins() -> None:
    lines = layout(
        {"name": "a", "model.name": "b", "model.init": None}, {"name": "x", "model.name": "y", "model.init": "z"}
    )
    assert lines == ["name        a     x", "", "model.name  b     y", "model.init  null  z"]


def test_all_errors_of_an_invalid_recipe_are_printed_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("extends: quickstart\noptimizer:\n  momentun: 0.9\nbatch:\n  size: many\n")
    with pytest.raises(SystemExit) as end:
        main(["recipes", "show", str(file)])
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert "my.yaml:3" in err
    assert "my.yaml:5" in err
    assert "optimizer.momentum" in err
