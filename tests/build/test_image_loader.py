"""`ImageLoader`: batches for any loop, from any format, with any number of workers or ranks, from any position."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from data_examples import write_image_tree
from torch import Tensor

from reconv.build.image_loader import ImageLoader
from reconv.cli import main
from reconv.core.errors import CheckpointError, DataError, RecipeError, UsageError

Batches = list[tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_tree(tmp_path_factory.mktemp("photos"))


def loader(data: Path, batch_size: int = 2, **options: Any) -> ImageLoader:
    return ImageLoader(data, batch_size, size=16, **{"workers": 0, **options})


def epochs(of: ImageLoader, number: int = 2) -> Batches:
    return [(images.clone(), labels.clone()) for _ in range(number) for images, labels in of]


def assert_same(found: Batches, expected: Batches) -> None:
    assert len(found) == len(expected) > 0
    for pair, other in zip(found, expected, strict=True):
        assert torch.equal(pair[0], other[0]) and torch.equal(pair[1], other[1])


def test_an_epoch_has_each_image_once_in_a_new_order_and_drops_the_last_batch(tree: Path) -> None:
    with loader(tree, 3) as loaded:
        assert (len(loaded), loaded.num_samples, loaded.classes) == (3, 11, ("ant", "bee", "cat"))
        first, second = epochs(loaded, 1), epochs(loaded, 1)
    assert [images.shape for images, _ in first] == [(3, 3, 16, 16)] * 3
    assert all(images.is_contiguous(memory_format=torch.channels_last) for images, _ in first)
    labels = torch.cat([labels for _, labels in first])
    assert len(labels) == 9 and torch.bincount(labels).max() <= 4 and labels.dtype == torch.int64
    assert not torch.equal(labels, torch.cat([labels for _, labels in second]))


def test_workers_change_nothing(tree: Path) -> None:
    with loader(tree, workers=2) as many, loader(tree) as none:
        assert_same(epochs(many), epochs(none))


def test_ranks_share_each_batch_of_one_process(tree: Path) -> None:
    whole = epochs(loader(tree, 4))
    parts = [epochs(loader(tree, 2, rank=rank, world_size=2)) for rank in range(2)]
    joined = [(torch.cat([a, b]), torch.cat([x, y])) for (a, x), (b, y) in zip(*parts, strict=True)]
    assert_same(joined, whole)
    ranks = [loader(tree, 2, split="val", rank=rank, world_size=2) for rank in range(2)]
    labels = sorted(label for rank in ranks for _, batch in rank for label in batch.tolist())
    assert labels == [0, 0, 1, 1, 2] and [len(rank) for rank in ranks] == [2, 1]


@pytest.mark.parametrize("options", [{}, {"split": "val"}, {"train": False}], ids=["train", "val", "in order"])
@pytest.mark.parametrize("done", [1, 3])
def test_a_loaded_state_continues_with_the_next_batch(tree: Path, options: dict[str, Any], done: int) -> None:
    whole = epochs(loader(tree, **options), 3)
    running, seen = loader(tree, **options), 0
    stream = batches_of(running)
    for _ in range(done):
        seen += 1
        next(stream)
    state = json.loads(json.dumps(running.state_dict()))
    stream.close()
    again = loader(tree, **options, workers=0)
    again.load_state_dict(state)
    per_epoch = len(again)
    num_epochs = 3 - (done // per_epoch)
    assert_same(epochs(again, num_epochs if done % per_epoch else 3 - done // per_epoch), whole[seen:])


def batches_of(running: ImageLoader) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from running


def test_a_loop_that_was_left_is_followed_by_the_next_epoch(tree: Path) -> None:
    whole, left = epochs(loader(tree)), loader(tree)
    for _ in left:
        break
    assert_same(epochs(left, 1), whole[5:])
    assert left.epoch == 1


def test_a_state_of_other_batches_is_refused(tree: Path) -> None:
    state = loader(tree).state_dict()
    with pytest.raises(CheckpointError, match="global_batch was 2 and is 3; seed was 0 and is 1"):
        loader(tree, 3, seed=1).load_state_dict(state)
    with pytest.raises(CheckpointError, match="not the state of an ImageLoader"):
        loader(tree).load_state_dict({"epoch": 1})
    loader(tree, 1, rank=1, world_size=2).load_state_dict(state)  # two ranks with the same global batch


@pytest.mark.parametrize("kind", ["packed", "tar", "tfrecord"])
def test_other_formats_give_the_labels_of_the_folder(tree: Path, tmp_path: Path, kind: str) -> None:
    converted = tmp_path / kind
    shards = ["--shards", "2,1"] if kind == "tfrecord" else []
    with pytest.raises(SystemExit, match="0"):
        main(["data", "convert", str(tree), str(converted), "--to", kind, "--quiet", *shards])
    in_order = [loader(path, train=False) for path in (tree, converted)]
    labels = [[label for _, batch in of for label in batch.tolist()] for of in in_order]
    assert len(labels[0]) == 11 and sorted(labels[0]) == sorted(labels[1])
    assert in_order[1].classes == ("ant", "bee", "cat")
    assert len(epochs(loader(converted))) == 10


def test_settings_are_those_of_recipes_and_wrong_ones_are_named(tree: Path) -> None:
    images, labels = next(iter(loader(tree, settings={"augment.mixup.alpha": 0.4}, dtype=torch.bfloat16)))
    assert images.dtype == torch.bfloat16
    assert labels.shape == (2, 3) and torch.allclose(labels.sum(1).float(), torch.ones(2))
    for settings, error, text in (
        ({"schedule.lr": 1}, UsageError, "schedule.lr is not a setting of a loader"),
        ({"augment.flip": 1}, RecipeError, "augment.flip"),
    ):
        with pytest.raises(error, match=text):
            loader(tree, settings=settings)
    with pytest.raises(UsageError, match="no rank 2 of 2"):
        loader(tree, rank=2, world_size=2)
    with pytest.raises(DataError):
        loader(tree / "nowhere")


def test_unreadable_images_are_named_or_skipped_and_known_to_the_state(tmp_path: Path) -> None:
    tree = write_image_tree(tmp_path)
    broken = next((tree / "train/bee").glob("*.JPEG"))
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(DataError, match=r"(?s).*skip up to 10"):
        epochs(loader(tree), 2)
    tolerant = loader(tree, settings={"data.bad_images": "skip up to 1"})
    whole = epochs(tolerant, 3)
    assert [bad["path"] for bad in tolerant.state_dict()["bad_images"]] == [str(broken)]
    again = loader(tree, settings={"data.bad_images": "skip up to 1"})
    again.load_state_dict(tolerant.state_dict() | {"epoch": 1, "step": 5})
    assert_same(epochs(again, 1), whole[10:])
