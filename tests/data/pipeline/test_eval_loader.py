"""Evaluation loaders: every sample exactly once, and errors where they belong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from data_examples import encode, noise
from loading_examples import host_eval

from reconv.core.batch import Batch
from reconv.core.errors import DataError
from reconv.data.dataset import Sample
from reconv.data.pipeline import eval_loader
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.readers.digits import open_digits
from reconv.data.readers.folder import FolderDataset
from reconv.recipe.parts.data import PreprocessConfig

GRAY = PreprocessConfig(size=12, resize=None, channels=1, mean=(0.5,), std=(0.5,))


COLOR = PreprocessConfig(size=24, resize=28)


@pytest.mark.parametrize("workers", [0, 1, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_evaluation_sees_each_sample_exactly_once(tree: Path, workers: int, world_size: int) -> None:
    dataset = FolderDataset(tree, "train")
    dealt: list[Batch] = []
    for rank in range(world_size):
        loader = EvalLoader(dataset, COLOR, 4, DataContext.on_host(), workers, rank, world_size)
        batches = list(loader)
        assert len(batches) == len(loader)
        dealt += batches
    dealt.sort(key=lambda batch: int(batch.positions[0]))
    assert [len(batch) for batch in dealt] == [4, 4, 3]
    assert torch.cat([batch["indices"] for batch in dealt]).tolist() == list(range(11))
    assert torch.cat([batch["targets"] for batch in dealt]).tolist() == [0] * 4 + [1] * 4 + [2] * 3
    assert all(batch.groups == (len(batch),) for batch in dealt)


def test_evaluation_images_are_those_of_the_eval_transform() -> None:
    dataset = open_digits("val")
    (batch,) = list(EvalLoader(dataset, GRAY, 1000, DataContext.on_host()))
    sample = dataset[17]
    assert isinstance(sample.data, np.ndarray)
    assert np.array_equal(batch["images"][17].numpy(), host_eval(sample.data, GRAY))


class CountedReads(FolderDataset):
    num_reads = 0

    def __getitem__(self, index: int) -> Sample:
        self.num_reads += 1
        return super().__getitem__(index)


def equal(first: list[Batch], second: list[Batch]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(
        a.groups == b.groups
        and torch.equal(a.positions, b.positions)
        and a.tensors.keys() == b.tensors.keys()
        and all(torch.equal(a[name], b[name]) for name in a.tensors)
        for a, b in pairs
    )


def test_the_images_of_a_small_set_are_decoded_once(tree: Path) -> None:
    dataset = CountedReads(tree, "train")
    loader = EvalLoader(dataset, COLOR, 4, DataContext.on_host(), keeps_decoded=True)
    first = [batch.map(torch.clone) for batch in loader]
    assert dataset.num_reads == len(dataset) == 11
    assert equal(list(loader), first) and dataset.num_reads == 11
    assert loader.whole_batch == 2


def test_a_loader_for_one_pass_keeps_nothing(tree: Path) -> None:
    dataset = CountedReads(tree, "train")
    loader = EvalLoader(dataset, COLOR, 4, DataContext.on_host())
    assert [len(list(loader)) for _ in range(2)] == [3, 3]
    assert dataset.num_reads == 2 * len(dataset)


def test_a_batch_that_was_changed_in_place_is_kept_as_it_was(tree: Path) -> None:
    loader = EvalLoader(FolderDataset(tree, "train"), COLOR, 4, DataContext.on_host(), keeps_decoded=True)
    expected = [batch.map(torch.clone) for batch in loader]
    for _ in range(2):
        for batch, unchanged in zip(loader, expected, strict=True):
            assert equal([batch], [unchanged])
            for tensor in (*batch.tensors.values(), batch.positions):
                tensor.zero_()  # as a loss or metric of the user may do


def test_a_pass_that_was_broken_off_does_not_count(tree: Path) -> None:
    loader = EvalLoader(FolderDataset(tree, "train"), COLOR, 4, DataContext.on_host(), keeps_decoded=True)
    expected = [
        batch.map(torch.clone) for batch in EvalLoader(FolderDataset(tree, "train"), COLOR, 4, DataContext.on_host())
    ]
    next(iter(loader))
    assert equal(list(loader), expected) and equal(list(loader), expected)


def test_large_sets_and_sets_with_bad_images_are_decoded_every_time(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = CountedReads(tree, "train")
    Path(dataset.path(5)).write_bytes(b"no image")
    loader = EvalLoader(dataset, COLOR, 4, DataContext.on_host(), bad_samples=BadSamples(1), keeps_decoded=True)
    passes = [[batch["indices"].tolist() for batch in loader] for _ in range(2)]
    assert passes == [[[0, 1, 2, 3], [4, 6, 7], [8, 9, 10]]] * 2
    assert loader._kept is None  # no memory is used for batches that will never be complete
    monkeypatch.setattr(eval_loader, "MAX_PREPROCESSED_BYTES", 12 * 3 * 24 * 24)
    dataset = CountedReads(tree, "val")
    loader = EvalLoader(dataset, COLOR, 100, DataContext.on_host(), keeps_decoded=True)
    assert [len(list(loader)) for _ in range(2)] == [1, 1]
    assert dataset.num_reads == 2 * len(dataset)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_of_several_bad_rows_the_first_is_reported(tmp_path: Path, workers: int) -> None:
    folder = tmp_path / "train" / "only"
    folder.mkdir(parents=True)
    for number in range(40):  # three tasks
        is_bad = number in (3, 20, 39)
        (folder / f"{number:02}.png").write_bytes(b"no image" if is_bad else encode(noise(9, 9, 3, number)))
    dataset = FolderDataset(tmp_path, "train")
    with pytest.raises(DataError) as caught:
        list(EvalLoader(dataset, COLOR, 40, DataContext.on_host(), workers))
    assert str(caught.value.where).endswith("03.png")


def test_a_label_out_of_range_is_an_error_that_names_the_sample(tree: Path) -> None:
    class Mislabeled(FolderDataset):
        def __getitem__(self, index: int) -> Sample:
            sample = super().__getitem__(index)
            return Sample(sample.data, 3 if index == 2 else sample.target, sample.name)

    dataset = Mislabeled(tree, "val")
    with pytest.raises(DataError, match="label 3 out of range") as caught:
        list(EvalLoader(dataset, COLOR, 2, DataContext.on_host(), 2))
    assert caught.value.where == dataset.path(2)
