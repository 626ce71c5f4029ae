from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import safetensors.torch
from PIL import Image

import reconv
from reconv.build.saved_model import read_saved_model, recipe_of_state
from reconv.build.weights_file import published_model
from reconv.checkpoint.download_weights import TORCHVISION
from reconv.checkpoint.locate import LocatedWeights, locate
from reconv.checkpoint.safetensors_bytes import encode
from reconv.checkpoint.weights_metadata import read_header
from reconv.core.errors import CheckpointError, ExitCode, UsageError
from reconv.inference.predictor import Predictor
from reconv.models import build_model, model_names
from reconv.trainer.callbacks.checkpoint_average import average


def test_a_recipe_of_another_version_is_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match="cannot read the recipe") as exc_info:
        recipe_of_state({"recipe": {"optimizer": {"kind": "sgd"}, "records": ["csv"]}}, Path("step-000000010"))
    assert exc_info.value.code == ExitCode.CHECKPOINT and "2 fields" in str(exc_info.value)


def test_a_weights_file_by_itself_gives_the_metrics_and_predictions_of_its_run(
    classifier: Path, tmp_path: Path
) -> None:
    checkpoint = locate(classifier).checkpoint
    assert checkpoint is not None
    for part, weights in (("model", "raw"), ("ema", "ema")):
        file = Path(shutil.copy(checkpoint / f"{part}.safetensors", tmp_path / "mine.safetensors"))
        [alone], [run] = reconv.evaluate(file), reconv.evaluate(classifier, weights=weights)
        assert (alone.metrics, alone.weights, alone.step) == (run.metrics, weights, 66)
        image = Image.new("L", (8, 8), 200)
        one, other = Predictor.load(file), Predictor.load(classifier, weights=weights)
        assert [p.classes for p in one.predict([image])] == [p.classes for p in other.predict([image])]
        assert one.class_names == other.class_names and one.has_class_names


def test_an_average_by_itself_knows_its_network(classifier: Path, tmp_path: Path) -> None:
    file = average(classifier, out=tmp_path / "a.safetensors").path
    [result] = reconv.evaluate(file)
    assert (result.weights, result.step, result.num_samples) == ("averaged", 66, 360)


def test_a_detector_by_itself_has_its_classes_and_ids(detector: Path, tmp_path: Path) -> None:
    checkpoint = locate(detector).checkpoint
    assert checkpoint is not None
    file = Path(shutil.copy(checkpoint / "model.safetensors", tmp_path / "mine.safetensors"))
    one, other = Predictor.load(file), Predictor.load(detector, weights="raw")
    assert (one.class_names, one.class_ids) == (other.class_names, other.class_ids)
    image = Image.new("RGB", (40, 30), (200, 10, 10))
    found = [p.predict([image], min_score=0.0)[0].boxes for p in (one, other)]
    assert found[0] == found[1] and found[0]


def test_weights_without_metadata_need_a_recipe_and_classes_that_fit(classifier: Path, tmp_path: Path) -> None:
    source = locate(classifier).weights
    tensors, bare = safetensors.torch.load_file(source), tmp_path / "bare.safetensors"
    bare.write_bytes(encode(tensors))
    with pytest.raises(UsageError, match="does not say which model") as caught:
        Predictor.load(bare)
    assert "--recipe" in caught.value.hint
    assert Predictor.load(bare, recipe="quickstart").class_names == tuple("0123456789")
    wrong = {**read_header(source), "reconv": read_header(source)["reconv"].replace('"0", "1"', '"0"')}
    bare.write_bytes(encode(tensors, wrong))
    with pytest.raises(CheckpointError, match="do not match the model"):
        Predictor.load(bare)


def test_published_weights_need_no_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mobilenet_v2.safetensors"
    file.write_bytes(encode(build_model("mobilenet_v2").state_dict()))
    located = LocatedWeights("weights", None, None, file, name="torchvision:mobilenet_v2.v2")
    saved = read_saved_model(located, weights="auto", recipe=None)
    preprocess = saved.recipe.data.preprocess
    assert (saved.recipe.model.name, preprocess.size, preprocess.resize) == ("mobilenet_v2", 224, 232)
    assert len(saved.class_names) == 1000


def test_every_torchvision_weights_file_has_a_network_and_its_preprocessing() -> None:
    assert len(TORCHVISION) > 20
    for name in TORCHVISION:
        found = published_model(f"torchvision:{name}")
        assert found is not None and found.recipe.model.name in model_names()
    sizes = published_model("torchvision:efficientnet_b3")
    assert sizes is not None and (sizes.recipe.data.preprocess.size, sizes.recipe.data.preprocess.resize) == (300, 320)
    assert published_model("https://example.org/resnet50.pth") is None
    assert published_model("torchvision:unknown") is None
