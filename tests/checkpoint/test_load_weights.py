"""Weights of other programs: reading them without running code, and loading them into a model."""

from __future__ import annotations

import argparse
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from reconv.checkpoint.load_weights import compare_weights, load_weights, read_weights
from reconv.core.errors import CheckpointError, ExitCode
from reconv.models import build_model

FIXTURES = Path(__file__).parent / "interop/fixtures/tensorflow"


def network(num_classes: int = 4) -> nn.Module:
    return nn.Sequential(OrderedDict(conv1=nn.Conv2d(3, 8, 3), bn1=nn.BatchNorm2d(8), fc=nn.Linear(8, num_classes)))


def weights_of(seed: int = 1, num_classes: int = 4) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(t.shape, generator=draw) if t.is_floating_point() else torch.tensor(seed)
        for name, t in network(num_classes).state_dict().items()
    }


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


RIGHT, WRONG = weights_of(1), weights_of(2)

FOREIGN: dict[str, Any] = {
    "bare": RIGHT,
    "ordered": OrderedDict(RIGHT),
    "data parallel": prefixed("module.", RIGHT),
    "compiled": prefixed("_orig_mod.", RIGHT),
    "compiled data parallel": prefixed("module._orig_mod.module.", RIGHT),
    "compiled inside": {name.replace("conv1.", "conv1._orig_mod."): t for name, t in RIGHT.items()},
    "torchvision": {"model": RIGHT, "optimizer": {"state": {0: {"m": torch.ones(1)}}}, "epoch": 3},
    "torchvision with arguments": {"model": RIGHT, "args": argparse.Namespace(lr=0.1, model="resnet50")},
    "torchvision ema": {"model": WRONG, "model_ema": {"n_averaged": torch.tensor(3), **prefixed("module.", RIGHT)}},
    "timm": {"arch": "resnet50", "epoch": 7, "metric": 80.1, "state_dict": RIGHT},
    "timm ema": {"state_dict": WRONG, "state_dict_ema": RIGHT},
    "lightning": {"state_dict": {**prefixed("model.", RIGHT), "criterion.weight": torch.ones(3)}, "epoch": 1},
    "lightning compiled": {"state_dict": prefixed("model._orig_mod.", RIGHT), "hyper_parameters": {"lr": 0.1}},
    "a container called checkpoint": {"checkpoint": {"state_dict": RIGHT}, "epoch": 3},
    "nested twice": {"state_dict": {"model": prefixed("module.model.", RIGHT)}},
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("is_zip", [True, False])
def test_weights_of_other_programs_are_unwrapped(tmp_path: Path, kind: str, is_zip: bool) -> None:
    path = tmp_path / "weights.pth"
    torch.save(FOREIGN[kind], path, _use_new_zipfile_serialization=is_zip)
    found = read_weights(path)
    for name, tensor in RIGHT.items():
        assert torch.equal(found[name], tensor), name
    assert set(found) - set(RIGHT) <= {"n_averaged", "criterion.weight"}


def test_raw_weights_can_be_preferred_to_ema(tmp_path: Path) -> None:
    torch.save({"state_dict": RIGHT, "state_dict_ema": WRONG}, tmp_path / "w.pth")
    found = read_weights(tmp_path / "w.pth", prefer_ema=False)
    assert torch.equal(found["fc.weight"], RIGHT["fc.weight"])


def test_safetensors_are_detected_by_content(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.pth", "model"):
        save_file(prefixed("module.", RIGHT), tmp_path / name)
        assert read_weights(tmp_path / name).keys() == RIGHT.keys()


class Malicious:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle", "deep"])
def test_a_pickle_that_would_run_code_is_rejected_and_nothing_runs(tmp_path: Path, form: str) -> None:
    path, mark = tmp_path / "weights.pth", tmp_path / "executed"
    payload: Any = {"state_dict": RIGHT, "extra": Malicious(mark)}
    if form == "pickle":
        path.write_bytes(pickle.dumps({"extra": Malicious(mark)}, protocol=2))
    elif form == "deep":
        torch.save({"state_dict": {**RIGHT, "x": [{"y": Malicious(mark)}]}}, path)
    else:
        torch.save(payload, path, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(CheckpointError, match=r"posix\.mkdir") as exc_info:
        read_weights(path)
    assert exc_info.value.code == ExitCode.CHECKPOINT
    assert exc_info.value.where == str(path)
    assert not mark.exists()
    if form == "pickle":
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert mark.exists(), "the file must be one that does run code where it is let"


def test_a_pickled_module_is_rejected(tmp_path: Path) -> None:
    torch.save(network(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"torch\.nn\.modules\.container\.Sequential"):
        read_weights(tmp_path / "model.pt")


def test_damaged_files_are_errors_with_their_path(tmp_path: Path) -> None:
    torch.save(RIGHT, tmp_path / "good.pth")
    save_file(RIGHT, tmp_path / "good.safetensors")
    num_cases = 0
    for good in (tmp_path / "good.pth", tmp_path / "good.safetensors"):
        data = good.read_bytes()
        for content in (b"", b"\x80", b"hello, this is text", data[:5], data[:100], data[: len(data) // 2], data[:-1]):
            path = tmp_path / "damaged"
            path.write_bytes(content)
            with pytest.raises(CheckpointError, match="cannot be read") as exc_info:
                read_weights(path)
            assert exc_info.value.where == str(path)
            num_cases += 1
    assert num_cases == 14


def test_a_plain_pickle_is_rejected_without_torchs_advice_to_run_it(tmp_path: Path) -> None:
    for protocol in (2, 4):
        (tmp_path / "w.pkl").write_bytes(pickle.dumps({"fc.weight": [1.0, 2.0]}, protocol=protocol))
        with pytest.raises(CheckpointError, match=r"a pickle not written by torch") as exc_info:
            read_weights(tmp_path / "w.pkl")
        assert not any(word in str(exc_info.value) for word in ("weights_only", "Re-running", "torch.load"))


@pytest.mark.parametrize("payload", [{}, {"epoch": 3}, [1, 2], torch.ones(3), {"state_dict": {}}, {"model": {"a": 1}}])
def test_a_file_without_tensors_is_an_error_with_what_it_has(tmp_path: Path, payload: Any) -> None:
    torch.save(payload, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="the file has no weights"):
        read_weights(tmp_path / "w.pth")


def test_missing_files_and_duplicate_names_exit_with_code_4(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such weights file"):
        read_weights(tmp_path / "absent.pth")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_weights(tmp_path)
    torch.save({**RIGHT, **prefixed("module.", WRONG)}, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="two tensors for conv1"):
        read_weights(tmp_path / "w.pth")


def test_the_report_has_loaded_missing_unexpected_and_reshaped_tensors() -> None:
    tensors = weights_of(1, num_classes=10)
    del tensors["bn1.running_mean"]
    tensors["head.bias"] = torch.ones(1)
    report = compare_weights(network(4), tensors)
    assert set(report.loaded) == {
        "conv1.weight",
        "conv1.bias",
        "bn1.weight",
        "bn1.bias",
        "bn1.running_var",
        "bn1.num_batches_tracked",
    }
    assert report.missing == ("bn1.running_mean",)
    assert report.unexpected == ("head.bias",)
    assert report.reshaped == (("fc.weight", (10, 8), (4, 8)), ("fc.bias", (10,), (4,)))
    assert not report.is_exact
    assert "fc.weight [10, 8] -> [4, 8]" in str(report)


def test_loading_keeps_strides_dtype_and_identity_of_each_parameter() -> None:
    model = network().to(dtype=torch.float64, memory_format=torch.channels_last)
    before = {name: (t.data_ptr(), t.stride(), t.dtype) for name, t in model.state_dict().items()}
    report = load_weights(model, RIGHT, strict=True)
    assert report.is_exact and len(report.loaded) == len(RIGHT) == 9
    after = model.state_dict()
    assert {name: (t.data_ptr(), t.stride(), t.dtype) for name, t in after.items()} == before
    assert not after["conv1.weight"].is_contiguous()
    for name, tensor in RIGHT.items():
        assert torch.equal(after[name], tensor.to(after[name].dtype)), name


def test_strict_loading_of_another_model_changes_nothing() -> None:
    cases = [weights_of(1, num_classes=10), {**RIGHT, "extra": torch.ones(1)}, dict(list(RIGHT.items())[1:])]
    for tensors in cases:
        model = network()
        before = {name: t.clone() for name, t in model.state_dict().items()}
        with pytest.raises(CheckpointError, match="do not match the model") as exc_info:
            load_weights(model, tensors, strict=True, source="runs/a/1")
        assert exc_info.value.where == "runs/a/1"
        assert any(name in exc_info.value.why for name in ("fc.weight", "extra", "conv1.weight"))
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert len(cases) == 3


def test_a_new_head_is_unchanged_when_not_strict() -> None:
    model = network(4)
    head = model.state_dict()["fc.weight"].clone()
    report = load_weights(model, weights_of(1, num_classes=1000), strict=False)
    assert [name for name, _, _ in report.reshaped] == ["fc.weight", "fc.bias"]
    assert torch.equal(model.state_dict()["fc.weight"], head)
    assert torch.equal(model.state_dict()["conv1.weight"], RIGHT["conv1.weight"])


def test_no_common_name_is_an_error_even_when_not_strict() -> None:
    with pytest.raises(CheckpointError, match="do not match the model"):
        load_weights(network(), {"features.0.weight": torch.ones(1)}, strict=False)


def test_a_prefix_is_removed_only_if_the_model_does_not_have_it() -> None:
    wrapped = {**prefixed("backbone.", RIGHT), "projector.weight": torch.ones(2)}
    assert compare_weights(network(), wrapped).is_exact
    detector = nn.ModuleDict({"backbone": network()})
    assert compare_weights(detector, wrapped).unexpected == ("projector.weight",)


@pytest.mark.parametrize("head", ["fc.", "linear.", "backbone.fc."])
def test_a_head_without_the_prefix_is_loaded_too(head: str) -> None:
    model = build_model("resnet8_cifar", num_classes=4)
    tensors = {name: torch.rand(t.shape) for name, t in model.state_dict().items()}
    body = {name: t for name, t in tensors.items() if not name.startswith("fc.")}
    rest = {name.replace("fc.", head): t for name, t in tensors.items() if name.startswith("fc.")}
    report = load_weights(model, {**prefixed("backbone.", body), **rest, "projector.bias": torch.ones(1)}, strict=False)
    assert report.missing == () and len(report.loaded) == len(tensors)
    assert not report.is_mostly_new
    for name in ("conv1.weight", "fc.weight"):
        assert torch.equal(model.state_dict()[name], tensors[name])


def test_loading_less_than_half_of_a_model_is_a_warning() -> None:
    model = build_model("resnet8_cifar", num_classes=4)
    tensors = {name: torch.rand(t.shape) for name, t in model.state_dict().items()}
    few = compare_weights(model, {name: tensors[name] for name in ("fc.weight", "conv1.weight")})
    assert few.is_mostly_new
    assert "WARNING: only 2 tensors loaded, less than half of the model" in str(few)
    headless = compare_weights(model, {name: t for name, t in tensors.items() if not name.startswith("fc.")})
    assert not headless.is_mostly_new
    assert "WARNING" not in str(headless)
    assert "1 tensor loaded" in str(compare_weights(network(), {"fc.weight": RIGHT["fc.weight"]}))


@pytest.mark.parametrize("prefix", ["net.", "encoder.trunk.", "module.classifier_model."])
def test_any_common_prefix_is_removed(prefix: str) -> None:
    wrapped = {**prefixed(prefix, RIGHT), "criterion.weight": torch.ones(3)}
    model = network()
    assert load_weights(model, wrapped, strict=True).is_exact
    assert torch.equal(model.state_dict()["fc.weight"], RIGHT["fc.weight"])


def test_a_few_common_names_under_a_prefix_are_not_enough() -> None:
    with pytest.raises(CheckpointError, match="do not match the model"):
        load_weights(
            network(),
            {"layer1.0.bn1.weight": RIGHT["bn1.weight"], "layer1.0.conv2.weight": torch.ones(1)},
            strict=False,
        )


def test_batch_counters_alone_do_not_match() -> None:
    with pytest.raises(CheckpointError, match="do not match the model"):
        load_weights(network(), {"bn1.num_batches_tracked": torch.tensor(1), "other": torch.ones(1)}, strict=False)


def test_synonyms_are_renamed_only_if_the_model_lacks_the_name() -> None:
    ours = build_model("resnet8_cifar", num_classes=4, shortcut="B")
    tensors = ours.state_dict()
    foreign = {
        name.replace("fc.", "linear.").replace(".downsample.", ".shortcut."): torch.randn_like(t.float())
        for name, t in tensors.items()
    }
    assert sum(".shortcut." in name for name in foreign) > 6
    assert load_weights(ours, foreign, strict=True).is_exact
    assert torch.equal(ours.state_dict()["fc.bias"], foreign["linear.bias"])
    own = nn.ModuleDict({"linear": nn.Linear(2, 2), "fc": nn.Linear(2, 2)})
    report = compare_weights(own, {"linear.weight": torch.ones(2, 2)})
    assert (report.loaded, set(report.missing)) == (("linear.weight",), {"linear.bias", "fc.weight", "fc.bias"})


def test_a_tensorflow_checkpoint_gets_torchvision_names_without_the_background_class() -> None:
    path = FIXTURES / "official"
    all_classes = read_weights(path)
    assert len(all_classes["fc.weight"]) == 11
    assert len(read_weights(path, num_classes=11)["fc.weight"]) == 11
    assert len(read_weights(path, num_classes=7)["fc.weight"]) == 11
    without = read_weights(path, num_classes=10)
    assert torch.equal(without["fc.weight"], all_classes["fc.weight"][1:])
    assert torch.equal(without["fc.bias"], all_classes["fc.bias"][1:])
    assert torch.equal(without["conv1.weight"], all_classes["conv1.weight"])


def test_files_without_batch_counters_match_exactly() -> None:
    old = {name: t for name, t in RIGHT.items() if not name.endswith("num_batches_tracked")}
    assert load_weights(network(), old, strict=True).is_exact
