"""`reconv predict --json`: index and name of every class and box; class names for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from data_examples import encode, noise

import reconv
from reconv.cli import main
from reconv.core.errors import ExitCode
from reconv.inference.predictor import Predictor
from reconv.models import build_model


def predicted(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, list[dict[str, Any]]]:
    with pytest.raises(SystemExit) as ended:
        main(["predict", *map(str, args), "--json"])
    return int(ended.value.code or 0), json.loads(capsys.readouterr().out)


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    """An image and a file that is none."""
    paths = [tmp_path / "good.png", tmp_path / "torn.png"]
    paths[0].write_bytes(encode(noise(32, 32, 3, 1)))
    paths[1].write_bytes(b"no image")
    return paths


def test_classes_have_an_index_and_a_name(
    classifier: Path, images: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, [good, torn] = predicted(capsys, classifier, *images, "--top", 10)
    assert code == ExitCode.DATA
    assert sorted(found["index"] for found in good["classes"]) == list(range(10))
    assert all(found["name"] == str(found["index"]) for found in good["classes"])
    assert set(torn) == {"path", "error"} and "does not decode" in torn["error"]


def test_boxes_have_an_index_and_a_name(detector: Path, images: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, [good, torn] = predicted(capsys, detector, *images, "--min-score", 0)
    names = Predictor.load(detector).class_names
    assert good["boxes"] and all(box["name"] == names[box["index"]] for box in good["boxes"])
    assert set(torn) == {"path", "error"}


def test_a_thousand_classes_without_names_are_those_of_imagenet(tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    state = build_model("resnet18", num_classes=1000).state_dict()
    state["fc.bias"] += 100 * (state["fc.bias"].new_tensor(range(1000)) == 207)
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in state.items()}, weights)
    predictor = Predictor.load(weights, recipe="resnet18", device="cpu", backend="eager")
    assert predictor.class_names[207] == "n02099601" and not predictor.has_class_names
    [prediction] = predictor.predict([noise(40, 40, 3, 0)], top=1)
    assert (prediction.classes[0].name, prediction.classes[0].index) == ("golden retriever", 207)
    for name in ("n02099601", "golden retriever"):
        data = tmp_path / name.replace(" ", "-")
        (data / name).mkdir(parents=True)
        (data / name / "1.png").write_bytes(encode(noise(40, 40, 3, 0)))
        [result] = reconv.evaluate(weights, data=data, recipe="resnet18", device="cpu")
        assert (result.metrics["top1"], result.num_samples) == (1.0, 1)


def test_names_beside_the_data_are_saved_with_the_model(tmp_path: Path) -> None:
    for label, name in enumerate(("n1", "n2")):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(10):
            (tmp_path / "data" / name / f"{number}.png").write_bytes(encode(noise(8, 8, 3, 100 * label + number)))
    settings = {"data.source": "auto", "batch.size": "8", "length": "1step", "schedule.warmup": "0step"}
    overrides = [(field, value, "--set") for field, value in settings.items()]

    def train(out: str) -> Path:
        return reconv.train("quickstart", data=tmp_path / "data", out=tmp_path / out, overrides=overrides).folder

    plain = train("plain")
    (tmp_path / "data" / "classes.json").write_text('{"n1": "one", "n2": "two"}')
    named = Predictor.load(train("named"))
    assert (named.class_names, named.classes) == (("n1", "n2"), ("one", "two"))
    assert named.data_fingerprint == Predictor.load(plain).data_fingerprint
    assert {found.name for found in named.predict([noise(8, 8, 3, 0)])[0].classes} == {"one", "two"}
    (tmp_path / "data" / "classes.json").unlink()
    assert reconv.evaluate(tmp_path / "named", data=tmp_path / "data")[0].num_samples > 0
