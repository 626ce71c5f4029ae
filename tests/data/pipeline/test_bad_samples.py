"""Bad images while a run goes on: who stands in, what is counted, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reconv.batch import Batch
from reconv.data.dataset import Sample
from reconv.data.pipeline.bad_samples import BadSample, BadSamples, replacements
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.train_loader import make_train_loader
from reconv.data.readers.folder import FolderDataset
from reconv.errors import DataError, ExitCode
from reconv.recipe.data_fields import AugmentConfig, DataConfig, MixupConfig, PreprocessConfig
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.schema import BatchConfig, Recipe

COLOUR = PreprocessConfig(size=24, resize=28)
NUM_STEPS = 8  # of 4 samples: three epochs of the 11 training images


def stay(tensor: Tensor) -> Tensor:
    return tensor


def make_recipe(workers: int = 0, flip_form: str = "random") -> Recipe:
    return Recipe(
        seed=5,
        data=DataConfig(preprocess=COLOUR, drop_last=False, num_workers=workers),
        augment=AugmentConfig(mixup=MixupConfig(alpha=0.4), hflip_mode=flip_form),  # type: ignore[arg-type]
        batch=BatchConfig(size=4, group=2),
    )


def stream(
    source: FolderDataset, recipe: Recipe, faults: BadSamples, start: int = 0, stop: int = NUM_STEPS
) -> list[Batch]:
    plan = make_plan(recipe, Facts(len(source), 1, len(source.class_names)))
    return [
        batch
        for (batch,) in make_train_loader(source, recipe, plan, DataContext.on_host(), bad_samples=faults).steps(
            start, stop
        )
    ]


def same(one: list[Batch], other: list[Batch]) -> bool:
    assert len(one) == len(other) > 0
    return all(
        a.groups == b.groups and all(torch.equal(a[name], b[name]) for name in a.tensors)
        for a, b in zip(one, other, strict=True)
    )


def damage(source: FolderDataset) -> dict[int, str]:
    """Break four files, each in another way: index to path."""
    paths = {index: source.path(index) for index in (1, 4, 6, 9)}
    whole = Path(paths[1]).read_bytes()
    Path(paths[1]).write_bytes(whole[: len(whole) // 2])  # truncated
    Path(paths[4]).write_bytes(b"no image at all")
    Path(paths[6]).unlink()  # vanished
    Path(paths[9]).unlink()
    Path(paths[9]).mkdir()  # cannot be read as a file
    return paths


@given(st.integers(0, 2**40), st.integers(0, 90), st.integers(1, 400))
def test_every_sample_may_stand_in_once(seed: int, epoch: int, num_samples: int) -> None:
    order = list(replacements(seed, epoch, num_samples // 2, num_samples))
    assert sorted(order) == list(range(num_samples))


def test_who_stands_in_depends_on_seed_epoch_and_index() -> None:
    firsts = {(s, e, i): next(replacements(s, e, i, 10**6)) for s in range(3) for e in range(3) for i in range(3)}
    assert len(set(firsts.values())) == 27
    assert next(replacements(1, 2, 0, 10**6)) == firsts[1, 2, 0]


@pytest.mark.parametrize("flip_form", ["random", "alternating"])
def test_the_same_samples_stand_in_for_any_number_of_workers(tree: Path, flip_form: str) -> None:
    source = FolderDataset(tree, "train")
    paths = damage(source)
    told: dict[int, list[BadSample]] = {workers: [] for workers in (0, 1, 2, 8)}
    streams = {w: stream(source, make_recipe(w, flip_form), BadSamples(4, told[w].append)) for w in told}
    assert len(streams) == 4
    assert all(same(streams[0], other) for other in streams.values())
    assert all(faults == told[0] for faults in told.values())
    assert sorted((fault.index, fault.path) for fault in told[0]) == sorted(paths.items())
    assert all(fault.why for fault in told[0])


def test_good_rows_are_untouched_and_bad_ones_become_other_samples_of_the_same_place(tree: Path) -> None:
    source = FolderDataset(tree, "train")
    recipe = make_recipe().model_copy(update={"augment": AugmentConfig(hflip=0.5)})
    before = stream(source, recipe, BadSamples())
    bad = damage(source)
    after = stream(source, recipe, BadSamples(4))
    num_replaced = 0
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.positions, new.positions)
        assert old.groups == new.groups
        for row in range(len(old)):
            if int(old["indices"][row]) in bad:
                num_replaced += 1
                stands_in = int(new["indices"][row])
                assert stands_in not in bad
                assert int(new["targets"][row]) == source[stands_in].target
            else:
                assert torch.equal(old["images"][row], new["images"][row])
                assert torch.equal(old["indices"][row], new["indices"][row])
    assert num_replaced > 8


@pytest.mark.parametrize("start", [1, 3, 5])
def test_a_stream_that_goes_on_from_a_checkpoint_equals_the_whole_one(tree: Path, start: int) -> None:
    source = FolderDataset(tree, "train")
    damage(source)
    whole, told = BadSamples(4), []
    expected = stream(source, make_recipe(2), whole)
    first = BadSamples(4)
    stream(source, make_recipe(8), first, 0, start + 2)  # more than was saved, as when read ahead
    state = first.state(start)
    assert all(saved["step"] < start for saved in state)
    second = BadSamples(4, told.append)
    second.restore(state)
    assert same(expected[start:], stream(source, make_recipe(1), second, start))
    assert second.state(NUM_STEPS) == whole.state(NUM_STEPS)
    assert len(told) == 4 - len(state)


def test_a_file_once_left_out_stays_out_even_when_it_comes_back(tree: Path) -> None:
    source = FolderDataset(tree, "train")
    good = {index: Path(source.path(index)).read_bytes() for index in (2, 3)}
    for index in good:
        Path(source.path(index)).write_bytes(b"")
    faults = BadSamples(2)
    expected = stream(source, make_recipe(), faults)
    for index, content in good.items():
        Path(source.path(index)).write_bytes(content)
    again = BadSamples(2)
    again.restore(faults.state(NUM_STEPS))
    assert again.known("train") == {2, 3}
    assert same(expected, stream(source, make_recipe(2), again))


@pytest.mark.parametrize("workers", [0, 3])
def test_one_bad_file_more_than_borne_ends_the_run(tree: Path, workers: int) -> None:
    source = FolderDataset(tree, "train")
    damage(source)
    told: list[BadSample] = []
    with pytest.raises(DataError, match=r"4 images cannot be read, and data\.bad_images tolerates 3") as caught:
        stream(source, make_recipe(workers), BadSamples(3, told.append))
    assert caught.value.code == ExitCode.DATA
    assert len(told) == 4  # the last one is told too
    assert told[-1].path in caught.value.where


def test_a_tree_of_bad_files_ends_instead_of_searching_for_ever(tree: Path) -> None:
    source = FolderDataset(tree, "train")
    for index in range(len(source)):
        Path(source.path(index)).write_bytes(b"")
    with pytest.raises(DataError, match="no training image can be read"):
        stream(source, make_recipe(), BadSamples(1000))


def test_a_wrong_label_is_never_borne(tree: Path) -> None:
    class Mislabelled(FolderDataset):
        def __getitem__(self, index: int) -> Sample:
            sample = super().__getitem__(index)
            return Sample(sample.data, 3 if index == 2 else sample.target, sample.name)

    for workers in (0, 2):
        with pytest.raises(DataError, match="label 3 out of range"):
            stream(Mislabelled(tree, "train"), make_recipe(workers), BadSamples(100))


@pytest.mark.parametrize("workers", [0, 1, 2, 8])
def test_evaluation_leaves_bad_images_out_and_counts_the_others_once(tree: Path, workers: int) -> None:
    source = FolderDataset(tree, "train")
    expected = torch.cat([batch["images"] for batch in EvalLoader(source, COLOUR, 4, DataContext.on_host())])
    bad = damage(source)
    Path(source.path(5)).unlink()
    Path(source.path(7)).unlink()  # a whole batch of four is bad
    told: list[BadSample] = []
    loader = EvalLoader(source, COLOUR, 4, DataContext.on_host(), workers, bad_samples=BadSamples(6, told.append))
    for _ in range(2):
        batches = list(loader.after(30))
        indices = torch.cat([batch["indices"] for batch in batches])
        assert indices.tolist() == [0, 2, 3, 8, 10]
        assert torch.equal(torch.cat([batch.positions for batch in batches]), indices)
        assert torch.equal(torch.cat([batch["images"] for batch in batches]), expected[indices])
        assert all(batch.groups == (len(batch),) for batch in batches)
    assert [(fault.split, fault.step) for fault in told] == [("val", 30)] * 6
    assert {fault.index for fault in told} == {*bad, 5, 7}
    with pytest.raises(DataError):
        list(EvalLoader(source, COLOUR, 4, DataContext.on_host(), workers))


def test_a_validation_set_of_bad_images_alone_is_an_error_and_no_score(tree: Path) -> None:
    source = FolderDataset(tree, "train")
    for index in range(len(source)):
        Path(source.path(index)).write_bytes(b"no image")
    loader = EvalLoader(source, COLOUR, 4, DataContext.on_host(), bad_samples=BadSamples(1000))
    for _ in range(2):  # found bad, and known to be
        with pytest.raises(DataError, match="no validation image can be read"):
            list(loader)


def test_a_file_name_that_is_not_text_can_be_told(tree: Path) -> None:
    faults = BadSamples(1)
    faults.add("train", 0, 0, DataError("image does not decode", where="caf\udce9.jpg", why="x"))
    assert [saved["path"] for saved in faults.state(1)] == [r"caf\xe9.jpg"]
    assert np.array_equal(list(faults.known("train")), [0])
