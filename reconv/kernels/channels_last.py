"""A channels_last tensor as rows of channels, and how its rows are divided among the programs of a kernel.

A tile is 8 times `lanes` rows by `block` channels, so that a thread holds 8 rows of 8 channels: eight 16-byte loads in
flight, column sums without a shuffle, and the 8 bits of a mask byte. The division depends on shapes and the device
alone, never on values, so that it holds in a captured CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from reconv.kernels.jit.launch import MAX_GRID_YZ

ROWS_PER_THREAD = 8
_CHANNELS_PER_THREAD = 8  # 16 bytes in half precision
_WARP_THREADS = 32
_CHANNEL_BLOCKS = (64, 32, 16)
_MIN_UTILIZATION = 0.9
_TILES_PER_PROGRAM = 2
_INTERPRETED_SMS = 1
_INTERPRETED_SHARED_BYTES = 224 * 1024
_SUMS_BYTES = 8 * 1024  # shared memory for the column sums of a program
_MAX_COUNTERS = 16384


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Launch settings of a kernel: warps per program, pipeline stages, and programs per SM."""

    warps: int = 4
    stages: int = 1  # 1: no prefetching
    programs_per_sm: int | None = None  # None: one program per two tiles


@dataclass(frozen=True)
class ChannelRows:
    """Rows [n * height * width, channels] in groups of `group_rows` rows; the last group has the rest.

    What follows from these numbers is computed once: a step of ResNet-50 asks 5,000 times for it.
    """

    num_rows: int
    channels: int
    group_rows: int
    num_groups: int
    num_sms: int
    shared_bytes: int  # available to a program

    @cached_property
    def block(self) -> int:
        """Channels of a tile, a power of two: the largest that leaves few threads without a channel."""
        widest = min(_CHANNEL_BLOCKS[0], 1 << (self.channels - 1).bit_length())
        blocks = [block for block in (*_CHANNEL_BLOCKS, widest) if block <= widest]
        return max(blocks, key=lambda block: (min(self._used(block), _MIN_UTILIZATION), block))

    def _used(self, block: int) -> float:
        """The share of threads that have a channel."""
        return self.channels / (-(-self.channels // block) * block)

    def lanes(self, config: LaunchConfig) -> int:
        """Rows of a tile that are in different threads."""
        return config.warps * _WARP_THREADS * _CHANNELS_PER_THREAD // self.block

    def tile_rows(self, config: LaunchConfig) -> int:
        """Rows of a tile."""
        return ROWS_PER_THREAD * self.lanes(config)

    @property
    def num_blocks(self) -> int:
        """Tiles along the channels."""
        return -(-self.channels // self.block)

    @property
    def num_counts(self) -> int:
        """Counters that a reduction needs: one for each block of channels of a group."""
        return self.num_blocks * self.num_groups

    @property
    def largest_group(self) -> int:
        """Rows of the largest group."""
        return max(self.group_rows, self.num_rows - (self.num_groups - 1) * self.group_rows)

    def num_tiles(self, config: LaunchConfig) -> int:
        """Tiles along the rows of the largest group."""
        return -(-self.largest_group // self.tile_rows(config))

    def splits(self, config: LaunchConfig) -> int:
        """Programs that share a block of channels of a group, with nearly equal numbers of tiles."""
        known = self._splits.get(config)
        if known is None:
            known = self._splits[config] = self._count_splits(config)
        return known

    @cached_property
    def _splits(self) -> dict[LaunchConfig, int]:
        return {}

    def _count_splits(self, config: LaunchConfig) -> int:
        tiles = self.num_tiles(config)
        num_programs = max(1, tiles // _TILES_PER_PROGRAM)
        if config.programs_per_sm is not None:
            num_programs = max(1, config.programs_per_sm * self.num_sms // (self.num_blocks * self.num_groups))
        tiles_each = -(-tiles // min(num_programs, tiles))
        return min(-(-tiles // tiles_each), MAX_GRID_YZ)

    def grid(self, config: LaunchConfig) -> tuple[int, int, int]:
        """The launch grid: blocks of channels, splits of the rows, groups."""
        return self.num_blocks, self.splits(config), self.num_groups

    def tile_grid(self, tile_rows: int, programs_per_sm: int, num_blocks: int = 1) -> tuple[int, int, int]:
        """The launch grid of kernels with tiles of their own: blocks of channels, splits of the rows with nearly equal
        numbers of tiles, groups."""
        tiles = -(-self.largest_group // tile_rows)
        num_programs = max(1, programs_per_sm * self.num_sms // (num_blocks * self.num_groups))
        tiles_each = -(-tiles // min(num_programs, tiles, MAX_GRID_YZ))
        return num_blocks, -(-tiles // tiles_each), self.num_groups

    def stages(self, config: LaunchConfig, *tiles: Tensor) -> int:
        """Pipeline stages for tiles of these tensors: as configured, if shared memory suffices."""
        prefetch_bytes = self.tile_rows(config) * self.block * sum(tensor.element_size() for tensor in tiles)
        return min(config.stages, 1 + self.shared_bytes // prefetch_bytes)

    def row_grid(self, config: LaunchConfig) -> tuple[int, int, int]:
        """The launch grid of kernels whose programs process one row per thread at a time."""
        return self.num_blocks, min(self.splits(config) * _TILES_PER_PROGRAM, MAX_GRID_YZ), self.num_groups


def channel_rows(x: Tensor, groups: Sequence[int]) -> ChannelRows:
    """The rows of an image tensor whose samples are in groups."""
    samples, channels, height, width = x.shape
    pixels = height * width
    return _channel_rows(samples * pixels, channels, groups[0] * pixels, len(groups), *_device_limits(x.device))


_channel_rows = lru_cache(maxsize=4096)(ChannelRows)


@cache
def _device_limits(device: torch.device) -> tuple[int, int]:
    """The number of SMs of a device, and the shared memory available to a program beside its sums."""
    if device.type != "cuda":
        return _INTERPRETED_SMS, _INTERPRETED_SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack the second property
    return properties.multi_processor_count, properties.shared_memory_per_block_optin - _SUMS_BYTES


def split_tiles(
    x: Tensor, groups: Sequence[int], num_tiles: int, programs_per_sm: int, num_blocks: int
) -> tuple[int, int]:
    """Programs that share a group's tiles, of which the largest group has `num_tiles`, and how many each has."""
    num_programs = max(1, programs_per_sm * channel_rows(x, groups).num_sms // (num_blocks * len(groups)))
    tiles = -(-num_tiles // min(num_programs, num_tiles, MAX_GRID_YZ))
    return -(-num_tiles // tiles), tiles


_counters: dict[torch.device, Tensor] = {}


def counters(number: int, device: torch.device) -> Tensor:
    """At least `number` zeroed counters for reductions; the last program of a reduction resets its counter.

    One set per device: reductions run one after another, on one stream.
    """
    if number > _MAX_COUNTERS:
        return torch.zeros(number, dtype=torch.int32, device=device)
    if device not in _counters:
        _counters[device] = torch.zeros(_MAX_COUNTERS, dtype=torch.int32, device=device)
    return _counters[device]
