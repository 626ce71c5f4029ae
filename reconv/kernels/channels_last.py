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
from typing import Any

import torch
from torch import Tensor

from reconv.kernels.jit.launch import MAX_GRID_YZ

ROWS_PER_THREAD = 8
_CHANNELS_PER_THREAD = 8  # of a slab, 16 bytes of halves
_WARP_THREADS = 32
_CHANNEL_BLOCKS = (64, 32, 16)
_MIN_UTILISATION = 0.9
_TILES_PER_PROGRAM = 2
_INTERPRETED_SMS = 1
_INTERPRETED_SHARED_BYTES = 224 * 1024
_SUMS_BYTES = 8 * 1024  # of shared memory, for the columns' sums of a program
_MAX_COUNTERS = 16384


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How a kernel is launched: warps of a program, tiles copied ahead of the one in work, programs per processor."""

    warps: int = 4
    stages: int = 1  # 1: loaded when they are needed
    programs_per_sm: int | None = None  # None: as many programs as there are pairs of tiles


@dataclass(frozen=True, slots=True)
class ChannelRows:
    """Rows [n * height * width, channels] in groups: all of `group_rows` rows but the last, which has the rest."""

    num_rows: int
    channels: int
    group_rows: int
    num_groups: int
    num_sms: int
    shared_bytes: int  # of a program, at most

    @property
    def block(self) -> int:
        """Channels of a tile, a power of two: the widest that leaves few threads without a channel."""
        widest = min(_CHANNEL_BLOCKS[0], 1 << (self.channels - 1).bit_length())
        blocks = [block for block in (*_CHANNEL_BLOCKS, widest) if block <= widest]
        return max(blocks, key=lambda block: (min(self._used(block), _MIN_UTILISATION), block))

    def _used(self, block: int) -> float:
        """The share of threads that have a channel."""
        return self.channels / (-(-self.channels // block) * block)

    def lanes(self, form: LaunchConfig) -> int:
        """Rows of a slab."""
        return form.warps * _WARP_THREADS * _CHANNELS_PER_THREAD // self.block

    def tile_rows(self, form: LaunchConfig) -> int:
        """Rows of a tile."""
        return ROWS_PER_THREAD * self.lanes(form)

    @property
    def num_blocks(self) -> int:
        """Tiles beside each other."""
        return -(-self.channels // self.block)

    @property
    def num_counts(self) -> int:
        """Counts that programs keep who add up to one sum: blocks of channels of a group."""
        return self.num_blocks * self.num_groups

    def num_tiles(self, form: LaunchConfig) -> int:
        """Tiles below each other, in the largest group."""
        last = self.num_rows - (self.num_groups - 1) * self.group_rows
        return -(-max(self.group_rows, last) // self.tile_rows(form))

    def splits(self, form: LaunchConfig) -> int:
        """Programs that share a block of channels of a group, all with nearly the same number of tiles."""
        tiles = self.num_tiles(form)
        wanted = max(1, tiles // _TILES_PER_PROGRAM)
        if form.programs_per_sm is not None:
            wanted = max(1, form.programs_per_sm * self.num_sms // (self.num_blocks * self.num_groups))
        tiles_each = -(-tiles // min(wanted, tiles))
        return min(-(-tiles // tiles_each), MAX_GRID_YZ)

    def grid(self, form: LaunchConfig) -> tuple[int, int, int]:
        """Programs: blocks of channels, splits of the rows, groups."""
        return self.num_blocks, self.splits(form), self.num_groups

    def stages(self, form: LaunchConfig, *tiles: Tensor) -> int:
        """Tiles of these tensors that are copied ahead: as many as wished, if the processor has room for them."""
        ahead_bytes = self.tile_rows(form) * self.block * sum(tensor.element_size() for tensor in tiles)
        return min(form.stages, 1 + self.shared_bytes // ahead_bytes)

    def slab_grid(self, form: LaunchConfig) -> tuple[int, int, int]:
        """The same, of programs that take a slab at a time."""
        return self.num_blocks, min(self.splits(form) * _TILES_PER_PROGRAM, MAX_GRID_YZ), self.num_groups


def channel_rows(x: Tensor, groups: Sequence[int]) -> ChannelRows:
    """The rows of an image tensor whose samples are in groups."""
    samples, channels, height, width = x.shape
    sms, shared_bytes = _device_limits(x.device)
    return ChannelRows(samples * height * width, channels, groups[0] * height * width, len(groups), sms, shared_bytes)


@cache
def _device_limits(device: torch.device) -> tuple[int, int]:
    """Processors of a device, and the shared memory that a program may have, some of which its sums need."""
    if device.type != "cuda":
        return _INTERPRETED_SMS, _INTERPRETED_SHARED_BYTES
    found: Any = torch.cuda.get_device_properties(device)  # torch's stubs do not know of the second
    return found.multi_processor_count, found.shared_memory_per_block_optin - _SUMS_BYTES


_counters: dict[torch.device, Tensor] = {}


def counters(number: int, device: torch.device) -> Tensor:
    """So many zeros (or more) for programs to count themselves with; the last one of a count leaves a zero again.

    One set per device: the kernels that count run one after another, on one stream.
    """
    if number > _MAX_COUNTERS:
        return torch.zeros(number, dtype=torch.int32, device=device)
    if device not in _counters:
        _counters[device] = torch.zeros(_MAX_COUNTERS, dtype=torch.int32, device=device)
    return _counters[device]
