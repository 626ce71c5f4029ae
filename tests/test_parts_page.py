"""The code of docs/how-to/parts.md runs as it stands, and the public names are those that were decided on."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from data_examples import write_image_tree

import reconv
from reconv import api, optim

PAGE = Path(__file__).parents[1] / "docs/how-to/parts.md"
SECTIONS = ("ImageLoader", "optim", "Checkpointer", "build_model")

# A name that leaves these lists breaks programs of others: it needs a line in CHANGELOG.md and a release.
PUBLIC = {
    *("Callback", "Checkpointer", "FuseReport", "ImageLoader", "Launch", "Predictor", "Ray", "RunInfo", "__version__"),
    *("build_model", "evaluate", "export", "fuse", "load", "predict", "train", "tune", "unfuse"),
}
API = (PUBLIC - {"__version__"}) | {
    *("AveragedWeights", "ClassScore", "DetectedBox", "DryRunResult", "EvalResult", "ExportResult", "ImageSample"),
    *("Prediction", "PredictionList", "RunResult", "TrainingRun", "TuneResult", "average", "dry_run"),
}
OPTIM = ["EMA", "FusedLAMB", "FusedLARS", "FusedRMSpropTF"]
SIGNATURES = {
    "fuse": "(model, *, inplace=True, image=None, dtype=torch.bfloat16, everything=False)",
    "unfuse": "(model)",
    "build_model": "(name, num_classes=1000, *, seed=0, image_shape=None, **options)",
    "ImageLoader": "(data, batch_size, *, split='train', train=None, size=224, device='cpu', dtype=torch.float32, "
    "channels_last=True, workers=None, seed=0, rank=None, world_size=None, settings=None)",
    "Checkpointer": "(folder, *, keep=2, rank=None, random=True)",
    "Checkpointer.save": "(self, step, *, wait=False, **objects)",
    "Checkpointer.restore": "(self, **objects)",
    "optim.EMA": "(model, decay=0.9999, *, warmup=True)",
    "optim.FusedLAMB": "(params, lr=0.001, *, betas=(0.9, 0.999), eps=1e-06, weight_decay=0.0)",
    "optim.FusedLARS": "(params, lr, *, momentum=0.9, weight_decay=0.0, nesterov=False, trust_coefficient=0.001, "
    "eps=0.0)",
    "optim.FusedRMSpropTF": "(params, lr=0.01, *, alpha=0.9, eps=1e-10, momentum=0.0, weight_decay=0.0)",
}


def blocks() -> dict[str, str]:
    """The code of each section."""
    found = re.findall(r"^## (\w+)\n(?:(?!^## ).)*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return dict(found)


@pytest.mark.parametrize("section", SECTIONS)
def test_the_code_of_each_part_runs(section: str) -> None:
    assert tuple(blocks()) == SECTIONS
    code = blocks()[section]
    assert len(code.splitlines()) <= 25
    write_image_tree(Path("photos"))
    names: dict[str, object] = {}
    exec(compile(code, f"parts.md, {section}", "exec"), names)
    if section == "Checkpointer":
        interrupted = names["model"]
        again: dict[str, object] = {}
        exec(compile(code.replace("step < 6", "step < 9"), "again", "exec"), again)
        assert names["step"] == 6 and again["step"] == 10  # an epoch has two batches, and both loops end with one
        assert isinstance(interrupted, torch.nn.Module)


def test_the_public_names_are_frozen() -> None:
    assert set(reconv.__all__) == PUBLIC
    assert set(api.__all__) == API
    assert [name for name in optim.__all__ if inspect.getmodule(getattr(optim, name)) is _module()] == OPTIM
    assert all(getattr(reconv, name) is not None for name in PUBLIC) and reconv.optim is optim
    assert all(getattr(api, name) is not None for name in API)


def _module() -> object:
    from reconv.optim import torch_optimizers

    return torch_optimizers


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signatures_of_parts_are_frozen_and_typed(name: str) -> None:
    thing = reconv
    for part in name.split("."):
        thing = getattr(thing, part)
    signature = inspect.signature(thing)  # type: ignore[arg-type]
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    assert str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)) == SIGNATURES[name]
    untyped = [p.name for p in signature.parameters.values() if p.annotation is p.empty and p.name != "self"]
    assert untyped == [] and inspect.getdoc(thing)
