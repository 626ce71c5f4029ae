"""`reconv inspect` says what a folder would do and does none of it."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from foreign_folders import OWNED, change_run, checkpoints, copy_of, run_command, train_run, trap, write_files

from reconv.core.errors import ExitCode

ADDRESSES = {
    "model.init": "https://198.51.100.7/weights.pth",
    "distill.teacher": "http://[::1/x",
    "data.path": "s3://bucket/data",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Iterator[Path]:
    """A run with something of every kind that is listed."""
    run = copy_of(trained, tmp_path / "run")
    write_files(run / "lib", {"nets.py": trap("import helper"), "helper.py": trap(), "unused.py": trap()})

    def change(recipe: dict[str, Any]) -> None:
        recipe["model"]["name"] = "nets:Net"
        recipe["code_path"] = [str(run / "lib")]
        recipe["loggers"] = ["wandb"]
        for field, address in ADDRESSES.items():
            section, name = field.split(".")
            recipe[section][name] = address

    change_run(run, change)
    (run / "mirror.json").write_text(json.dumps({"url": "gs://bucket/run"}))
    (run / "images/out.png").symlink_to("/etc/hostname")
    (run / "latest").symlink_to("checkpoints")
    os.mkfifo(run / "pipe.py")
    yield run


def inspected(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run_command("inspect", path, "--json") == ExitCode.OK
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.usefixtures("no_blocking_pipe")
def test_a_run_is_read_as_data(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, modules = list(sys.path), {"nets", "helper"} & set(sys.modules)
    found = inspected(run, capsys)
    assert found["kind"] == "run" and found["problems"] == []
    files = [*(f"checkpoints/{each.name}/state.json" for each in checkpoints(run)), "recipe.yaml"]
    code = {(item["file"], item["field"], item["path"]) for item in found["code"]}
    assert {(file, "model.name", "nets:Net") for file in files} <= code
    digests = {name: hashlib.sha256((run / "lib" / name).read_bytes()).hexdigest() for name in ("nets.py", "helper.py")}
    assert found["code"][0]["digests"] == {str(run / "lib" / name): digest for name, digest in digests.items()}
    assert [item["value"] for item in found["code_path"]] == [str(run / "lib")] * len(files)
    addresses = {(item["file"], item["field"], item["value"]) for item in found["addresses"]}
    expected = {("recipe.yaml", field, address) for field, address in ADDRESSES.items()}
    assert (
        expected | {("recipe.yaml", "loggers", "wandb"), ("mirror.json", "copy of the run", "gs://bucket/run")}
        <= addresses
    )
    links = {item["file"]: item["note"] for item in found["links"]}
    assert links == {"images/out.png": "leads out of the folder", "latest": ""}
    assert found["special_files"] == ["pipe.py"]
    assert set(found["unknown_files"]) == {"lib/nets.py", "lib/helper.py", "lib/unused.py"}
    assert sys.path == path and {"nets", "helper"} & set(sys.modules) == modules
    assert list(run.rglob(OWNED)) == []


def test_the_text_has_what_the_json_has(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("inspect", run) == ExitCode.OK
    text = capsys.readouterr().out
    for part in (
        "nets:Net",
        *ADDRESSES.values(),
        "gs://bucket/run",
        "leads out of the folder",
        "pipe.py",
        "lib/unused.py",
    ):
        assert part in text


def test_a_checkpoint_a_recipe_and_weights_are_read_as_well(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = checkpoints(run)[0]
    for path, kind in ((checkpoint, "checkpoint"), (run / "recipe.yaml", "recipe")):
        found = inspected(path, capsys)
        assert (found["kind"], found["code"][0]["path"]) == (kind, "nets:Net")
    weights = inspected(checkpoint / "model.safetensors", capsys)
    assert weights["kind"] == "weights" and weights["problems"] == []


def test_a_run_of_ones_own_names_nothing(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("inspect", trained) == ExitCode.OK
    assert "It names no code and no address, and has no links." in capsys.readouterr().out
    found = inspected(trained, capsys)
    assert found["unknown_files"] == [] and found["problems"] == []


def test_what_cannot_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bomb = "A: &a [x, x]\nB: *a\n"
    write_files(tmp_path / "bad", {"recipe.yaml": bomb, "state.json": "[" * 10_000, "model.safetensors": "12345678{"})
    problems = inspected(tmp_path / "bad", capsys)["problems"]
    assert any("alias" in problem for problem in problems) and any("nested" in problem for problem in problems)
    assert run_command("inspect", tmp_path / "none") == ExitCode.USAGE
