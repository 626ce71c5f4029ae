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

from reconv import random as keys
from reconv.batch import Batch
from reconv.models.layers.dropout import Noise, row_keys

Groups = Sequence[tuple[int, Tensor]]  # of each: samples, and a tensor of statistics


class BatchNorm2d(nn.BatchNorm2d):
    """Batch norm whose statistics never leave a group of samples.

    A group with a single value per channel (one sample, one pixel) has no variance: its output is the bias, its
    mean counts, and it leaves the running variance where it is. A fixed norm uses its running statistics in training
    too, and they never move.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum)
        self.groups: tuple[int, ...] | None = None
        self.fixed = False
        # The last forward pass's mean and unbiased variance [2, channels], group by group. It is overwritten and
        # never read here: so a recomputed forward pass records nothing twice, and a compiled one guards on nothing.
        self.recorded: tuple[Tensor, ...] = ()
        # Where the batch is a part of a group whose other parts are in other processes: a sum over all of them.
        self.spread: Callable[[Tensor], Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no part in other processes, whose connections cannot be copied either."""
        return {**self.__dict__, "spread": None}

    def forward(self, x: Tensor) -> Tensor:
        if self.fixed:
            return F.batch_norm(x, *self._running(), self.weight, self.bias, False, 0.0, self.eps)
        if not self.training or self.groups is None:
            return super().forward(x)
        return self.forward_groups(x, self.groups)

    def forward_groups(self, x: Tensor, groups: tuple[int, ...]) -> Tensor:
        """The training output: each group of samples is normalised by its own statistics, which are recorded."""
        parts = (x,) if len(groups) == 1 else x.split(groups)
        outputs, records = zip(*(self._normalise(part) for part in parts), strict=True)
        self.recorded = records
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _normalise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """One group's output, and its mean and unbiased variance."""
        running_mean, running_var = self._running()
        if self.spread is not None:
            return self._normalise_part(x, self.spread)
        if x.numel() == x.shape[1]:
            output = ((x - x) * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)).to(x.dtype)
            return output, torch.stack([x.detach().flatten().to(running_mean.dtype), running_var])
        # With momentum 1 torch leaves the batch's own mean and unbiased variance in the running statistics it is
        # given, on every device, fused with the normalisation.
        statistics = running_mean.new_zeros(2, self.num_features)
        output = F.batch_norm(x, statistics[0], statistics[1], self.weight, self.bias, True, 1.0, self.eps)
        return output, statistics

    def _normalise_part(self, x: Tensor, spread: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """The output of a part of a group, by the statistics of the whole: two sums over processes."""
        running_mean, _ = self._running()
        wide = x.to(running_mean.dtype)
        sums = torch.cat([wide.sum((0, 2, 3)), wide.new_tensor([x.numel() / x.shape[1]])])
        totals = spread(sums)
        count = totals[-1].detach()
        mean = totals[:-1] / count
        centred = wide - mean.view(1, -1, 1, 1)
        variance = spread((centred * centred).sum((0, 2, 3))) / count
        scale = (variance + self.eps).rsqrt() * self.weight
        output = centred * scale.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)
        unbiased = variance.detach() * (count / (count - 1))
        return output.to(x.dtype), torch.stack([mean.detach(), unbiased])

    def _running(self) -> tuple[Tensor, Tensor]:
        assert self.running_mean is not None and self.running_var is not None
        return self.running_mean, self.running_var


class LayerState:
    """Tells layers which samples come next, and moves running statistics once per step."""

    def __init__(self, model: nn.Module, seed: int = 0) -> None:
        self._norms = [m for m in model.modules() if isinstance(m, BatchNorm2d)]
        self._noises = [m for m in model.modules() if isinstance(m, Noise)]
        for name, module in model.named_modules():
            if isinstance(module, Noise):
                module.key = keys.key(seed, "noise:" + name)
        self._groups: tuple[int, ...] = ()
        self._active: list[BatchNorm2d] = []  # the norms that recorded something in this step
        self._momentum: Tensor | None = None  # one per running value of the active norms
        self._pending: list[tuple[int, Tensor]] = []  # per group: samples, and all statistics in one tensor
        self._gather: Callable[[Groups], Groups] = lambda groups: groups
        self._settle: Callable[[], None] = lambda: None

    def join(
        self,
        gather: Callable[[Groups], Groups],
        spread: Callable[[Tensor], Tensor] | None = None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """Move statistics with other processes, whose groups `gather` adds; `spread` sums over parts of one group.

        `settle` follows: what other processes have moved is taken over.
        """
        self._gather, self._settle = gather, settle
        for norm in self._norms:
            norm.spread = spread

    def enter(self, batch: Batch, step: int | Tensor) -> None:
        """Announce the next micro-batch: its groups, and the keys of its samples."""
        self._collect()
        self._groups = batch.groups
        for norm in self._norms:
            norm.groups = batch.groups
        if self._noises:
            rows = row_keys(batch.positions, step)
            for noise in self._noises:
                noise.rows, noise.groups = rows, batch.groups

    def forget(self) -> None:
        """Drop what the passes of an unfinished step have recorded."""
        for norm in self._norms:
            norm.recorded = ()
        self._pending = []

    def commit(self, ok: Tensor) -> None:
        """Move running statistics by the sample-weighted mean over the step's groups, unless the step is not ok."""
        self._collect()
        for norm in self._norms:
            norm.groups = None
        for noise in self._noises:
            noise.rows, noise.groups = None, ()
        if self._pending:
            self._move(ok)
        self._pending = []
        self._settle()

    def _collect(self) -> None:
        """Take over what the last forward pass recorded: one tensor per group, so that a step costs few kernels."""
        active = [norm for norm in self._norms if norm.recorded]
        if not active:
            return
        if self._pending and active != self._active:
            raise RuntimeError("the micro-batches of one step went through different batch norms")
        if active != self._active:
            self._active, self._momentum = active, None
        for group, num_samples in enumerate(self._groups):
            flat = torch.cat([row for norm in active for row in norm.recorded[group].unbind()])
            self._pending.append((num_samples, flat))
        for norm in active:
            norm.recorded = ()

    def _move(self, ok: Tensor) -> None:
        running = [buffer for norm in self._active for buffer in norm._running()]
        old = torch.cat(running)
        if self._momentum is None:
            self._momentum = torch.cat(
                [torch.full_like(b, norm.momentum or 0.0) for norm in self._active for b in norm._running()]
            )
        new = old + self._momentum * (_weighted_mean(self._gather(self._pending)) - old)
        moved = torch.where(ok, new, old)
        torch._foreach_copy_(running, list(moved.split([b.numel() for b in running])))
        counters = [norm.num_batches_tracked for norm in self._active if norm.num_batches_tracked is not None]
        torch._foreach_add_(counters, [ok.to(counters[0].dtype)] * len(counters))


def _weighted_mean(pending: Groups) -> Tensor:
    """The mean weighted by samples, added in group order."""
    total = sum(num_samples for num_samples, _ in pending)
    if len(pending) == 1:
        return pending[0][1]
    mean = pending[0][1] * (pending[0][0] / total)
    for num_samples, statistics in pending[1:]:
        mean = mean + statistics * (num_samples / total)
    return mean
