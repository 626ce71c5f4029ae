"""Exact digests of tensors, computed on their device: sums of their bits as integers.

For the training state, the bytes of all tensors are copied into one block of 64-bit words. A row of the block has one
digest, the sum of its words modulo 2^64, which any change within one word changes. No row has words of two tensors, so
that a row that differs names its tensor. The block is a copy of the state as well, from which it can be restored.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element
_WORD_BYTES = 8
_ROW_WORDS = 64
_ROW_BYTES = _ROW_WORDS * _WORD_BYTES
_NONE = -1


def bits_sum(tensor: Tensor) -> Tensor:
    """The sum of the elements' bit patterns modulo 2^64 [], which does not depend on the memory layout.

    Any change within one element changes it.
    """
    flat = in_storage_order(tensor.detach())
    return flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)


def in_storage_order(tensor: Tensor) -> Tensor:
    """A flat view of a dense tensor in memory order."""
    if not _is_dense(tensor):
        raise ValueError("only tensors without gaps in memory can be digested")
    return tensor.as_strided((tensor.numel(),), (1,))


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


class StateBlock:
    """The layout of a state in one block of memory; all tensors are on one device and stay where they are."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.names = list(tensors)
        live = [in_storage_order(tensor.detach()) for tensor in tensors.values()]
        self._first_rows: list[int] = []
        num_rows = 0
        for tensor in live:
            self._first_rows.append(num_rows)
            num_rows += max(1, -(-tensor.nbytes // _ROW_BYTES))
        self.num_rows = num_rows
        self.device = live[0].device
        # Copies of many tensors are one launch on a GPU where they have one dtype.
        by_dtype: dict[torch.dtype, list[int]] = {}
        for number, tensor in enumerate(live):
            by_dtype.setdefault(tensor.dtype, []).append(number)
        self._live = [[live[number] for number in numbers] for numbers in by_dtype.values()]
        self._numbers = list(by_dtype.values())

    def new(self, device: torch.device | None = None) -> Tensor:
        """A block of zeros [rows, words]."""
        return torch.zeros(self.num_rows, _ROW_WORDS, dtype=torch.int64, device=device or self.device)

    def views(self, block: Tensor) -> list[list[Tensor]]:
        """The tensors of the state in a block, by dtype, flat."""
        flat = block.view(-1).view(torch.uint8)
        return [
            [
                flat[start : start + tensor.nbytes].view(tensor.dtype)
                for number, tensor in zip(numbers, tensors, strict=True)
                for start in [self._first_rows[number] * _ROW_BYTES]
            ]
            for numbers, tensors in zip(self._numbers, self._live, strict=True)
        ]

    @torch.no_grad()
    def copy_from_state(self, views: Sequence[list[Tensor]]) -> None:
        """Copy the state into a block, given by its views."""
        for copies, tensors in zip(views, self._live, strict=True):
            torch._foreach_copy_(copies, tensors)

    @torch.no_grad()
    def copy_to_state(self, views: Sequence[list[Tensor]]) -> None:
        """Copy a block into the state."""
        for copies, tensors in zip(views, self._live, strict=True):
            torch._foreach_copy_(tensors, copies)

    def name_of(self, row: int) -> str:
        """The tensor that a row belongs to."""
        return self.names[bisect_right(self._first_rows, row) - 1]

    def first_difference(self, rows: Tensor, others: Tensor) -> str:
        """The first tensor whose digests differ; empty if all are equal."""
        differing = (rows.cpu() != others.cpu()).nonzero()
        return self.name_of(int(differing[0])) if len(differing) else ""


def row_digests(block: Tensor) -> Tensor:
    """The digest of each row of a block [rows, words]."""
    return block.sum(1)


class StateDigests:
    """Finds a change of the state between the update of one step and that of the next.

    `record` is called after each update and `check` before the next one; both run on the device, also in a captured
    graph. The first difference is kept until it is read.
    """

    def __init__(self, block: StateBlock) -> None:
        self.block = block
        self.copy = block.new()  # of the state, at the last call of `record` or `check`
        self._views = block.views(self.copy)
        self.rows = row_digests(self.copy)
        self.found = torch.full((2,), _NONE, dtype=torch.int64, device=block.device)  # row and step

    def record(self) -> None:
        """Digest the state as it should be from now on."""
        self.block.copy_from_state(self._views)
        torch.sum(self.copy, 1, out=self.rows)

    def check(self, step: int | Tensor) -> None:
        """Compare the state with what was recorded; keeps the first row that differs and the step."""
        self.block.copy_from_state(self._views)
        differs = row_digests(self.copy) != self.rows
        first = torch.stack([differs.to(torch.uint8).argmax(), torch.zeros_like(self.found[0]) + step])
        is_new = differs.any() & (self.found[0] == _NONE)
        self.found.copy_(torch.where(is_new, first, self.found))

    def reset(self) -> None:
        """Forget the difference that was found."""
        self.found.fill_(_NONE)

    def describe(self, found: Tensor) -> tuple[str, int] | None:
        """Tensor and step of what `check` has found, copied to the host; None if nothing."""
        row, step = found.tolist()
        return None if row == _NONE else (self.block.name_of(row), step)
