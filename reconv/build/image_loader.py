"""`reconv.ImageLoader`: the loader of the trainer as an iterable for anybody's training loop.

It yields what a network takes: normalized images on a device, and labels. The batches are those of `reconv.train` with
the same settings, whatever the number of workers, and a position in them is a number, so that a loaded state continues
with the next batch without reading those before.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor

from reconv.build.data import data_path, fills_from_files, open_split
from reconv.core.batch import Batch
from reconv.core.errors import CheckpointError, UsageError
from reconv.core.machine import Machine, cores_per_process
from reconv.data.decode.native import choose_decoder
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.train_loader import TrainLoader, make_train_loader
from reconv.data.pipeline.workers.thread_pool import open_workers
from reconv.data.transforms.normalize import EvalPreprocess
from reconv.data.transforms.train import TrainPreprocess
from reconv.device import Device, open_device
from reconv.distributed.environment import read_launch_env
from reconv.recipe.loader import load
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.schema import Recipe

_RECIPE, _ORIGIN = "resnet50", "ImageLoader"  # an ImageNet recipe: its preprocessing and augmentation are the defaults
_SECTIONS = ("data.", "augment.")
_SKIP = 'settings={"data.bad_images": "skip up to 10"} leaves out up to ten unreadable images'
_VERSION = 1  # of the state
_FIXED = ("split", "global_batch", "num_samples", "seed")  # of the state: with others the batches would be other ones


class ImageLoader:
    """Batches (images, labels) of a folder of images, tar or TFRecord shards, packed data, and what else runs take.

    Each `for` loop is one epoch; training images are shuffled anew in each. `state_dict()` in the loop is a position,
    and after `load_state_dict()` the next loop continues behind it, as with torchdata's StatefulDataLoader.

    Args:
        data: folder or address of the data; its format is detected
        batch_size: images of a batch, on this rank
        split: train, val or test; data without a validation split gets one by a hash of the images' paths
        train: whether images are shuffled and augmented, and a last batch that is not full is left out; None: for the
            split `train`. Otherwise every image comes once, center-cropped, in order; the last batch may be short
        size: height and width of the images
        device: where the batches are; on a GPU they are copied and normalized while the step before is computed
        dtype: of the images
        channels_last: their memory format
        workers: threads or processes that decode; None: chosen from the machine's cores
        seed: of order and augmentation
        rank, world_size: which part of each global batch is this process's; None: as the launcher says
        settings: fields of a recipe's data and augment sections, as in {"augment.auto_augment": "randaugment"};
            `reconv recipes show resnet50` lists them. With MixUp or CutMix labels are probabilities [n, classes]
    """

    def __init__(
        self,
        data: str | os.PathLike[str],
        batch_size: int,
        *,
        split: Literal["train", "val", "test"] = "train",
        train: bool | None = None,
        size: int = 224,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        channels_last: bool = True,
        workers: int | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        launch_env = read_launch_env()
        self.rank = launch_env.rank if rank is None else rank
        self.world_size = launch_env.world_size if world_size is None else world_size
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"there is no rank {self.rank} of {self.world_size}")
        self.train = split == "train" if train is None else train
        self.batch_size = batch_size
        recipe = _recipe(data, batch_size * self.world_size, batch_size, size, seed, workers, settings or {})
        self._dataset = open_split(recipe, data_path(recipe), split)
        self.classes: tuple[str, ...] = self._dataset.class_names
        """The names of the classes, in the order of the labels."""
        self._fixed = dict(zip(_FIXED, (split, recipe.batch.size, len(self._dataset), seed), strict=True))
        name = f"cuda:{torch.cuda.current_device()}" if str(device) == "cuda" else str(device)
        opened = open_device(name)
        self._bad_samples = BadSamples(recipe.data.bad_images.limit, hint=_SKIP)
        if self._bad_samples.tolerated and self.world_size > 1:
            raise UsageError("data.bad_images: several ranks cannot agree on images to skip", hint="use one process")
        self._source = (_TrainSource if self.train else _EvalSource)(self, recipe, opened, dtype, channels_last)
        self._epoch = self._done = 0  # batches of this epoch that were yielded
        self._is_loaded = False

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self._source.num_batches

    @property
    def num_samples(self) -> int:
        """Images of the split, of all ranks."""
        return len(self._dataset)

    @property
    def epoch(self) -> int:
        """The number of the epoch of the last loop, from 0."""
        return self._epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._done and not (self._is_loaded and self._done < len(self)):
            self._epoch, self._done = self._epoch + 1, 0
        self._is_loaded = False
        for batch in self._source.batches(self._epoch, self._done):
            self._done += 1
            yield batch["images"], batch.tensors.get("soft_targets", batch["targets"])

    def state_dict(self) -> dict[str, Any]:
        """The position behind the batch that came last; it can be written as JSON."""
        step = self._epoch * len(self) + self._done
        bad_images = self._bad_samples.state(step)
        position = {"epoch": self._epoch, "step": self._done, "bad_images": bad_images}
        return {"version": _VERSION, **self._fixed, **position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue behind the position of a state: the next loop has the rest of its epoch."""
        if state.get("version") != _VERSION:
            raise CheckpointError(f"this is not the state of an ImageLoader: version {state.get('version')!r}")
        if different := [name for name in _FIXED if state[name] != self._fixed[name]]:
            raise CheckpointError(
                "the loader's state is of other batches",
                why="; ".join(f"{name} was {state[name]} and is {self._fixed[name]}" for name in different),
                hint="make the loader as it was made when the state was saved",
            )
        self._epoch, self._done, self._is_loaded = int(state["epoch"]), int(state["step"]), True
        self._bad_samples.restore(state["bad_images"])

    def close(self) -> None:
        """Stop the workers; a later loop would fail."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _recipe(
    data: str | os.PathLike[str],
    global_batch: int,
    batch_size: int,
    size: int,
    seed: int,
    workers: int | None,
    settings: Mapping[str, Any],
) -> Recipe:
    """A classifier's recipe with these data settings; what is wrong is an error that names the setting."""
    for name in settings:
        if not name.startswith(_SECTIONS):
            raise UsageError(
                f"{name} is not a setting of a loader",
                hint="set fields of the sections data and augment, as data.cache",
            )
    fields = {
        "data.path": os.fspath(data),
        "data.num_workers": "auto" if workers is None else workers,
        "data.preprocess.size": size,
        "data.preprocess.resize": "auto-ratio",
        "batch.size": global_batch,
        "batch.group": batch_size,
        "seed": seed,
        **settings,
    }
    return load(_RECIPE, [(name, value, _ORIGIN) for name, value in fields.items()]).recipe


class _Source:
    """Opens the workers, and makes batches on the device."""

    num_batches: int

    def __init__(
        self, loader: ImageLoader, recipe: Recipe, device: Device, dtype: torch.dtype, channels_last: bool
    ) -> None:
        dataset, ranks = loader._dataset, loader.world_size
        facts = Facts(
            num_train=len(dataset),
            num_val=1,
            num_classes=len(dataset.class_names),
            world_size=ranks,
            cores=cores_per_process(Machine(), ranks),
            source=dataset.kind,
            decoder=choose_decoder(recipe.augment.decoder),
            fills_from_files=fills_from_files(recipe, dataset),
            device=device.kind,
        )
        self.plan = make_plan(recipe, facts)
        backend = self.plan.backend if loader.train else self.plan.eval_backend
        workers = open_workers(backend, self.plan.workers)
        self.close = weakref.finalize(loader, workers.close)
        self.context = DataContext(device, workers)

    def batches(self, epoch: int, done: int) -> Iterator[Batch]:
        """The batches of an epoch from one on."""
        raise NotImplementedError


class _TrainSource(_Source):
    """Shuffled and augmented batches. Those of the next epoch are prefetched at the end of one."""

    def __init__(
        self, loader: ImageLoader, recipe: Recipe, device: Device, dtype: torch.dtype, channels_last: bool
    ) -> None:
        super().__init__(loader, recipe, device, dtype, channels_last)
        self.num_batches = math.floor(self.plan.steps_per_epoch)
        self._loader: TrainLoader = make_train_loader(
            loader._dataset, recipe, self.plan, self.context, loader.rank, loader._bad_samples
        )
        self._preprocess = TrainPreprocess(
            recipe.data.preprocess, recipe.augment, self.plan.num_classes, dtype, channels_last
        )
        self._stream: Iterator[tuple[Batch, ...]] = iter(())
        self._next = -1  # the step that the stream has next

    def batches(self, epoch: int, done: int) -> Iterator[Batch]:
        first, stop = epoch * self.num_batches + done, (epoch + 1) * self.num_batches
        if self._next != first:
            self._stream, self._next = self._loader.steps(first, 2**62), first
        for step in range(first, stop):
            self._next = -1  # if reading fails
            (batch,) = next(self._stream)
            self._next = step + 1
            yield self._preprocess(batch, step)


class _EvalSource(_Source):
    """Every image once, in order."""

    def __init__(
        self, loader: ImageLoader, recipe: Recipe, device: Device, dtype: torch.dtype, channels_last: bool
    ) -> None:
        super().__init__(loader, recipe, device, dtype, channels_last)
        self._world_size = loader.world_size
        self._preprocess = EvalPreprocess(recipe.data.preprocess, dtype, channels_last)
        self._make = partial(
            EvalLoader,
            loader._dataset,
            recipe.data.preprocess,
            loader.batch_size,
            self.context,
            rank=loader.rank,
            world_size=loader.world_size,
            bad_samples=loader._bad_samples,
        )
        self.num_batches = len(self._make())

    def batches(self, epoch: int, done: int) -> Iterator[Batch]:
        for batch in self._make(finished=range(done * self._world_size)):
            yield self._preprocess(batch)
