"""Buffers of batches: reused, never while they are in use, and bounded in number."""

from __future__ import annotations

import gc
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from reconv.core.batch import Batch, CopyEvent
from reconv.core.errors import DataError
from reconv.data.pipeline.buffers import BlockingTransfer, BufferPool, private_buffer
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.samples import Column
from reconv.data.pipeline.train_loader import make_train_loader
from reconv.data.readers.folder import FolderDataset
from reconv.recipe.parts.batch import BatchConfig
from reconv.recipe.parts.data import AugmentConfig, DataConfig, PreprocessConfig
from reconv.recipe.plan import Facts, Plan, make_plan
from reconv.recipe.schema import Recipe

COLUMNS = (Column("images", (3, 5, 5), np.uint8), Column("targets", (), np.int64), Column("boxes", (2, 4), np.float32))
SPEC = PreprocessConfig(size=24, resize=28)


def stay(tensor: Tensor) -> Tensor:
    return tensor


def make_pool(limit: int = 3) -> BufferPool:
    return BufferPool(BlockingTransfer(stay), private_buffer, limit)


def setup(tree: Path, workers: int = 2, prefetch: int = 2) -> tuple[FolderDataset, Recipe, Plan]:
    dataset = FolderDataset(tree, "train")
    data = DataConfig(preprocess=SPEC, drop_last=False, num_workers=workers, prefetch=prefetch)
    recipe = Recipe(data=data, augment=AugmentConfig(crop="random_resized"), batch=BatchConfig(size=4))
    return dataset, recipe, make_plan(recipe, Facts(len(dataset), 1, 3))


def test_columns_of_a_buffer_do_not_overlap() -> None:
    view = make_pool().acquire(COLUMNS, 3, 4)
    assert {name: (array.shape, array.dtype.str) for name, array in view.rows.items()} == {
        "images": ((3, 3, 5, 5), "|u1"),
        "targets": ((3,), "<i8"),
        "boxes": ((3, 2, 4), "<f4"),
    }
    for number, array in enumerate(view.rows.values()):
        array[...] = number + 1
    assert [float(array.min()) for array in view.rows.values()] == [1, 2, 3]
    assert [float(array.max()) for array in view.rows.values()] == [1, 2, 3]


HOLDERS: dict[str, Callable[[np.ndarray], object]] = {
    "row": lambda images: images[2],
    "tensor": torch.from_numpy,
    "slice of a tensor": lambda images: torch.from_numpy(images)[1:2],
    "view of a view": lambda images: images[1:].reshape(-1)[::2],
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_buffer_is_not_reused_while_a_view_of_it_is_alive(holder: str) -> None:
    buffers = make_pool()
    view = buffers.acquire(COLUMNS, 4, 4)
    view.rows["images"][...] = 7
    held = HOLDERS[holder](view.rows["images"])
    del view
    other = buffers.acquire(COLUMNS, 4, 4)
    other.rows["images"][...] = 9
    assert np.asarray(held).max() == np.asarray(held).min() == 7
    assert buffers.num_buffers == 2
    del held
    third = buffers.acquire(COLUMNS, 4, 4)
    assert buffers.num_buffers == 2
    third.rows["images"][...] = 1
    assert other.rows["images"].min() == 9


class Late:
    """A device whose copies happen only when they are waited for or queried."""

    def __init__(self) -> None:
        self.under_way: list[_LateCopy] = []
        self.pinned = 0

    def move(self, tensor: Tensor) -> Tensor:
        return tensor

    def pin(self, memory: Tensor) -> Callable[[], None]:
        self.pinned += 1

        def unpin() -> None:
            self.pinned -= 1

        return unpin

    def send(self, batch: Batch) -> tuple[Batch, CopyEvent | None]:
        sent = batch.map(torch.empty_like)
        self.under_way.append(_LateCopy(batch, sent))
        return sent, self.under_way[-1]


class _LateCopy:
    def __init__(self, batch: Batch, sent: Batch) -> None:
        self._pair: tuple[Batch, Batch] | None = (batch, sent)
        self._looks = 0

    def query(self) -> bool:
        self._looks += 1
        if self._looks > 2:
            self.synchronize()
        return self._pair is None

    def wait(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        if self._pair is not None:
            batch, sent = self._pair
            for name, tensor in batch.tensors.items():
                sent[name].copy_(tensor)
            sent.positions.copy_(batch.positions)
            self._pair = None


@pytest.mark.parametrize("workers", [0, 2])
def test_a_buffer_is_not_reused_before_its_copy_has_finished(tree: Path, workers: int) -> None:
    dataset, recipe, plan = setup(tree, workers)
    expected = [step[0] for step in make_train_loader(dataset, recipe, plan, DataContext.on_host()).steps(0, 30)]
    late = Late()
    sent = [step[0] for step in make_train_loader(dataset, recipe, plan, DataContext(late)).steps(0, 30)]
    assert len(late.under_way) == 30
    for copy in late.under_way:
        copy.synchronize()
    for left, right in zip(expected, sent, strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left.tensors)


def test_a_batch_is_sent_while_the_one_before_it_is_used(tree: Path) -> None:
    dataset, recipe, plan = setup(tree)
    late = Late()
    stream = make_train_loader(dataset, recipe, plan, DataContext(late)).steps(0, 3)
    sent = []
    for _ in stream:
        sent.append(len(late.under_way))
        assert late.under_way[len(sent) - 1].query()  # what is computed next may use it
    assert sent == [2, 3, 3]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_an_error_of_its_own_step(tree: Path, workers: int) -> None:
    dataset, recipe, plan = setup(tree, workers)
    loader = make_train_loader(dataset, recipe, plan, DataContext(Late()))
    first, second = (set(step[0]["indices"].tolist()) for step in loader.steps(0, 2))
    bad = (second - first).pop()
    Path(dataset.path(bad)).write_bytes(b"no image")
    stream = loader.steps(0, 2)
    assert set(next(stream)[0]["indices"].tolist()) == first
    with pytest.raises(DataError):
        next(stream)


def test_every_buffer_is_unpinned_at_the_end(tree: Path) -> None:
    dataset, recipe, plan = setup(tree)
    late = Late()
    stream = make_train_loader(dataset, recipe, plan, DataContext(late)).steps(0, 1000)
    for _ in range(5):
        next(stream)
    assert late.pinned >= 3
    stream.close()  # type: ignore[attr-defined]
    late.under_way.clear()
    gc.collect()
    assert late.pinned == 0


def test_a_batch_that_is_kept_does_not_change(tree: Path) -> None:
    dataset, recipe, plan = setup(tree)
    stream = make_train_loader(dataset, recipe, plan, DataContext.on_host()).steps(0, 50)
    first = next(stream)[0]
    copied = {name: tensor.clone() for name, tensor in first.tensors.items()}
    for _ in stream:
        pass
    assert all(torch.equal(first[name], copied[name]) for name in copied)


def test_keeping_a_label_does_not_keep_the_images(tree: Path) -> None:
    dataset, recipe, plan = setup(tree)
    counted: list[int] = []

    class Counting(BlockingTransfer):
        def pin(self, memory: Tensor) -> Callable[[], None]:
            counted.append(memory.numel())
            return super().pin(memory)

    labels = [
        step[0]["targets"]
        for step in make_train_loader(dataset, recipe, plan, DataContext(Counting(stay))).steps(0, 60)
    ]
    assert len(labels) == 60
    assert len(counted) <= recipe.data.prefetch + 2


@pytest.mark.parametrize("workers", [0, 2, 4])
def test_the_number_of_buffers_is_bounded(tree: Path, workers: int) -> None:
    dataset, recipe, plan = setup(tree, workers, prefetch=3)
    made: list[int] = []

    class Counting(BlockingTransfer):
        def pin(self, memory: Tensor) -> Callable[[], None]:
            made.append(memory.numel())
            return super().pin(memory)

    previous = None
    for step in make_train_loader(dataset, recipe, plan, DataContext(Counting(stay))).steps(0, 100):
        current, previous = previous, step  # the training step still reads the last batch
        del current
    assert 1 <= len(made) <= plan.steps_held
    for batch in EvalLoader(dataset, SPEC, 4, DataContext(Counting(stay)), workers):
        previous = batch  # type: ignore[assignment]
    assert len(made) <= 2 * plan.steps_held


def test_buffers_of_the_old_size_are_released_when_the_size_changes(tree: Path) -> None:
    dataset, recipe, _ = setup(tree)
    augment = AugmentConfig.model_validate(
        {"crop": "random_resized", "progressive_resizing": [["4step", 16]]}, strict=False
    )
    recipe = recipe.model_copy(update={"augment": augment})
    plan = make_plan(recipe, Facts(len(dataset), 1, 3))
    late = Late()
    for number, step in enumerate(make_train_loader(dataset, recipe, plan, DataContext(late)).steps(0, 12)):
        assert step[0]["images"].shape[-1] == (24 if number < 4 else 16)
        while late.under_way:
            late.under_way.pop().synchronize()
    del step
    gc.collect()
    assert late.pinned == 0


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_memory_does_not_grow_over_a_thousand_batches(tree: Path, workers: int) -> None:
    dataset, recipe, plan = setup(tree, workers)
    stream = make_train_loader(dataset, recipe, plan, DataContext.on_host()).steps(0, 1300)
    for _ in range(300):
        next(stream)
    gc.collect()
    before, threads = resident_bytes(), threading.active_count()
    for _ in stream:
        pass
    gc.collect()
    assert resident_bytes() - before < 8 * 2**20
    assert threading.active_count() <= threads
