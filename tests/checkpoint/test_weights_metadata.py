"""The metadata of weights files: enough to evaluate without a recipe, and checked as a stranger's data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from reconv.checkpoint.safetensors_bytes import encode
from reconv.checkpoint.weights_metadata import KEY, MAX_BYTES, WeightsMetadata, read_metadata, to_header
from reconv.core.errors import CheckpointError, ExitCode
from reconv.recipe.loader import load
from reconv.recipe.presets import preset_names
from reconv.recipe.schema import Recipe

TENSORS = {"fc.weight": torch.arange(6.0).view(2, 3), "count": torch.tensor(3)}


def write(path: Path, header: dict[str, str]) -> Path:
    path.write_bytes(encode(TENSORS, header))
    return path


def test_a_preset_read_back_from_a_weights_file_predicts_as_before(tmp_path: Path) -> None:
    names = preset_names()
    assert len(names) > 50
    for name in names:
        recipe = load(name).recipe
        header = to_header(WeightsMetadata(recipe, ("a", "b"), (1, 7), "ema", 12, "0.1"))
        found = read_metadata(write(tmp_path / "w.safetensors", header))
        assert found is not None
        assert (found.class_names, found.class_ids, found.weights, found.step) == (("a", "b"), (1, 7), "ema", 12)
        back = found.recipe
        assert (back.task, back.data.preprocess, back.precision) == (
            recipe.task,
            recipe.data.preprocess,
            recipe.precision,
        )
        assert (back.model.name, back.model.options) == (recipe.model.name, recipe.model.options)
        assert (back.detection, back.evaluate.tta) == (recipe.detection, recipe.evaluate.tta)


def test_metadata_changes_no_tensor_and_equal_weights_give_equal_files(tmp_path: Path) -> None:
    private = Recipe.model_validate({"data": {"path": "/home/me/secret"}, "seed": 3, "batch": {"size": 17}})
    headers = [to_header(WeightsMetadata(recipe, ("a", "b"), version="0.1")) for recipe in (private, Recipe())]
    assert headers[0] == headers[1], "settings of training and paths are no part of it"
    file = write(tmp_path / "w.safetensors", headers[0])
    loaded = safetensors.torch.load_file(file)
    assert loaded.keys() == TENSORS.keys() and all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)
    assert encode(TENSORS, dict(reversed(headers[0].items()))) == file.read_bytes()
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata()["format"] == "pt"


def test_names_that_are_too_large_are_left_out(tmp_path: Path) -> None:
    header = to_header(WeightsMetadata(Recipe(), tuple("x" * 1000 for _ in range(5000))))
    found = read_metadata(write(tmp_path / "w.safetensors", header))
    assert found is not None and found.class_names == ()


def test_a_file_without_our_metadata_has_none(tmp_path: Path) -> None:
    assert read_metadata(write(tmp_path / "w.safetensors", {})) is None
    assert read_metadata(write(tmp_path / "w.safetensors", {"format": "pt"})) is None
    (tmp_path / "w.pth").write_bytes(b"not weights at all")
    assert read_metadata(tmp_path / "w.pth") is None


def changed(**fields: Any) -> str:
    content = json.loads(to_header(WeightsMetadata(Recipe(), ("a",)))[KEY])
    return json.dumps({**content, **fields})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "format is list"),
        (changed(format=2), "format is 2"),
        (changed(recipe={"model": {"nome": "x"}}), "model.nome"),
        (changed(recipe=3), "recipe field"),
        (changed(class_names="cats"), "class_names"),
        (changed(class_names=[1]), "class_names"),
        (changed(class_ids=["1"]), "class_ids"),
        (changed(weights="other"), "weights"),
        (changed(step=-1), "step"),
        ("{" + " " * MAX_BYTES + "}", "bytes"),
    ],
)
def test_malformed_metadata_is_an_error_that_says_where_and_why(tmp_path: Path, text: str, why: str) -> None:
    file = write(tmp_path / "w.safetensors", {KEY: text})
    with pytest.raises(CheckpointError) as caught:
        read_metadata(file)
    assert caught.value.code == ExitCode.CHECKPOINT
    assert why in caught.value.why and caught.value.where == str(file) and "--recipe" in caught.value.hint
