"""Ghost batch norm (statistics over groups of samples), and the state of the layers that depend on the step.

Outside the trainer (`groups` is None) the layer is torch's own. In the trainer, running statistics change only in
`LayerState.commit`, once per step, and only when the step is ok.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconv.core import random as keys
from reconv.core.batch import Batch
from reconv.models.layers.dropout import KeyedRandomLayer, sample_keys

GroupStats = Sequence[tuple[int, Tensor]]  # of each group: its number of samples, and its statistics


class BatchNorm2d(nn.BatchNorm2d):
    """Ghost batch norm: in training, each group of samples is normalized by its own statistics.

    A group with a single value per channel (one sample, one pixel) has no variance: its output is the bias, and it
    contributes its mean but not to the running variance. A frozen norm uses its running statistics in training too
    and never updates them.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum)
        self.init_group_state()

    def init_group_state(self) -> None:
        """Add the attributes that torch's batch norm does not have."""
        self.groups: tuple[int, ...] | None = None
        self.frozen = False
        # Mean and unbiased variance [2, channels] of each group in the last forward pass. Overwritten and never read
        # here, so that a recomputed forward pass counts once and a compiled one has nothing to guard on.
        self.batch_stats: tuple[Tensor, ...] = ()
        # Sums over the processes that share a group; None where each group is in one process.
        self.all_reduce: Callable[[Tensor], Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy is not connected to other processes: process groups cannot be copied."""
        return {**self.__dict__, "all_reduce": None}

    def forward(self, x: Tensor) -> Tensor:
        if self.frozen:
            return F.batch_norm(x, *self._running_stats(), self.weight, self.bias, False, 0.0, self.eps)
        if not self.training or self.groups is None:
            return super().forward(x)
        return self.forward_groups(x, rows_of_groups(self.groups, x.shape[0]))

    def forward_groups(self, x: Tensor, groups: tuple[int, ...]) -> Tensor:
        """The training output, and the statistics of each group in `batch_stats`."""
        parts = (x,) if len(groups) == 1 else x.split(groups)
        outputs, stats = zip(*(self._normalize_group(part) for part in parts), strict=True)
        self.batch_stats = stats
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _normalize_group(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output of one group, and its mean and unbiased variance [2, channels]."""
        running_mean, running_var = self._running_stats()
        if self.all_reduce is not None:
            return self._normalize_shared_group(x, self.all_reduce)
        if x.numel() == x.shape[1]:
            return self._scale_and_shift(x - x, 1.0).to(x.dtype), torch.stack(
                [x.detach().flatten().to(running_mean.dtype), running_var]
            )
        # With momentum 1, torch writes the batch's own mean and unbiased variance into the running statistics it is
        # given, on every device, fused with the normalization.
        statistics = running_mean.new_zeros(2, self.num_features)
        output = F.batch_norm(x, statistics[0], statistics[1], self.weight, self.bias, True, 1.0, self.eps)
        return output, statistics

    def _normalize_shared_group(self, x: Tensor, all_reduce: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """The output of this process's part of a group that several processes share (two all-reduces)."""
        running_mean, _ = self._running_stats()
        x_accumulate, others = x.to(running_mean.dtype), (0, *range(2, x.dim()))  # all dimensions but the channels
        sums = torch.cat([x_accumulate.sum(others), x_accumulate.new_tensor([x.numel() / x.shape[1]])])
        totals = all_reduce(sums)
        count = totals[-1].detach()
        mean = totals[:-1] / count
        centered = x_accumulate - _per_channel(mean, x)
        variance = all_reduce((centered * centered).sum(others)) / count
        output = self._scale_and_shift(centered, (variance + self.eps).rsqrt())
        unbiased = variance.detach() * (count / (count - 1))
        return output.to(x.dtype), torch.stack([mean.detach(), unbiased])

    def _scale_and_shift(self, x: Tensor, scale: Tensor | float) -> Tensor:
        """x times scale, then the norm's weight and bias, if it has any."""
        scale = scale if self.weight is None else scale * self.weight
        scaled = x * (_per_channel(scale, x) if isinstance(scale, Tensor) else scale)
        return scaled if self.bias is None else scaled + _per_channel(self.bias, x)

    def _running_stats(self) -> tuple[Tensor, Tensor]:
        assert self.running_mean is not None and self.running_var is not None
        return self.running_mean, self.running_var


class BatchNorm1d(BatchNorm2d):
    """The same for features [n, channels] and sequences [n, channels, length]."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() not in (2, 3):
            raise ValueError(f"expected 2D or 3D input, got {input.dim()}D input")


class BatchNormAct2d(BatchNorm2d):
    """Batch norm, a dropout and an activation: timm's layer of that name, with our batch norm."""

    def __init__(self, num_features: int, drop: nn.Module, act: nn.Module) -> None:
        super().__init__(num_features)
        self.drop = drop
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.act(self.drop(super().forward(x)))
        return output


def rows_of_groups(groups: tuple[int, ...], num_rows: int) -> tuple[int, ...]:
    """The number of rows of each group, where every sample has the same number of rows, such as windows or tokens."""
    num_samples = sum(groups)
    if num_rows == num_samples:
        return groups
    if num_rows % num_samples:
        raise ValueError(f"a batch norm got {num_rows} rows for {num_samples} samples, which is not a multiple")
    return tuple(size * (num_rows // num_samples) for size in groups)


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    """Values [channels] in a shape that broadcasts to x [n, channels, ...]."""
    return values.view(1, -1, *([1] * (x.dim() - 2)))


class LayerState:
    """Sets the micro-batch of the layers that depend on it, and updates running statistics once per step."""

    def __init__(self, model: nn.Module, seed: int = 0) -> None:
        self._norms = [m for m in model.modules() if isinstance(m, BatchNorm2d)]
        self._random_layers = [m for m in model.modules() if isinstance(m, KeyedRandomLayer)]
        for name, module in model.named_modules():
            if isinstance(module, KeyedRandomLayer):
                module.key = keys.key(seed, "noise:" + name)  # "noise": every seed's masks depend on this text
        self._groups: tuple[int, ...] = ()
        self._active: list[BatchNorm2d] = []  # the norms with statistics in this step
        self._momentum: Tensor | None = None  # one value per running statistic of the active norms
        self._pending: list[tuple[int, Tensor]] = []  # per group: its samples, and all norms' statistics in one tensor
        self._gather_stats: Callable[[GroupStats], GroupStats] = lambda stats: stats
        self._sync_buffers: Callable[[], None] = lambda: None

    def connect(
        self,
        gather_stats: Callable[[GroupStats], GroupStats],
        all_reduce: Callable[[Tensor], Tensor] | None = None,
        sync_buffers: Callable[[], None] = lambda: None,
    ) -> None:
        """Share statistics with other processes.

        `gather_stats` adds the groups of the others, `all_reduce` sums over the processes that share a group, and
        `sync_buffers` runs after each commit to copy buffers that another process has updated.
        """
        self._gather_stats, self._sync_buffers = gather_stats, sync_buffers
        for norm in self._norms:
            norm.all_reduce = all_reduce

    def set_micro_batch(self, batch: Batch, step: int | Tensor) -> None:
        """Give the layers the groups and sample keys of the next micro-batch."""
        self._collect()
        self._groups = batch.groups
        for norm in self._norms:
            norm.groups = batch.groups
        if self._random_layers:
            drawn = sample_keys(F.pad(batch.positions, (0, 1), value=-1), step)  # the last one belongs to no sample
            for layer in self._random_layers:
                layer.sample_keys, layer.shared_key, layer.groups = drawn[:-1], drawn[-1:], batch.groups

    def discard(self) -> None:
        """Drop the statistics of an unfinished step."""
        for norm in self._norms:
            norm.batch_stats = ()
        self._pending = []

    def commit(self, ok: Tensor) -> None:
        """Update running statistics by the sample-weighted mean over the step's groups, if the step is ok."""
        self._collect()
        for norm in self._norms:
            norm.groups = None
        for layer in self._random_layers:
            layer.sample_keys, layer.shared_key, layer.groups = None, None, ()
        if self._pending:
            self._update_running_stats(ok)
        self._pending = []
        self._sync_buffers()

    def _collect(self) -> None:
        """Take the statistics of the last forward pass: one tensor per group, so that a step launches few kernels."""
        active = [norm for norm in self._norms if norm.batch_stats]
        if not active:
            return
        if self._pending and active != self._active:
            raise RuntimeError("the micro-batches of one step went through different batch norms")
        if active != self._active:
            self._active, self._momentum = active, None
        for group, num_samples in enumerate(self._groups):
            flat = torch.cat([row for norm in active for row in norm.batch_stats[group].unbind()])
            self._pending.append((num_samples, flat))
        for norm in active:
            norm.batch_stats = ()

    def _update_running_stats(self, ok: Tensor) -> None:
        running = [buffer for norm in self._active for buffer in norm._running_stats()]
        old = torch.cat(running)
        if self._momentum is None:
            self._momentum = torch.cat(
                [torch.full_like(b, norm.momentum or 0.0) for norm in self._active for b in norm._running_stats()]
            )
        new = old + self._momentum * (_weighted_mean(self._gather_stats(self._pending)) - old)
        updated = torch.where(ok, new, old)
        torch._foreach_copy_(running, list(updated.split([b.numel() for b in running])))
        counters = [norm.num_batches_tracked for norm in self._active if norm.num_batches_tracked is not None]
        torch._foreach_add_(counters, [ok.to(counters[0].dtype)] * len(counters))


def _weighted_mean(pending: GroupStats) -> Tensor:
    """The mean over groups weighted by their samples, summed in group order."""
    total = sum(num_samples for num_samples, _ in pending)
    if len(pending) == 1:
        return pending[0][1]
    mean = pending[0][1] * (pending[0][0] / total)
    for num_samples, statistics in pending[1:]:
        mean = mean + statistics * (num_samples / total)
    return mean
