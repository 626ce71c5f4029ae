"""run.py reads images exactly as evaluation does, and does without Reconv."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from export_examples import odd_images

from reconv.data.decode.pillow import decode_image
from reconv.data.transforms.host import eval_transform
from reconv.exporters.metadata import ExportMetadata
from reconv.exporters.run_script import run_script
from reconv.exporters.targets import TARGETS, find_target
from reconv.recipe.parts.data import PreprocessConfig

IMAGES = odd_images()
PREPROCESS = {
    "crop": PreprocessConfig(size=32, resize=36, interpolation="bilinear"),
    "bicubic": PreprocessConfig(size=32, resize="auto-ratio", interpolation="bicubic"),
    "squash": PreprocessConfig(size=40, resize=None),
    "nearest": PreprocessConfig(size=32, resize="auto-plus32", interpolation="nearest"),
    "gray": PreprocessConfig(size=32, resize=32, channels=1, mean=(0.5,), std=(0.5,)),
}


def settings(preprocess: PreprocessConfig) -> dict[str, Any]:
    metadata = ExportMetadata(
        name="example",
        task="classification",
        network="resnet8_cifar",
        preprocess=preprocess,
        class_names=(),
        display_names=(),
        class_ids=(),
        recipe_digest="",
        weights="raw",
        step=None,
    )
    return metadata.settings("model.onnx")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """run.py as a user's program would import it."""
    path = tmp_path_factory.mktemp("export") / "run.py"
    path.write_text(run_script("onnxruntime"))
    module = ModuleType("run")
    module.__file__ = str(path)
    sys.modules["run"] = module
    exec(compile(path.read_text(), path, "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("name", PREPROCESS)
def test_the_pixels_are_those_of_evaluation(script: ModuleType, name: str) -> None:
    preprocess = PREPROCESS[name]
    for kind, data in IMAGES.items():
        ours = eval_transform(decode_image(data, preprocess.channels), preprocess).transpose(1, 2, 0)
        theirs = script.preprocess(data, settings(preprocess))
        assert theirs.dtype == np.uint8 and np.array_equal(ours, theirs), kind
    assert len(IMAGES) == 30


def test_names_and_paths_do_not_act_on_the_terminal(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    escape, override = "\x1b]0;owned\x07", "\u202eexe"
    image, broken = tmp_path / f"{escape}.ppm", tmp_path / f"{override}.png"
    image.write_bytes(IMAGES["ppm"])
    broken.write_bytes(b"no image")
    named = {**settings(PREPROCESS["crop"]), "classes": [f"a{escape}\n{override}", "b"]}
    monkeypatch.setattr(script, "read_settings", lambda: named)
    monkeypatch.setattr(script, "load_model", lambda *_: lambda images: {"logits": np.zeros((len(images), 2))})
    monkeypatch.setattr(sys, "argv", ["run.py", str(image), str(broken)])
    assert script.main() == 1
    printed = "".join(capsys.readouterr())
    assert "\\x1b]0;owned\\x07" in printed and "\\u202eexe" in printed
    assert not set("\x1b\x07\u202e") & set(printed)


def test_damaged_and_huge_images_are_errors(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "MAX_PIXELS", 75 * 61 - 1)
    for data in (b"", IMAGES["bmp"][:30], IMAGES["webp"]):
        with pytest.raises((ValueError, OSError)):
            script.preprocess(data, settings(PREPROCESS["crop"]))
    script.preprocess(IMAGES["thin"], settings(PREPROCESS["crop"]))


def test_a_model_with_a_fixed_batch_size_gets_batches_of_that_size(script: ModuleType) -> None:
    sizes: list[int] = []

    def model(images: np.ndarray) -> dict[str, np.ndarray]:
        sizes.append(len(images))
        return {"logits": images.mean(axis=(1, 2))}

    images = np.random.default_rng(0).integers(1, 256, (7, 4, 4, 3), "u1")
    for batch, expected in ((3, [3, 3, 3]), (8, [8]), (None, [7])):
        sizes.clear()
        logits = script.run(model, images, {"batch": batch})["logits"]
        assert sizes == expected and np.array_equal(logits, images.mean(axis=(1, 2)))


def imported(source: str) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


RUNTIMES: Mapping[str, set[str]] = {
    "onnxruntime": {"onnxruntime"},
    "openvino": {"openvino"},
    "torch_export": {"torch"},
    "aoti": {"torch"},
    "weights": {"torch", "safetensors", "timm", "torchvision", "reconv"},  # of the last three, the one that it needs
}


def test_run_py_imports_its_runtime_numpy_and_pillow_alone() -> None:
    assert {find_target(name).runtime for name in TARGETS} == set(RUNTIMES)
    for runtime, packages in RUNTIMES.items():
        assert imported(run_script(runtime)) - set(sys.stdlib_module_names) == {"numpy", "PIL"} | packages
