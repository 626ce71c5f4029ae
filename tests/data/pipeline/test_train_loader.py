"""Training loaders: the same bytes whatever the workers, ranks and first step, and no thread left behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from data_examples import encode, noise
from loading_examples import host_train
from torch import Tensor

from reconv.core.errors import DataError
from reconv.data.dataset import Dataset, NamedArrays, Sample, select_rows
from reconv.data.decode.pillow import decode
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.data.pipeline.buffers import BlockingTransfer
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.samples import ArrayPipeline, Column, DecodePipeline, make_sample_pipeline
from reconv.data.pipeline.train_loader import make_train_loader
from reconv.data.readers.arrays import ArrayDataset
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.digits import open_digits
from reconv.data.readers.folder import FolderDataset
from reconv.data.transforms.geometry import crop_params
from reconv.recipe.parts.batch import BatchConfig
from reconv.recipe.parts.data import AugmentConfig, DataConfig, MixupConfig, PreprocessConfig
from reconv.recipe.plan import Facts, Plan, make_plan
from reconv.recipe.schema import Recipe

GRAY = PreprocessConfig(size=12, resize=None, channels=1, mean=(0.5,), std=(0.5,))


COLOR = PreprocessConfig(size=24, resize=28)


def make_recipe(
    preprocess: PreprocessConfig,
    crop: str,
    size: int,
    group: int | str = "all",
    micro: int | str = "auto",
    workers: int = 0,
) -> Recipe:
    return Recipe(
        seed=5,
        data=DataConfig(preprocess=preprocess, drop_last=False, num_workers=workers),
        augment=AugmentConfig(crop=crop, padding=2, mixup=MixupConfig(alpha=0.4, mode="sample")),  # type: ignore[arg-type]
        batch=BatchConfig(size=size, group=group, micro=micro),  # type: ignore[arg-type]
    )


def plan_of(recipe: Recipe, dataset: Dataset, world_size: int = 1) -> Plan:
    return make_plan(recipe, Facts(len(dataset), 1, len(dataset.class_names), world_size=world_size))


def steps(dataset: Dataset, recipe: Recipe, start: int, stop: int, world_size: int = 1) -> list[dict[str, Tensor]]:
    """The global batch of each step: ranks and micro-batches joined."""
    plan = plan_of(recipe, dataset, world_size)
    streams = [
        list(make_train_loader(dataset, recipe, plan, DataContext.on_host(), rank).steps(start, stop))
        for rank in range(world_size)
    ]
    whole = []
    for step in range(stop - start):
        batches = [batch for stream in streams for batch in stream[step]]
        assert sum((batch.groups for batch in batches), ()) == plan.group_sizes
        joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0].tensors}
        whole.append(joined | {"positions": torch.cat([batch.positions for batch in batches])})
    return whole


def same(left: list[dict[str, Tensor]], right: list[dict[str, Tensor]]) -> bool:
    assert len(left) == len(right) > 0
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("kind", ["folder", "digits"])
@pytest.mark.parametrize("crop", ["none", "random", "random_resized"])
def test_batches_do_not_depend_on_workers_ranks_micro_batches_or_first_step(tree: Path, kind: str, crop: str) -> None:
    dataset: Dataset = FolderDataset(tree, "train") if kind == "folder" else open_digits("train")
    preprocess = COLOR if kind == "folder" else GRAY
    expected = steps(dataset, make_recipe(preprocess, crop, 12, 3, 12), 0, 5)
    assert expected[0]["images"].shape == (12, preprocess.channels, preprocess.size, preprocess.size)
    assert expected[0]["images"].dtype == torch.uint8
    assert expected[4]["positions"].tolist() == list(range(48, 60))
    for workers in (1, 2, 8):
        assert same(steps(dataset, make_recipe(preprocess, crop, 12, 3, 12, workers), 0, 5), expected)
    for world_size in (2, 4):
        assert same(steps(dataset, make_recipe(preprocess, crop, 12, 3, 3, 2), 0, 5, world_size), expected)
    assert same(steps(dataset, make_recipe(preprocess, crop, 12, 3, 6, 2), 3, 5), expected[3:])


def test_rows_are_the_samples_of_their_indices(tree: Path) -> None:
    dataset = FolderDataset(tree, "train")
    recipe = make_recipe(COLOR, "random_resized", 11)
    (step,) = steps(dataset, recipe, 0, 1)
    assert sorted(step["indices"].tolist()) == list(range(11))
    params = crop_params(recipe.augment, recipe.seed, np.arange(11, dtype=np.int64))
    for row, index in enumerate(step["indices"].tolist()):
        sample = dataset[index]
        assert isinstance(sample.data, bytes)
        expected = host_train(decode(sample.data, 3), COLOR, recipe.augment, select_rows(params, row))
        assert np.array_equal(step["images"][row].numpy(), expected)
        assert step["targets"][row] == sample.target


def test_the_array_pipeline_equals_the_decode_pipeline() -> None:
    rng = np.random.default_rng(0)
    cases = []
    for shape, preprocess in (
        ((3, 16, 16), PreprocessConfig(size=16, resize=None)),
        ((1, 16, 16), PreprocessConfig(size=16, resize=16)),
        ((3, 16, 16), PreprocessConfig(size=16, resize=20)),
        ((3, 10, 14), PreprocessConfig(size=16, resize=None, channels=1, mean=(0.5,), std=(0.5,))),
    ):
        images = rng.integers(0, 256, (9, *shape), dtype=np.uint8)
        dataset = ArrayDataset("made", images, np.arange(9) % 3, ("a", "b", "c"), "made")
        for augment in (None, AugmentConfig(crop="none"), AugmentConfig(crop="random")):
            cases.append((dataset, preprocess, augment))
    for dataset, preprocess, augment in cases:
        indices = np.array([4, 4, 0, 8, 1], np.int64)
        params = {} if augment is None else crop_params(augment, 1, indices + 100)
        results = []
        for pipeline in (
            make_sample_pipeline(dataset, preprocess, augment),
            DecodePipeline(dataset, preprocess, augment),
        ):
            out = np.zeros((5, preprocess.channels, 16, 16), np.uint8)
            targets = np.zeros(5, np.int64)
            pipeline(indices, params, {"images": out, "targets": targets})
            assert targets.tolist() == [1, 1, 0, 2, 1]
            results.append(out)
        assert isinstance(make_sample_pipeline(dataset, preprocess, augment), ArrayPipeline)
        assert np.array_equal(*results)
    assert len(cases) == 12


def data_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("reconv-data")}


def test_a_closed_stream_leaves_no_thread(tree: Path) -> None:
    before = data_threads()
    dataset = FolderDataset(tree, "train")
    recipe = make_recipe(COLOR, "none", 4, workers=3)
    stream = make_train_loader(dataset, recipe, plan_of(recipe, dataset), DataContext.on_host()).steps(0, 1000)
    assert isinstance(stream, Iterator)
    next(stream)
    assert data_threads() > before
    stream.close()  # type: ignore[attr-defined]
    assert data_threads() == before


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_a_bad_file_is_its_data_error_and_leaves_no_thread(tree: Path, workers: int) -> None:
    before = data_threads()
    dataset = FolderDataset(tree, "train")
    broken = dataset.path(6)
    Path(broken).write_bytes(Path(broken).read_bytes()[:200])
    recipe = make_recipe(COLOR, "none", 4, workers=workers)
    with pytest.raises(DataError) as caught:
        list(make_train_loader(dataset, recipe, plan_of(recipe, dataset), DataContext.on_host()).steps(0, 3))
    assert caught.value.where == broken
    with pytest.raises(DataError):
        list(EvalLoader(dataset, COLOR, 4, DataContext.on_host(), workers))
    assert data_threads() == before


def test_at_most_prefetch_steps_are_read_ahead(tree: Path) -> None:
    read: list[int] = []

    class Counting(FolderDataset):
        def __getitem__(self, index: int) -> Sample:
            read.append(index)
            return super().__getitem__(index)

    dataset = Counting(tree, "train")
    recipe = make_recipe(COLOR, "none", 4, workers=2)
    stream = make_train_loader(dataset, recipe, plan_of(recipe, dataset), DataContext.on_host()).steps(0, 1000)
    next(stream)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert 8 <= len(read) <= 4 * (2 + recipe.data.prefetch)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_from_a_later_step_reads_only_its_own_samples(tree: Path, workers: int) -> None:
    read: list[int] = []

    class Counting(FolderDataset):
        def __getitem__(self, index: int) -> Sample:
            read.append(index)
            return super().__getitem__(index)

    dataset = Counting(tree, "train")
    recipe = make_recipe(COLOR, "none", 4, workers=workers)
    [(batch,)] = make_train_loader(dataset, recipe, plan_of(recipe, dataset), DataContext.on_host()).steps(
        100_000, 100_001
    )
    assert batch.positions.tolist() == [400_000, 400_001, 400_002, 400_003]
    assert sorted(read) == sorted(batch["indices"].tolist())


def test_synthetic_device_data_is_one_batch_that_is_repeated() -> None:
    moved: list[tuple[int, ...]] = []

    def move(tensor: Tensor) -> Tensor:
        moved.append(tuple(tensor.shape))
        return tensor

    data = DataConfig(source="synthetic-device", num_samples=32, num_classes=4, preprocess=GRAY)
    recipe = Recipe(data=data, augment=AugmentConfig(crop="none"), batch=BatchConfig(size=8, group=2, micro=4))
    dataset = open_dataset("synthetic-device", None, "train", data)
    plan = plan_of(recipe, dataset)
    batches = list(make_train_loader(dataset, recipe, plan, DataContext(BlockingTransfer(move))).steps(2, 6))
    assert len(moved) == 2 * 5  # two micro-batches of images, targets, indices, flips and positions, once
    assert [batch.positions[0].item() for step in batches for batch in step] == [16, 20, 24, 28, 32, 36, 40, 44]
    assert all(step[1]["images"] is batches[0][1]["images"] for step in batches)


def test_cifar_images_are_loaded_unchanged(tmp_path: Path, write_cifar: Callable[..., Path]) -> None:
    write_cifar(tmp_path, "cifar10", "binary")
    dataset = open_dataset("auto", tmp_path, "train", DataConfig())
    assert isinstance(dataset, ArrayDataset)
    recipe = make_recipe(PreprocessConfig(size=32, resize=None), "none", 35)
    (step,) = steps(dataset, recipe, 0, 1)
    assert np.array_equal(step["images"].numpy(), dataset.images[step["indices"].numpy()])


def test_a_large_batch_of_files_with_many_workers(tmp_path: Path) -> None:
    for split in ("train", "val"):
        folder = tmp_path / split / "only"
        os.makedirs(folder)
        for number in range(60):
            (folder / f"{number}.png").write_bytes(encode(noise(9, 9, 3, number)))
    dataset = FolderDataset(tmp_path, "train")
    recipe = make_recipe(PreprocessConfig(size=8, resize=None), "random_resized", 60, workers=8)
    first = steps(dataset, recipe, 0, 3)
    assert same(first, steps(dataset, make_recipe(PreprocessConfig(size=8, resize=None), "random_resized", 60), 0, 3))


class Squares:
    """A pipeline with columns of its own, which cannot read its sample 5."""

    min_rows_per_task: int | None = 2
    columns = (
        Column("images", (1, 4, 4), np.uint8),
        Column("squares", (3, 2), np.float32),
        Column("counts", (), np.int64),
    )

    def params(self, seed: int, positions: npt.NDArray[np.int64]) -> NamedArrays:
        return {"offset": seed + positions}

    def __call__(self, indices: npt.NDArray[np.int64], params: NamedArrays, rows: NamedArrays) -> None:
        for row, index in enumerate(indices.tolist()):
            if index == 5:
                raise DataError("no sample 5", where="sample 5")
            rows["images"][row] = index
            rows["squares"][row] = index**2
            rows["counts"][row] = params["offset"][row]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pipeline_can_have_any_columns_and_bad_rows_are_replaced_in_all_of_them(workers: int) -> None:
    dataset = ArrayDataset("made", np.zeros((9, 1, 4, 4), np.uint8), np.zeros(9, np.int64), ("a",), "made")
    recipe = make_recipe(GRAY, "none", 4, workers=workers)
    plan = plan_of(recipe, dataset)
    loader = make_train_loader(
        dataset, recipe, plan, DataContext.on_host(), bad_samples=BadSamples(1), make_pipeline=lambda *_: Squares()
    )
    batches = [batch for (batch,) in loader.steps(0, 6)]
    assert len(batches) == 6
    for batch in batches:
        indices = batch["indices"]
        assert 5 not in indices.tolist()
        assert batch["squares"].shape == (4, 3, 2) and batch["squares"].dtype == torch.float32
        assert torch.equal(batch["squares"][:, 1, 1], indices.float() ** 2)
        assert torch.equal(batch["counts"], batch.positions + recipe.seed)
        assert "targets" not in batch.tensors
    (whole,) = list(
        EvalLoader(
            dataset,
            GRAY,
            9,
            DataContext.on_host(),
            workers,
            bad_samples=BadSamples(1),
            make_pipeline=lambda *_: Squares(),
        )
    )
    assert whole["indices"].tolist() == whole["images"][:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 6, 7, 8]
    assert whole["squares"].shape == (8, 3, 2) and whole["counts"].tolist() == whole.positions.tolist()
