"""Loaders on data in an object store: the batches of local data, each part downloaded once and before it is needed."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from web_folder import WebFolder, web_folder

from reconv.data.convert.dataset import convert, make_target
from reconv.data.convert.open_splits import open_splits
from reconv.data.convert.transcode import TranscodeOptions
from reconv.data.dataset import Dataset
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.read_ahead import read_ahead
from reconv.data.pipeline.train_loader import make_train_loader
from reconv.data.readers.shards.packed import PackedDataset
from reconv.recipe.parts.batch import BatchConfig
from reconv.recipe.parts.data import DataConfig, PreprocessConfig
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.schema import Recipe
from reconv.storage import range_cache, remote_tree
from reconv.storage.remote_index import write_index
from reconv.storage.remote_tree import mount, shared_cache

_BLOCK = 4096


@pytest.fixture(autouse=True)
def _small_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECONV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(range_cache, "BLOCK_BYTES", _BLOCK)
    monkeypatch.setattr(remote_tree, "BLOCK_BYTES", _BLOCK)


@pytest.fixture
def packed(tree: Path) -> Path:
    """The tree in packed shards of 4 samples, with an index."""
    folder = tree.parent / "packed"
    splits, root = open_splits(str(tree), "auto", None, None)
    convert(splits, root, folder, make_target("packed", TranscodeOptions(), 4, None), 1, lambda done, total: None)
    write_index(folder)
    return folder


def _train_batches(dataset: Dataset, shuffle_window: int | None = None) -> list[torch.Tensor]:
    data = DataConfig(
        source="packed", preprocess=PreprocessConfig(size=16, resize=16), num_workers=2, shuffle_window=shuffle_window
    )
    recipe = Recipe(name="test", data=data, batch=BatchConfig(size=4, group="all"), length="3ep")
    plan = make_plan(recipe, Facts(len(dataset), 1, len(dataset.class_names), source="packed", cores=2))
    loader = make_train_loader(dataset, recipe, plan, DataContext.on_host())
    return [batch["images"].clone() for micro_batches in loader.steps(0, 6) for batch in micro_batches]


@pytest.mark.parametrize("limit", ["1GB", "40kB", "1kB"])
@pytest.mark.parametrize("shuffle_window", [None, 300])
def test_batches_equal_those_of_local_data_whatever_the_cache_holds(
    packed: Path, monkeypatch: pytest.MonkeyPatch, limit: str, shuffle_window: int | None
) -> None:
    monkeypatch.setenv(range_cache.LIMIT_VARIABLE, limit)
    with web_folder(packed) as web:
        remote, local = PackedDataset(mount(web.url), "train"), PackedDataset(packed, "train")
        ours, theirs = _train_batches(remote, shuffle_window), _train_batches(local, shuffle_window)
        assert len(ours) == 6
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        evaluated = []
        for data in (remote, local):
            loader = EvalLoader(data, PreprocessConfig(size=16), 3, DataContext.on_host())
            evaluated.append(torch.cat([batch["images"] for batch in loader]))
        assert torch.equal(*evaluated)
        if limit == "1GB":
            assert web.num_gets(".packed") <= _num_blocks(packed)  # each block once


def _num_blocks(packed: Path) -> int:
    return sum(-(-path.stat().st_size // _BLOCK) for path in packed.glob("*.packed"))


def test_what_the_sampler_asks_for_is_there_before_it_is_read(packed: Path) -> None:
    with web_folder(packed) as web:
        dataset = PackedDataset(mount(web.url), "train")
        order = np.arange(len(dataset), dtype=np.int64)[::-1]
        with read_ahead(dataset, range(1), lambda step: order.copy(), in_order=False):
            _wait_until_quiet(web)
        web.is_down = True  # everything below comes from the cache
        local = PackedDataset(packed, "train")
        assert all(dataset[index].data == local[index].data for index in range(len(dataset)))


def _wait_until_quiet(web: WebFolder) -> None:
    """Wait until all blocks of the training shards are in the cache; those of other files are there, too."""
    wanted = _num_blocks(web.folder) - sum(
        -(-path.stat().st_size // _BLOCK) for path in web.folder.glob("val-*.packed")
    )
    cached, before = 0, -1
    while cached < wanted or cached > before:
        time.sleep(0.5)
        cached, before = sum(1 for path in shared_cache().folder.rglob("*-0*") if not path.suffix), cached
