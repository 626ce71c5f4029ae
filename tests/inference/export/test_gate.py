"""The gate finds every way in which an exported model may drift from the trained one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from export_examples import example_recipe, write_photographs, write_weights
from onnx import numpy_helper

import reconv
from reconv.core.errors import ExportError
from reconv.exporters.gate import check as gate
from reconv.exporters.gate.images import GateImage, GateImages, collect_images
from reconv.inference.backends.base import no_log
from reconv.inference.predictor import Predictor

Case = tuple[gate.Reference, GateImages, Path]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A color network with its reference outputs, and the folder of its export."""
    folder = tmp_path_factory.mktemp("gate")
    weights = write_weights(folder / "weights.safetensors", example_recipe("resnet8_cifar", evaluate={"tta": "flip"}))
    photos = write_photographs(folder / "photos")
    exported = reconv.export(weights, to="onnx", out=folder / "export", images=photos)
    (folder / "images").mkdir()
    predictor = Predictor.load(weights, device="cpu")
    collected = collect_images(predictor, photos, None, None, folder / "images")
    return gate.compute_reference(predictor, collected, no_log), collected, exported.folder


def check(case: Case, folder: Path) -> gate.GateResult:
    reference, collected, _ = case
    temporary = folder / "temporary"
    temporary.mkdir()
    files = [image.path for image in reference.images]
    found = gate.run_exported(folder / "run.py", files, ("reconv", "torch"), temporary)
    return gate.compare(
        reference, found, task="classification", precision="fp32", num_probes=collected.num_probes, max_drop=0
    )


def tampered(case: Case, tmp_path: Path, old: str, new: str) -> Path:
    folder = tmp_path / "tampered"
    shutil.copytree(case[2], folder)
    source = (folder / "run.py").read_text()
    assert source.count(old) == 1
    (folder / "run.py").write_text(source.replace(old, new))
    return folder


def test_an_untouched_copy_passes(case: Case, tmp_path: Path) -> None:
    result = check(case, Path(shutil.copytree(case[2], tmp_path / "copy")))
    assert result.passed and result.facts["decisions"]["num_different"] == 0


@pytest.mark.parametrize(
    ("old", "new"),
    {
        "not antialiased": (
            "image.resize((size, size), resampling, box=(left, top, right, bottom))",
            "image.transform((size, size), Image.Transform.EXTENT, (left, top, right, bottom), Image.Resampling(2))",
        ),
        "nearest": ("resampling, box=(left", "Image.Resampling.NEAREST, box=(left"),
        "another filter": ("resampling, box=(left", "Image.Resampling.BICUBIC, box=(left"),
        "BGR": ("outputs = run(model, np.stack(pixels)", "outputs = run(model, np.stack(pixels)[..., ::-1]"),
        "EXIF ignored": ("        ImageOps.exif_transpose(image, in_place=True)\n", ""),
        "crop off by one": (
            "left, top = round((new_width - size) / 2)",
            "left, top = 1 + round((new_width - size) / 2)",
        ),
        "16 bits clipped": (".astype(np.uint16) >> 8)", ".astype(np.uint16).clip(0, 255))"),
    }.values(),
)
def test_other_preprocessing_is_refused(case: Case, tmp_path: Path, old: str, new: str) -> None:
    result = check(case, tampered(case, tmp_path, old, new))
    assert not result.passed
    is_seen_in_pixels = "pixels)[..., ::-1]" not in new
    assert result.failures[0].startswith("run.py prepares" if is_seen_in_pixels else "the logits of")


def change_weights(model: onnx.ModelProto) -> None:
    tensor = max(model.graph.initializer, key=lambda item: np.prod(item.dims))
    values = numpy_helper.to_array(tensor) * np.float32(1.001)
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def swap_classes(model: onnx.ModelProto) -> None:
    [tensor] = [item for item in model.graph.initializer if list(item.dims) == [10]]
    values = numpy_helper.to_array(tensor)[::-1].copy()
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


@pytest.mark.parametrize("change", [change_weights, swap_classes])
def test_another_model_is_refused(case: Case, tmp_path: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    folder = Path(shutil.copytree(case[2], tmp_path / "tampered"))
    model = onnx.load(folder / "model.onnx")
    change(model)
    onnx.save(model, folder / "model.onnx")
    result = check(case, folder)
    assert not result.passed and "the logits of 17 of 17 images differ" in result.failures[0]


def test_a_script_that_needs_reconv_does_not_run(case: Case, tmp_path: Path) -> None:
    folder = tampered(case, tmp_path, "import argparse\n", "import argparse\nimport reconv\n")
    with pytest.raises(ExportError, match="does not run") as caught:
        check(case, folder)
    assert "reconv" in caught.value.why


def compare(ours: np.ndarray, theirs: np.ndarray, *, precision: str = "fp32", task: str = "classification", **options):
    images = [GateImage(f"image {row}", Path(), target=0) for row in range(len(ours))]
    crcs = np.zeros(len(ours), np.uint32)
    reference = gate.Reference(images, crcs, {"logits": ours}, 0)
    found = {"logits": theirs, "pixels_crc32": crcs}
    options = {"max_drop": 0.01, **options}
    return gate.compare(reference, found, task=task, precision=precision, num_probes=0, **options)


def test_ties_are_counted_and_limited() -> None:
    ours = np.random.default_rng(0).normal(size=(100, 10))
    ours[:, :2] = 5
    ours /= ours.std()
    theirs = ours.copy()
    theirs[:1, 1] += 1e-6
    result = compare(ours, theirs)
    assert result.passed and result.facts["decisions"]["num_ties"] == 1
    theirs[:2, 1] += 1e-6
    assert "differs by a tie, of which 1 are allowed" in compare(ours, theirs).failures[0]
    theirs[:, 1] = ours[:, 1]
    theirs[3, 7] = np.nan
    assert "logits of 1 of 100 images differ" in compare(ours, theirs).failures[0]


def test_int8_is_judged_by_accuracy_alone() -> None:
    ours = np.zeros((100, 3))
    ours[:, 0] = 1
    theirs = ours * 0.5
    theirs[0, 1] = 9
    assert compare(ours, theirs, precision="int8", max_drop=0.01).passed
    theirs[1, 1] = 9
    assert "2.00 points lost, more than 1" in compare(ours, theirs, precision="int8", max_drop=0.01).failures[0]


def test_labels_of_a_multilabel_model_must_not_change() -> None:
    ours = np.random.default_rng(0).normal(size=(50, 4))
    ours[7, 2] = 1e-6
    theirs = ours.copy()
    theirs[7, 2] = -1e-6
    assert compare(ours, theirs, task="multilabel").facts["decisions"]["num_ties"] == 1
    theirs[8, 1] *= -1
    assert compare(ours, theirs, task="multilabel").failures[-1] == "the set of labels of 1 images differs: image 8"
