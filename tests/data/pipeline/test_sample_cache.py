"""Cached samples: the same samples, read once, within the budget."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from data_examples import encode, noise, trained_weights

from reconv.build.data import cache_size, open_datasets, with_cache
from reconv.core.errors import ResourceError
from reconv.data.dataset import Sample
from reconv.data.pipeline.sample_cache import CacheBudget, CachedDataset, num_bytes
from reconv.data.readers.folder import FolderDataset
from reconv.recipe.parts.data import DataConfig
from reconv.recipe.plan import CacheSize, Facts, make_plan
from reconv.recipe.schema import Recipe


class Counting(FolderDataset):
    """A folder that counts how often each sample is read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "train")
        self.reads: Counter[int] = Counter()

    def __getitem__(self, index: int) -> Sample:
        self.reads[index] += 1
        return super().__getitem__(index)


def test_a_cached_sample_is_read_once_and_unchanged(tree: Path) -> None:
    dataset = Counting(tree)
    cached = CachedDataset(dataset, CacheBudget(10**9))
    plain = FolderDataset(tree, "train")
    for _ in range(3):
        assert [cached[i] for i in range(len(cached))] == [plain[i] for i in range(len(plain))]
    assert dataset.reads == Counter(dict.fromkeys(range(11), 1))
    assert cached.fingerprint() == plain.fingerprint() and cached.class_names == plain.class_names


def test_samples_beyond_the_budget_are_read_every_time(tree: Path) -> None:
    dataset = Counting(tree)
    sizes = [num_bytes(dataset[index]) for index in range(11)]
    dataset.reads.clear()
    budget = CacheBudget(sum(sizes[:4]))
    cached = CachedDataset(dataset, budget)
    for _ in range(2):
        for index in range(11):
            cached[index]
        assert 0 < budget.used_bytes <= budget.limit_bytes
    assert [dataset.reads[index] for index in range(4)] == [1] * 4
    assert sum(dataset.reads.values()) > 11  # some were read in both passes


def test_threads_that_miss_together_count_a_sample_once(tree: Path) -> None:
    dataset = Counting(tree)
    budget = CacheBudget(10**9)
    cached = CachedDataset(dataset, budget)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(cached.__getitem__, list(range(11)) * 20))
    assert budget.used_bytes == sum(num_bytes(cached[index]) for index in range(11))


def test_cached_pixels_are_copies_of_a_mapped_file() -> None:
    mapped = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)

    class Views:
        kind, class_names, origin = "made", ("only",), "made"

        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Sample:
            return Sample(mapped[:], 0, "view")

        def fingerprint(self) -> str:
            return "made"

    cached = CachedDataset(Views(), CacheBudget(10**6))
    cached[0]
    mapped[:] = 0
    assert np.asarray(cached[0].data).max() == 11


def test_the_estimate_is_for_all_samples_and_ignores_unreadable_ones(tree: Path) -> None:
    dataset = FolderDataset(tree, "train")
    whole = sum(num_bytes(dataset[index]) for index in range(11))
    assert CachedDataset(dataset, CacheBudget(0)).estimated_bytes == whole
    Path(dataset.path(3)).unlink()
    left = sum(num_bytes(dataset[index]) for index in range(11) if index != 3)
    assert CachedDataset(dataset, CacheBudget(0)).estimated_bytes == round(11 * left / 10)


def test_a_cached_sample_takes_no_more_memory_than_counted(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "only").mkdir(parents=True)
        for number in range(300):
            (tmp_path / split / "only" / f"{number:05}.png").write_bytes(encode(noise(6, 6, 3, number)))
    budget = CacheBudget(10**9)
    cached = CachedDataset(FolderDataset(tmp_path, "train"), budget)
    cached[0]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for index in range(1, 300):
        cached[index]
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0 < taken <= budget.used_bytes


def test_both_datasets_share_half_of_the_free_memory_of_a_rank(tree: Path) -> None:
    recipe = Recipe(data=DataConfig(source="folder", path=str(tree), cache="ram"))
    datasets = with_cache(recipe, open_datasets(recipe), 8_000_000, 2)
    assert isinstance(datasets.train, CachedDataset) and isinstance(datasets.val, CachedDataset)
    size = cache_size(datasets)
    assert size is not None and size.available_bytes == 2_000_000
    assert size.needed_bytes == datasets.train.estimated_bytes + datasets.val.estimated_bytes
    with pytest.raises(ResourceError, match="memory is unknown"):
        with_cache(recipe, open_datasets(recipe), None, 1)


def test_data_in_memory_is_not_cached_again() -> None:
    recipe = Recipe(data=DataConfig(source="digits", cache="ram"))
    datasets = with_cache(recipe, open_datasets(recipe), 10**9, 1)
    assert cache_size(datasets) is None


@pytest.mark.parametrize(
    ("size", "annotation"),
    [
        (CacheSize(3 * 10**9, 10**10), "about 3.0 GB of samples in memory, 10.0 GB available"),
        (CacheSize(14 * 10**10, 35 * 10**9), "35.0 GB of about 140.0 GB fit in memory; the other 75% of samples"),
        (None, "already in memory or synthetic"),
    ],
)
def test_the_plan_has_the_size_of_the_cache(size: CacheSize | None, annotation: str) -> None:
    plan = make_plan(Recipe(data=DataConfig(cache="ram")), Facts(10_000, 100, 10, cache=size))
    assert [line for line in plan.lines if "data.cache" in line and annotation in line]
    assert not [line for line in make_plan(Recipe(), Facts(10_000, 100, 10)).lines if "data.cache" in line]


def test_a_run_with_a_cache_equals_one_without_bitwise(tree: Path, tmp_path: Path) -> None:
    cached = trained_weights(tree, tmp_path / "ram", {"data.cache": "ram", "data.num_workers": 2})
    assert cached == trained_weights(tree, tmp_path / "off", {"data.cache": "off"})
    assert "of samples in memory" in (tmp_path / "ram" / "events.jsonl").read_text()
