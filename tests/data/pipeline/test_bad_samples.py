"""Bad images during a run: which samples replace them, what is counted, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reconv.core.batch import Batch
from reconv.core.errors import DataError, ExitCode
from reconv.data.dataset import Sample
from reconv.data.pipeline.bad_samples import BadSample, BadSamples, replacements
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.train_loader import make_train_loader
from reconv.data.readers.folder import FolderDataset
from reconv.recipe.parts.batch import BatchConfig
from reconv.recipe.parts.data import AugmentConfig, DataConfig, MixupConfig, PreprocessConfig
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.schema import Recipe

COLOR = PreprocessConfig(size=24, resize=28)
NUM_STEPS = 8  # of 4 samples: three epochs of the 11 training images


def make_recipe(workers: int = 0, flip_form: str = "random") -> Recipe:
    return Recipe(
        seed=5,
        data=DataConfig(preprocess=COLOR, drop_last=False, num_workers=workers),
        augment=AugmentConfig(mixup=MixupConfig(alpha=0.4), hflip_mode=flip_form),  # type: ignore[arg-type]
        batch=BatchConfig(size=4, group=2),
    )


def stream(
    dataset: FolderDataset, recipe: Recipe, bad_samples: BadSamples, start: int = 0, stop: int = NUM_STEPS
) -> list[Batch]:
    plan = make_plan(recipe, Facts(len(dataset), 1, len(dataset.class_names)))
    return [
        batch
        for (batch,) in make_train_loader(dataset, recipe, plan, DataContext.on_host(), bad_samples=bad_samples).steps(
            start, stop
        )
    ]


def same(one: list[Batch], other: list[Batch]) -> bool:
    assert len(one) == len(other) > 0
    return all(
        a.groups == b.groups and all(torch.equal(a[name], b[name]) for name in a.tensors)
        for a, b in zip(one, other, strict=True)
    )


def damage(dataset: FolderDataset) -> dict[int, str]:
    """Break four files, each in another way: index to path."""
    paths = {index: dataset.path(index) for index in (1, 4, 6, 9)}
    whole = Path(paths[1]).read_bytes()
    Path(paths[1]).write_bytes(whole[: len(whole) // 2])  # truncated
    Path(paths[4]).write_bytes(b"no image at all")
    Path(paths[6]).unlink()  # vanished
    Path(paths[9]).unlink()
    Path(paths[9]).mkdir()  # cannot be read as a file
    return paths


@given(st.integers(0, 2**40), st.integers(0, 90), st.integers(1, 400))
def test_every_sample_is_a_candidate_once(seed: int, epoch: int, num_samples: int) -> None:
    order = list(replacements(seed, epoch, num_samples // 2, num_samples))
    assert sorted(order) == list(range(num_samples))


def test_replacements_depend_on_seed_epoch_and_index() -> None:
    firsts = {(s, e, i): next(replacements(s, e, i, 10**6)) for s in range(3) for e in range(3) for i in range(3)}
    assert len(set(firsts.values())) == 27
    assert next(replacements(1, 2, 0, 10**6)) == firsts[1, 2, 0]


@pytest.mark.parametrize("flip_form", ["random", "alternating"])
def test_replacements_do_not_depend_on_workers(tree: Path, flip_form: str) -> None:
    dataset = FolderDataset(tree, "train")
    paths = damage(dataset)
    logged: dict[int, list[BadSample]] = {workers: [] for workers in (0, 1, 2, 8)}
    streams = {w: stream(dataset, make_recipe(w, flip_form), BadSamples(4, logged[w].append)) for w in logged}
    assert len(streams) == 4
    assert all(same(streams[0], other) for other in streams.values())
    assert all(bad_samples == logged[0] for bad_samples in logged.values())
    assert sorted((fault.index, fault.path) for fault in logged[0]) == sorted(paths.items())
    assert all(fault.why for fault in logged[0])


def test_good_rows_are_unchanged_and_bad_ones_replaced_under_their_own_parameters(tree: Path) -> None:
    dataset = FolderDataset(tree, "train")
    recipe = make_recipe().model_copy(update={"augment": AugmentConfig(hflip=0.5)})
    before = stream(dataset, recipe, BadSamples())
    bad = damage(dataset)
    after = stream(dataset, recipe, BadSamples(4))
    num_replaced = 0
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.positions, new.positions)
        assert old.groups == new.groups
        for row in range(len(old)):
            if int(old["indices"][row]) in bad:
                num_replaced += 1
                replacement = int(new["indices"][row])
                assert replacement not in bad
                assert int(new["targets"][row]) == dataset[replacement].target
            else:
                assert torch.equal(old["images"][row], new["images"][row])
                assert torch.equal(old["indices"][row], new["indices"][row])
    assert num_replaced > 8


@pytest.mark.parametrize("start", [1, 3, 5])
def test_a_resumed_stream_equals_the_uninterrupted_one(tree: Path, start: int) -> None:
    dataset = FolderDataset(tree, "train")
    damage(dataset)
    whole, logged = BadSamples(4), []
    expected = stream(dataset, make_recipe(2), whole)
    first = BadSamples(4)
    stream(dataset, make_recipe(8), first, 0, start + 2)  # more than was saved, as when read ahead
    state = first.state(start)
    assert all(saved["step"] < start for saved in state)
    second = BadSamples(4, logged.append)
    second.restore(state)
    assert same(expected[start:], stream(dataset, make_recipe(1), second, start))
    assert second.state(NUM_STEPS) == whole.state(NUM_STEPS)
    assert len(logged) == 4 - len(state)


def test_a_bad_file_stays_out_even_when_it_becomes_readable(tree: Path) -> None:
    dataset = FolderDataset(tree, "train")
    good = {index: Path(dataset.path(index)).read_bytes() for index in (2, 3)}
    for index in good:
        Path(dataset.path(index)).write_bytes(b"")
    bad_samples = BadSamples(2)
    expected = stream(dataset, make_recipe(), bad_samples)
    for index, content in good.items():
        Path(dataset.path(index)).write_bytes(content)
    again = BadSamples(2)
    again.restore(bad_samples.state(NUM_STEPS))
    assert again.known("train") == {2, 3}
    assert same(expected, stream(dataset, make_recipe(2), again))


@pytest.mark.parametrize("workers", [0, 3])
def test_one_bad_file_more_than_tolerated_is_an_error(tree: Path, workers: int) -> None:
    dataset = FolderDataset(tree, "train")
    damage(dataset)
    logged: list[BadSample] = []
    with pytest.raises(DataError, match=r"4 images cannot be read, and data\.bad_images tolerates 3") as caught:
        stream(dataset, make_recipe(workers), BadSamples(3, logged.append))
    assert caught.value.code == ExitCode.DATA
    assert len(logged) == 4  # the last one is logged too
    assert logged[-1].path in caught.value.where


@pytest.mark.parametrize("workers", [0, 3])
def test_a_stop_at_a_bad_file_says_how_to_go_on_without_it(tree: Path, workers: int) -> None:
    dataset = FolderDataset(tree, "train")
    damage(dataset)
    with pytest.raises(DataError, match=r"does not decode|is empty|cannot read|damaged") as caught:
        stream(dataset, make_recipe(workers), BadSamples(0))
    assert caught.value.hint.endswith("--set 'data.bad_images=skip up to 10'")
    with pytest.raises(DataError) as caught:
        stream(dataset, make_recipe(workers), BadSamples(2))
    assert caught.value.hint.endswith("--set 'data.bad_images=skip up to 20'")


def test_a_dataset_of_bad_files_is_an_error(tree: Path) -> None:
    dataset = FolderDataset(tree, "train")
    for index in range(len(dataset)):
        Path(dataset.path(index)).write_bytes(b"")
    with pytest.raises(DataError, match="no training image can be read"):
        stream(dataset, make_recipe(), BadSamples(1000))


def test_a_wrong_label_is_never_tolerated(tree: Path) -> None:
    class Mislabeled(FolderDataset):
        def __getitem__(self, index: int) -> Sample:
            sample = super().__getitem__(index)
            return Sample(sample.data, 3 if index == 2 else sample.target, sample.name)

    for workers in (0, 2):
        with pytest.raises(DataError, match="label 3 out of range"):
            stream(Mislabeled(tree, "train"), make_recipe(workers), BadSamples(100))


@pytest.mark.parametrize("workers", [0, 1, 2, 8])
def test_evaluation_drops_bad_images_and_counts_the_others_once(tree: Path, workers: int) -> None:
    dataset = FolderDataset(tree, "train")
    expected = torch.cat([batch["images"] for batch in EvalLoader(dataset, COLOR, 4, DataContext.on_host())])
    bad = damage(dataset)
    Path(dataset.path(5)).unlink()
    Path(dataset.path(7)).unlink()  # a whole batch of four is bad
    logged: list[BadSample] = []
    loader = EvalLoader(dataset, COLOR, 4, DataContext.on_host(), workers, bad_samples=BadSamples(6, logged.append))
    for _ in range(2):
        batches = list(loader.after(30))
        indices = torch.cat([batch["indices"] for batch in batches])
        assert indices.tolist() == [0, 2, 3, 8, 10]
        assert torch.equal(torch.cat([batch.positions for batch in batches]), indices)
        assert torch.equal(torch.cat([batch["images"] for batch in batches]), expected[indices])
        assert all(batch.groups == (len(batch),) for batch in batches)
    assert [(fault.split, fault.step) for fault in logged] == [("val", 30)] * 6
    assert {fault.index for fault in logged} == {*bad, 5, 7}
    with pytest.raises(DataError):
        list(EvalLoader(dataset, COLOR, 4, DataContext.on_host(), workers))


def test_a_validation_set_of_bad_images_is_an_error(tree: Path) -> None:
    dataset = FolderDataset(tree, "train")
    for index in range(len(dataset)):
        Path(dataset.path(index)).write_bytes(b"no image")
    loader = EvalLoader(dataset, COLOR, 4, DataContext.on_host(), bad_samples=BadSamples(1000))
    for _ in range(2):  # found bad, and known to be
        with pytest.raises(DataError, match="no validation image can be read"):
            list(loader)


def test_a_file_name_that_is_not_utf8_can_be_logged(tree: Path) -> None:
    bad_samples = BadSamples(1)
    bad_samples.add("train", 0, 0, DataError("image does not decode", where="caf\udce9.jpg", why="x"))
    assert [saved["path"] for saved in bad_samples.state(1)] == [r"caf\xe9.jpg"]
    assert np.array_equal(list(bad_samples.known("train")), [0])
