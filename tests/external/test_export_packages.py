"""Exported weights load strictly in the real torchvision and timm, and give the numbers of the model there.

Needs both packages in versions that fit torch: pip install 'reconv[timm]'. The torchvision wheels are built for CUDA;
beside a CPU torch, `torchvision::nms` and `torchvision::qnms` must be declared with torch.library whenever torchvision
is imported, also by run.py: a `.pth` file in the environment can do it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from export_examples import example_recipe, write_photographs, write_weights

import reconv

pytest.importorskip("timm", reason="pip install 'reconv[timm]'", exc_type=ImportError)
pytest.importorskip("torchvision", reason="pip install 'reconv[torchvision]'", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("default")

TORCHVISION = (
    "resnet18",
    "resnet50",
    "resnext50_32x4d",
    "wide_resnet50_2",
    "mobilenet_v2",
    "efficientnet_b0",
    "googlenet",
)


def export(folder: Path, network: str, target: str, options: dict[str, Any]) -> dict[str, Any]:
    """The report of an export, after the gate has run the file in the package."""
    recipe = example_recipe(network, size=64, options=options)
    weights = write_weights(folder / "weights.safetensors", recipe)
    result = reconv.export(weights, to=target, out=folder / "out", images=write_photographs(folder / "photos"))
    settings = json.loads((result.folder / "preprocess.json").read_text())
    assert result.report["passed"] and result.report["logits"]["unit"] > 0.01
    assert result.report["logits"]["largest_difference"] < 1e-4
    return dict(settings["network_of"])


@pytest.mark.parametrize("network", TORCHVISION)
def test_a_pth_file_gives_the_numbers_of_the_model_in_torchvision(tmp_path: Path, network: str) -> None:
    assert export(tmp_path, network, "torchvision-pth", {})["package"] == "torchvision"


@pytest.mark.parametrize(
    ("network", "options"),
    [
        ("resnet26", {}),
        ("resnet50", {}),
        ("resnext101_32x4d", {}),
        ("mobilenet_v2", {}),
        ("mobilenet_v2", {"padding": "same", "norm_eps": 1e-3}),
        ("efficientnet_b0", {}),
        ("efficientnet_b1", {"padding": "same", "norm_eps": 1e-3}),
    ],
)
def test_a_safetensors_file_gives_the_numbers_of_the_model_in_timm(
    tmp_path: Path, network: str, options: dict[str, Any]
) -> None:
    assert export(tmp_path, network, "safetensors", options)["package"] == "timm"
    assert (tmp_path / "out" / "timm_names.json").is_file()


def test_a_safetensors_file_of_a_network_that_timm_lacks_is_checked_in_torchvision(tmp_path: Path) -> None:
    assert export(tmp_path, "googlenet", "safetensors", {})["package"] == "torchvision"
