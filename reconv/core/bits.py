"""Exact digests of tensors, computed on their device: sums of their bits as integers.

For the training state, the bytes of all tensors are laid out in one block of 64-bit words. A row of the block has one
digest, the sum of its words modulo 2^64, which any change within one word changes. No row has words of two tensors, so
that a row that differs names its tensor. Large tensors on a CPU are digested where they are, without a copy. A copy of
the block can be kept, and the state restored from it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element
_WORD_BYTES = 8
_ROW_WORDS = 64
_ROW_BYTES = _ROW_WORDS * _WORD_BYTES
_COPIED_BYTES = 1 << 16  # one copy of all tensors up to this size takes less time than a sum over each of them
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
        self.device = live[0].device if live else torch.device("cpu")
        # Copies of many tensors are one launch on a GPU where they have one dtype.
        by_dtype: dict[torch.dtype, list[int]] = {}
        for number, tensor in enumerate(live):
            by_dtype.setdefault(tensor.dtype, []).append(number)
        self._in_order = live
        self._live = [[live[number] for number in numbers] for numbers in by_dtype.values()]
        self._numbers = list(by_dtype.values())

    def new(self, device: torch.device | None = None) -> Tensor:
        """A block of zeros [rows, words]."""
        return torch.zeros(self.num_rows, _ROW_WORDS, dtype=torch.int64, device=device or self.device)

    def tensors(self) -> Iterator[tuple[str, Tensor, slice]]:
        """Name, content and rows of each tensor."""
        ends = [*self._first_rows[1:], self.num_rows]
        for name, tensor, first, end in zip(self.names, self._in_order, self._first_rows, ends, strict=True):
            yield name, tensor, slice(first, end)

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


def whole_rows(tensor: Tensor) -> Tensor:
    """The whole rows of a flat tensor where it is in memory [rows, words]; none of a small tensor.

    None on a GPU either: one sum over a copy of everything takes less time there than many launches.
    """
    num_rows = tensor.nbytes // _ROW_BYTES
    is_aligned = tensor.storage_offset() * tensor.element_size() % _WORD_BYTES == 0
    if tensor.device.type != "cpu" or tensor.nbytes < _COPIED_BYTES or not is_aligned:
        return torch.empty(0, _ROW_WORDS, dtype=torch.int64, device=tensor.device)
    words = tensor[: num_rows * _ROW_BYTES // tensor.element_size()].view(torch.int64)
    return words.view(num_rows, _ROW_WORDS)


class StateDigests:
    """Finds a change of the state between the update of one step and that of the next.

    `record` is called after each update and `check` before the next one; both run on the device, also in a captured
    graph. The first difference is kept until it is read.
    """

    def __init__(self, block: StateBlock) -> None:
        self.block = block
        self._large: list[tuple[Tensor, slice]] = []  # digested where they are, with their rows
        rests: dict[str, Tensor] = {}  # copied into a block of their own
        rest_rows: list[int] = []
        for name, tensor, rows in block.tensors():
            words = whole_rows(tensor)
            end = rows.start + len(words)
            if len(words):
                self._large.append((words, slice(rows.start, end)))
            if end < rows.stop:
                rests[name] = tensor[words.nbytes // tensor.element_size() :]
                rest_rows += range(end, rows.stop)
        self._rest = StateBlock(rests)
        self._copy = self._rest.new(block.device)
        self._views = self._rest.views(self._copy)
        self._rest_rows = torch.tensor(rest_rows, device=block.device)
        self.rows = torch.zeros(block.num_rows, dtype=torch.int64, device=block.device)
        self._current = torch.zeros_like(self.rows)
        self.found = torch.full((2,), _NONE, dtype=torch.int64, device=block.device)  # row and step

    def record(self) -> None:
        """Digest the state as it should be from now on."""
        self._digest(self.rows)

    def check(self, step: int | Tensor) -> None:
        """Compare the state with what was recorded; keeps the first row that differs and the step."""
        self._digest(self._current)
        if self.block.device.type == "cpu" and torch.equal(self._current, self.rows):
            return
        differs = self._current != self.rows
        first = torch.stack([differs.to(torch.uint8).argmax(), torch.zeros_like(self.found[0]) + step])
        is_new = differs.any() & (self.found[0] == _NONE)
        self.found.copy_(torch.where(is_new, first, self.found))

    def state(self) -> Tensor:
        """A copy of the state in a block of its own."""
        copied = self.block.new()
        self.block.copy_from_state(self.block.views(copied))
        return copied

    def _digest(self, rows: Tensor) -> None:
        """Write the digests of the state as it is now."""
        self._rest.copy_from_state(self._views)
        if not self._large:
            torch.sum(self._copy, 1, out=rows)
            return
        rows.index_copy_(0, self._rest_rows, row_digests(self._copy))
        for words, where in self._large:
            torch.sum(words, 1, out=rows[where])

    def reset(self) -> None:
        """Forget the difference that was found."""
        self.found.fill_(_NONE)

    def describe(self, found: Tensor) -> tuple[str, int] | None:
        """Tensor and step of what `check` has found, copied to the host; None if nothing."""
        row, step = found.tolist()
        return None if row == _NONE else (self.block.name_of(row), step)
