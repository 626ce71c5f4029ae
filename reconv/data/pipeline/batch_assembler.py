"""Assembly of a training step's batch: its samples, their augmentation parameters, and micro-batches.

All of it is a function of recipe, data and step; workers, ranks and the first step change nothing.
"""

from __future__ import annotations

from torch import Tensor

from reconv.core.batch import Batch
from reconv.data.dataset import I64, Dataset
from reconv.data.sampler import make_sampler
from reconv.data.transforms.base import Rows
from reconv.data.transforms.host import train_preprocess
from reconv.data.transforms.train import DeviceParams
from reconv.recipe.parts.data import PreprocessConfig, effective_augment
from reconv.recipe.plan import Plan
from reconv.recipe.schema import Recipe


class BatchAssembler:
    """Composes the training batches of one rank."""

    def __init__(self, dataset: Dataset, recipe: Recipe, plan: Plan, rank: int) -> None:
        self.seed = recipe.seed
        self.augment = effective_augment(recipe.augment).model_copy(update={"decoder": plan.decoder})
        self.sampler = make_sampler(dataset, recipe, plan.global_batch)
        self.max_rows = plan.batch_per_device
        self.size_at = plan.size_at
        self._preprocess = recipe.data.preprocess
        self._device_params = DeviceParams(self.augment)
        self._rows = plan.rows(rank)  # of the global batch
        self._micro_batches = plan.micro_batches(rank)

    def positions(self, step: int) -> I64:
        """The positions of this rank's rows."""
        return self.sampler.positions(step)[self._rows]

    def preprocess(self, size: int) -> PreprocessConfig:
        """The preprocessing of training images of a size."""
        return train_preprocess(self._preprocess, self.augment, size)

    def device_params(self, positions: I64, indices: I64, size: int) -> dict[str, Tensor]:
        """The augmentation parameters of each row that are applied on the device."""
        epochs = self.sampler.epoch_of(positions)
        return self._device_params.sample(Rows(self.seed, positions, indices, epochs, size))

    def micro_batches(self, step: int, positions: I64, batch: Batch, size: int) -> tuple[Batch, ...]:
        """The batch of a step in micro-batches, with the mixing parameters of their groups.

        `positions` are those of the batch, on the host.
        """
        batches = []
        start = 0
        for groups in self._micro_batches:
            rows = slice(start, start + sum(groups))
            tensors = {name: tensor[rows] for name, tensor in batch.tensors.items()}
            tensors |= self._device_params.sample_groups(self.seed, step, positions[rows], groups, size)
            batches.append(Batch(tensors, batch.positions[rows], groups))
            start = rows.stop
        return tuple(batches)
