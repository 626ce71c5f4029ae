"""`reconv migrate` as it is typed: text, JSON, files, --write and --run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from textwrap import dedent

import pytest
from click.testing import CliRunner, Result

from reconv.cli import reconv
from reconv.core.errors import UsageError
from reconv.recipe.loader import load

NVIDIA = "python ./main.py --arch resnet50 -c fanin --label-smoothing 0.1 --lr 0.2 /imagenet"


def migrate(*args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(reconv, ["migrate", *args], input=stdin, catch_exceptions=False, standalone_mode=False)


def as_json(*args: str, stdin: str | None = None) -> dict[str, object]:
    result: dict[str, object] = json.loads(migrate(*args, "--json", stdin=stdin).stdout)
    return result


def test_the_text_has_recipe_command_and_every_flag() -> None:
    text = migrate(NVIDIA).stdout
    assert "resnet50-nv-defaults, with 3 changes:" in text
    assert "reconv train resnet50-nv-defaults" in text
    for word in ("--arch resnet50", "-c fanin", "--label-smoothing 0.1", "--lr 0.2", "/imagenet"):
        assert word in text
    assert "default of main.py: --momentum 0.9" in text


def test_the_tutorials_example_prints_what_the_page_shows() -> None:
    page = Path(__file__).parents[2] / "docs/tutorials/vendor-program.md"
    blocks = [dedent(block) for block in re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", page.read_text(), re.MULTILINE)]
    command = next(block for block in blocks if block.strip().startswith("reconv migrate"))
    shown = next(block for block in blocks if block.strip().startswith("program:"))
    printed = migrate(*shlex.split(command)[2:]).stdout
    assert printed.startswith(shown.strip().partition("notes:")[0])


def test_json_has_what_the_text_has() -> None:
    found = as_json(NVIDIA)
    assert found["preset"] == "resnet50-nv-defaults"
    assert found["command"][:3] == ["reconv", "train", "resnet50-nv-defaults"]  # type: ignore[index]
    flags = {row["flag"]: row["became"] for row in found["flags"]}  # type: ignore[attr-defined]
    assert flags["--lr 0.2"] == "same"
    assert flags["-c fanin"] == "derived"


def test_a_script_a_file_and_standard_input_are_read(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"#!/bin/bash\n# trains\nset -e\n{NVIDIA} \\\n  --epochs 3\n")
    from_file = as_json(str(script))
    assert from_file["preset"] == "resnet50-nv-defaults"
    assert as_json("-", stdin=script.read_text())["changes"] == from_file["changes"]
    config = tmp_path / "mine.yml"
    config.write_text("my_config:\n  model: resnet\n  model_size: 50\n  optimiser: momentum\n  epochs: 7\n")
    assert as_json(str(config))["program"] == "graphcore"


def test_a_written_recipe_is_the_migrated_one_with_the_origin_of_each_value(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    migrate(NVIDIA, "--write", str(file))
    text = file.read_text()
    assert "lr: 0.2" in text and "# --lr 0.2" in text
    assert "optimizer.momentum: 0.9" in text  # as a comment: the preset has it
    recipe = load(str(file)).recipe
    assert (recipe.schedule.lr, recipe.loss.label_smoothing, recipe.batch.size) == (0.2, 0.1, 256)
    assert recipe.model.options == {"conv_init": "fan_in"}


def test_run_refuses_what_has_to_be_filled_in() -> None:
    with pytest.raises(UsageError, match="<path to imagenet> must be filled in"):
        migrate("python main.py --arch resnet50 <path to imagenet>", "--run")


def test_run_stops_at_a_flag_that_changes_the_result_and_is_not_supported() -> None:
    command = "python imagenet_main.py --train_offset 3 --data_dir /nowhere"
    with pytest.raises(UsageError, match=r"--train_offset 3(?s:.*)--allow-differences"):
        migrate(command, "--run")
    ran = migrate("python train.py --help --lr-noise 0.5", "--program", "timm", "--run", "--allow-differences")
    assert "Usage: reconv train" in ran.stdout


def test_run_goes_on_with_a_flag_that_leaves_the_result_alone() -> None:
    command = "python imagenet_main.py --export_dir x -te 1 -bs 2 -mts 1 --data_dir /nowhere"
    result = CliRunner().invoke(reconv, ["migrate", command, "--run"])
    assert "allow-differences" not in result.output + str(result.exception)
    assert "/nowhere" in str(result.exception) or "/nowhere" in result.output


def test_run_runs_the_new_command() -> None:
    result = migrate("python ssd.py --help", "--run")
    assert result.exit_code == 0
    assert "Usage: reconv train [OPTIONS] [RECIPE]" in result.stdout


def test_weights_of_a_network_that_no_preset_has_need_a_written_recipe(tmp_path: Path) -> None:
    command = "python model2onnx.py --arch efficientnet-widese-b0 --pretrained-from-file x.pth --output m.onnx"
    assert as_json(command)["to_fill_in"] == [
        {"placeholder": "my.yaml", "meaning": "the recipe of the network: --write my.yaml writes it"}
    ]
    file = tmp_path / "mine.yaml"
    assert migrate(command, "--write", str(file)).stdout.count(f"--recipe {file}") == 1
    options = load(str(file)).recipe.model.options
    assert (options["se_base"], options["norm_eps"]) == ("expanded", 0.001)


@pytest.mark.parametrize(
    "text", ["", " \n", "\x00\x01\xff", "\x1b[31m", "\\", "'", '"', "$(", "`", "&&", "| tee x", "<<"]
)
def test_junk_is_an_error_and_no_traceback(text: str) -> None:
    with pytest.raises(UsageError):
        migrate("-", stdin=text)


def test_a_very_long_text_is_refused() -> None:
    with pytest.raises(UsageError, match="the limit is"):
        migrate("-", stdin="python main.py " + "--lr 0.1 " * 100_000)


def test_an_ambiguous_program_is_chosen_by_name() -> None:
    with pytest.raises(UsageError, match=r"several programs are called train\.py"):
        migrate("python train.py --epochs 3")
    assert as_json("python train.py --epochs 3", "--program", "graphcore")["program"] == "graphcore"
    with pytest.raises(UsageError, match="did you mean graphcore"):
        migrate("python train.py", "--program", "grafcore")


def test_a_written_recipe_is_valid_whatever_the_command_contains(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    migrate("python main.py --arch resnet50 --workspace '\x1b[31m out: #x' --lr 0.2 '/data set'", "--write", str(file))
    assert load(str(file)).recipe.schedule.lr == 0.2
    assert "\x1b" not in file.read_text()
