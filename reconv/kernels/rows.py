"""A channels_last tensor as rows of channels, and how its rows are dealt to the programs of a kernel.

Owns the tile shape, which is one for all kernels of a channel count: a tile is 8 slabs of `lanes` rows by `block`
channels, so that a thread holds 8 rows of 8 channels: eight 16-byte loads in flight, column sums without a shuffle,
and the 8 bits of a mask byte. Refuses to know what is computed. Invariant: the plan depends on shapes and the device
alone, never on values, so that a captured graph stays right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

SLABS = 8
WARPS = 4
_SLAB_VALUES = 1024  # of 128 threads, 8 each
_WIDEST_BLOCK = 64
_REDUCING_PROGRAMS_PER_SM = 4
_MAPPING_TILES_PER_PROGRAM = 2
_MOST_SPLITS = 65535  # of a grid's second axis
_INTERPRETED_SMS = 1
_MOST_COUNTERS = 16384


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [n * height * width, channels] in groups: all of `group_rows` rows but the last, which has the rest."""

    num_rows: int
    channels: int
    group_rows: int
    num_groups: int
    num_sms: int

    @property
    def block(self) -> int:
        """Channels of a tile: a power of two."""
        return min(_WIDEST_BLOCK, 1 << (self.channels - 1).bit_length())

    @property
    def lanes(self) -> int:
        """Rows of a slab."""
        return _SLAB_VALUES // self.block

    @property
    def num_blocks(self) -> int:
        """Tiles beside each other."""
        return -(-self.channels // self.block)

    @property
    def num_tiles(self) -> int:
        """Tiles below each other, in the largest group."""
        last = self.num_rows - (self.num_groups - 1) * self.group_rows
        return -(-max(self.group_rows, last) // (SLABS * self.lanes))

    @property
    def reducing_splits(self) -> int:
        """Programs that share a block of channels of a group, where each leaves one partial sum."""
        wanted = max(1, _REDUCING_PROGRAMS_PER_SM * self.num_sms // (self.num_blocks * self.num_groups))
        return self._even_splits(wanted)

    @property
    def mapping_splits(self) -> int:
        """Programs that share a block of channels of a group, where nothing is left over."""
        return self._even_splits(max(1, self.num_tiles // _MAPPING_TILES_PER_PROGRAM))

    @property
    def slab_splits(self) -> int:
        """The same, of programs that take a slab at a time."""
        return min(self.mapping_splits * _MAPPING_TILES_PER_PROGRAM, _MOST_SPLITS)

    def _even_splits(self, wanted: int) -> int:
        """About so many, such that all programs have nearly the same number of tiles."""
        tiles_each = -(-self.num_tiles // min(wanted, self.num_tiles))
        return min(-(-self.num_tiles // tiles_each), _MOST_SPLITS)


def rows_of(x: Tensor, groups: Sequence[int]) -> Rows:
    """The rows of an image tensor whose samples are in groups."""
    samples, channels, height, width = x.shape
    return Rows(samples * height * width, channels, groups[0] * height * width, len(groups), num_sms(x.device))


@cache
def num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


_counters: dict[torch.device, Tensor] = {}


def counters(rows: Rows, device: torch.device) -> Tensor:
    """Zeros for programs to count themselves with; the last one of a count leaves a zero again.

    One set per device: the kernels that count run one after another, on one stream.
    """
    if rows.num_blocks * rows.num_groups > _MOST_COUNTERS:
        return torch.zeros(rows.num_blocks * rows.num_groups, dtype=torch.int32, device=device)
    if device not in _counters:
        _counters[device] = torch.zeros(_MOST_COUNTERS, dtype=torch.int32, device=device)
    return _counters[device]
