"""The decoder of JPEG crops: chosen once for a run, and kept when the run is resumed."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from data_examples import encode
from jpeg_examples import encoded, photograph
from loading_examples import each_row, host_train

import reconv
from reconv.checkpoint.store import CheckpointStore
from reconv.core.errors import DataError, RecipeError
from reconv.data.decode import native
from reconv.data.decode.native import NativeSupport, choose_decoder
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.train_loader import make_train_loader
from reconv.data.readers.folder import FolderDataset
from reconv.data.transforms.geometry import crop_params
from reconv.recipe.parts.batch import BatchConfig
from reconv.recipe.parts.data import AugmentConfig, DataConfig, PreprocessConfig
from reconv.recipe.plan import Facts, Plan, make_plan
from reconv.recipe.schema import Recipe

SPEC = PreprocessConfig(size=32)
FAST, SLOW, NONE = NativeSupport("", True), NativeSupport("", False), NativeSupport("it was not compiled", False)
NATIVE, PLAIN = AugmentConfig(decoder="native"), AugmentConfig(decoder="pillow")
compiled = [pytest.mark.native, pytest.mark.usefixtures("compiled_decoder")]


def marked(test: object) -> object:
    for mark in compiled:
        test = mark(test)
    return test


def plan(facts: str = "native", source: str = "folder", **sections: object) -> Plan:
    return make_plan(Recipe.model_validate(sections), Facts(1000, 10, 10, source=source, decoder=facts))  # type: ignore[arg-type]


@marked
def test_only_crops_of_jpeg_files_differ_and_only_a_little() -> None:
    params = crop_params(NATIVE, 3, np.arange(20))
    files = {"JPEG": encoded(photograph(120, 90)), "gray": encoded(photograph(120, 90), mode="L")}
    others = {
        "progressive": encoded(photograph(120, 90), progressive=True),
        "PNG": encode(photograph(120, 90)),
    }
    for row in each_row(params):
        for data in files.values():
            ours, plain = (host_train(data, SPEC, augment, row).astype(np.int64) for augment in (NATIVE, PLAIN))
            assert 0 < np.abs(ours - plain).mean() <= 0.5
        for data in others.values():
            assert np.array_equal(host_train(data, SPEC, NATIVE, row), host_train(data, SPEC, PLAIN, row))


@marked
def test_a_bad_file_is_the_same_error_by_both_decoders() -> None:
    [params] = each_row(crop_params(NATIVE, 3, np.arange(1)))
    whole = encoded(photograph(64, 64))
    for data in (whole[: len(whole) // 2], b"no image", b""):
        annotation = []
        for augment in (NATIVE, PLAIN):
            with pytest.raises(DataError) as caught:
                host_train(data, SPEC, augment, params)
            annotation.append(str(caught.value))
        assert annotation[0] == annotation[1]


@marked
def test_batches_of_the_compiled_decoder_do_not_depend_on_workers(tree: Path) -> None:
    dataset = FolderDataset(tree, "train")
    made = []
    for workers in (0, 1, 3):
        recipe = Recipe(
            data=DataConfig(preprocess=SPEC, drop_last=False, num_workers=workers),
            batch=BatchConfig(size=4, group="all"),
        )
        facts = Facts(len(dataset), 1, 3, source="folder", decoder="native")
        loader = make_train_loader(dataset, recipe, make_plan(recipe, facts), DataContext.on_host())
        made.append(torch.cat([batch["images"] for (batch,) in loader.steps(0, 4)]))
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])


@pytest.mark.parametrize(
    ("wish", "kept", "there", "chosen"),
    [
        ("auto", None, [FAST], "native"),
        ("auto", None, [SLOW], "pillow"),
        ("auto", None, [NONE], "pillow"),
        ("auto", None, [FAST, NONE], "pillow"),
        ("auto", "pillow", [FAST], "pillow"),
        ("auto", "native", [SLOW], "native"),
        ("pillow", None, [FAST], "pillow"),
        ("native", None, [SLOW], "native"),
    ],
)
def test_auto_chooses_the_decoder_that_is_fast_on_all_ranks_and_keeps_it(
    wish: str, kept: str | None, there: list[NativeSupport], chosen: str
) -> None:
    assert choose_decoder(wish, kept, there) == chosen  # type: ignore[arg-type]


@pytest.mark.parametrize(("wish", "kept"), [("native", None), ("auto", "native"), ("native", "native")])
def test_a_decoder_of_the_recipe_or_the_resumed_run_must_be_available(wish: str, kept: str | None) -> None:
    with pytest.raises(RecipeError, match="not compiled"):
        choose_decoder(wish, kept, [FAST, NONE])  # type: ignore[arg-type]


def test_the_plan_has_the_compiled_decoder_only_where_it_is_used() -> None:
    assert plan().decoder == "native"
    assert any("native decoder" in line for line in plan().lines)
    assert plan(task="detection", augment={"crop": "ssd"}, data={"preprocess": {"resize": None}}).decoder == "native"
    assert plan(augment={"decoder": "pillow"}).decoder == "pillow"
    assert plan("pillow", augment={"decoder": "native"}).decoder == "native"
    for idle in ({"augment": {"crop": "none"}}, {"augment": {"interpolation": "nearest"}}):
        assert plan(**idle).decoder == "pillow"
    assert plan(source="digits").decoder == "pillow"
    typed = plan(augment={"decoder": "native", "crop": "none"})
    assert any("augment.decoder" in line for line in typed.lines)


def _train(tree: Path, out: Path, length: str, resume: bool = False) -> reconv.RunResult:
    given = {
        "data.preprocess.size": 32,
        "data.source": "folder",
        "augment.crop": "random_resized",
        "length": length,
        "data.preprocess.channels": 3,
        "data.preprocess.mean": [0, 0, 0],
        "data.preprocess.std": [1, 1, 1],
        "batch.size": 4,
        "batch.group": "all",
        "data.num_workers": 1,
        "save.every": "1step",
        "data.drop_last": False,
        "schedule.warmup": "0step",
    }
    overrides = [(name, value, "test") for name, value in given.items()]
    return reconv.train("quickstart", data=tree, out=out, overrides=overrides, resume=resume)


@marked
def test_a_resumed_run_keeps_its_decoder(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    _train(tree, out, "1step")
    assert _decoder_of(out) == "native"
    library = native.LIBRARY
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "none.so")
    native.problem.cache_clear()
    with pytest.raises(RecipeError, match="this run began with it, and it was not compiled"):
        _train(tree, out, "2step", resume=True)
    plain = tmp_path / "pillow"
    _train(tree, plain, "1step")
    monkeypatch.setattr(native, "LIBRARY", library)
    native.problem.cache_clear()
    _train(tree, plain, "2step", resume=True)
    assert _decoder_of(plain) == "pillow"
    _train(tree, out, "2step", resume=True)
    assert _decoder_of(out) == "native"


def _decoder_of(run: Path) -> str:
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    return str(CheckpointStore(run / "checkpoints").load(newest).state["decoder"])


def test_without_the_library_pillow_decodes(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "none.so")
    native.problem.cache_clear()
    assert native.problem() == "it was not compiled"
    assert choose_decoder("auto") == "pillow"
    data = next(tree.rglob("*.JPEG")).read_bytes()
    augment = AugmentConfig(decoder="pillow")
    [params] = each_row(crop_params(augment, 0, np.arange(1)))
    assert host_train(data, PreprocessConfig(size=16), augment, params).any()
    native.problem.cache_clear()


def test_a_broken_library_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "_jpeg.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(native, "LIBRARY", broken)
    native.problem.cache_clear()
    assert not native.available()
    assert "does not load" in native.problem()
    native.problem.cache_clear()


@pytest.mark.native
def test_a_library_of_an_older_version_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library compiled from an older source tree: it lacks functions and must be compiled again."""
    library, dataset = tmp_path / "_jpeg.so", tmp_path / "older.c"
    dataset.write_text("int reconv_jpeg_version(void) { return 1; }")
    subprocess.run([*shlex.split(os.environ.get("CC", "cc")), "-shared", "-fPIC", "-o", library, dataset], check=True)
    monkeypatch.setattr(native, "LIBRARY", library)
    native.problem.cache_clear()
    assert native.problem() == f"it has version 1 instead of {native.VERSION}: compile it again"
    assert choose_decoder("auto") == "pillow"
    monkeypatch.undo()
    native.problem.cache_clear()
