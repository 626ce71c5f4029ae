"""Tested releases are compared as numbers, and differences between releases are bridged."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from reconv.cli import main
from reconv.core.compat import (
    ON_GPUS,
    TESTED,
    ReleaseRange,
    complete_interpreter,
    installed_version,
    name_in_graphs,
    ranges_of,
    semantic_tensor,
    untested_packages,
)

GPU = torch.device("cuda", 0)


def install(folder: Path, package: str, version: str) -> None:
    """Make a package look installed, ahead of a real one."""
    metadata = folder / f"{package}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [("2.11", True), ("2.13.0+cpu", True), ("2.15.4", True), ("2.9.1", False), ("2.16.0a0+git", False), ("3.0", False)],
)
def test_releases_are_compared_as_numbers_and_patches_of_the_newest_are_tested(version: str, is_tested: bool) -> None:
    assert (version in ReleaseRange("torch", "2.11", "2.15")) is is_tested


def test_the_range_of_a_single_release_is_that_release() -> None:
    assert [str(tested) for tested in ranges_of("triton")] == ["3.6 on GPUs", "3.6 to 3.9 in the interpreter"]
    assert str(ReleaseRange("torch", "2.11", "2.15")) == "2.11 to 2.15"


def test_this_environment_is_tested() -> None:
    installed = {tested.package: installed_version(tested.package) for tested in TESTED}
    assert installed["torch"] is not None
    outside = {
        package: version
        for package, version in installed.items()
        if version is not None and not any(version in tested for tested in ranges_of(package))
    }
    assert outside == {}


def test_triton_counts_on_gpus_alone(site: Path) -> None:
    install(site, "triton", "9.9.9")
    assert untested_packages(is_gpu=False) == []
    ((name, version, tested),) = untested_packages(is_gpu=True)
    assert (name, version, tested.use) == ("triton", "9.9.9", ON_GPUS)


def test_the_doctor_shows_the_tested_releases_and_one_that_is_not(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, "timm", "9.9.9")
    with pytest.raises(SystemExit) as end:
        main(["doctor"])
    assert end.value.code == 0  # nothing required is missing
    text = capsys.readouterr().out
    (torch_range,) = ranges_of("torch")
    assert f"{installed_version('torch')} (tested: {torch_range})" in text
    assert "9.9.9 (tested: 1.0.20 to 1.0.31, not this one)" in text
    with pytest.raises(SystemExit):
        main(["doctor", "--json"])
    advice = json.loads(capsys.readouterr().out)["advice"]
    assert ("timm", "note") in {(item["name"], item["level"]) for item in advice}


def test_tensors_of_the_interpreter_are_made_by_whichever_method_this_triton_has() -> None:
    older = types.SimpleNamespace(tensor=lambda handle, kind: ("tensor", handle, kind))
    newer = types.SimpleNamespace(make_tensor=lambda handle, kind: ("make_tensor", handle, kind), tensor=None)
    assert semantic_tensor(older, 1, 2) == ("tensor", 1, 2)
    assert semantic_tensor(newer, 1, 2) == ("make_tensor", 1, 2)


class OlderBuilder:
    def get_fp32(self, value: float) -> float:
        return value

    def create_fp_trunc(self, value: float, dtype: object) -> tuple[float, object]:
        return value, dtype


class NewerBuilder(OlderBuilder):
    def get_bf16(self, value: float) -> str:
        return "its own"


def completed(builder: type) -> types.SimpleNamespace:
    """A module like Triton's interpreter, after it was completed."""
    module = types.SimpleNamespace(
        InterpreterBuilder=builder,
        tl=types.SimpleNamespace(bfloat16="bf16"),
        _patch_lang_tensor=lambda tensor, scope: scope.set_attr(tensor, "__index__", lambda self: "its own"),
    )
    complete_interpreter(module)
    return module


def test_an_interpreter_without_bfloat16_constants_gets_them() -> None:
    assert completed(OlderBuilder).InterpreterBuilder().get_bf16(0.5) == (0.5, "bf16")
    assert completed(NewerBuilder).InterpreterBuilder().get_bf16(0.5) == "its own"


@pytest.mark.parametrize(("triton", "index"), [("3.6.0", 7), ("3.7.0", "its own")])
def test_indices_of_the_interpreter_are_numbers_of_one_element(site: Path, triton: str, index: object) -> None:
    install(site, "triton", triton)
    found: dict[str, Callable[[object], object]] = {}
    scope = types.SimpleNamespace(set_attr=lambda tensor, name, value: found.update({name: value}))
    completed(NewerBuilder)._patch_lang_tensor("tensor", scope)
    data = np.array([7])
    assert found["__index__"](types.SimpleNamespace(handle=types.SimpleNamespace(data=data))) == index


class Boxes(NamedTuple):
    corners: torch.Tensor


@pytest.mark.parametrize(("version", "is_named"), [("2.11.0", True), ("2.13.0", False)])
def test_graphs_know_the_names_of_named_tuples(
    site: Path, monkeypatch: pytest.MonkeyPatch, version: str, is_named: bool
) -> None:
    names: dict[str, object] = {}
    monkeypatch.setattr("torch.fx.graph._register_custom_builtin", lambda name, line, kind: names.update({name: kind}))
    install(site, "torch", version)
    name_in_graphs(Boxes)
    name_in_graphs(tuple)
    assert names == ({"Boxes": Boxes} if is_named else {})
