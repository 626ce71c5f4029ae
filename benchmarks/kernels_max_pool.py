"""Measure max-pools of GoogLeNet and ResNet on a CUDA GPU, alone and with the norm before them.

    python -m benchmarks.kernels_max_pool [--batch 256] [--sweep]

Times are of bfloat16 images in a CUDA graph with rotated inputs; "bytes" is the time in which a copy moves what must be
read and written. `--sweep` tries sizes of the strips that a program processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernels import ROTATED_BYTES, gradients, random_norm, random_tensor, try_time
from reconv.kernels.channels_last import channel_rows
from reconv.kernels.ops import max_pool as ops
from reconv.kernels.ops import norm_max_pool as norm_pool
from reconv.kernels.ops.batch_norm import NormInput, statistics
from reconv.kernels.window import STEM_WINDOW, PoolWindow

DTYPE = torch.bfloat16
COPY_BYTES_PER_S = 4.2e12
POOLS = (  # channels, side
    (192, 28, PoolWindow(3, 1, 1, True)),
    (256, 28, PoolWindow(3, 1, 1, True)),
    (480, 28, PoolWindow(3, 2, 0, True)),
    (512, 14, PoolWindow(3, 1, 1, True)),
    (832, 7, PoolWindow(3, 1, 1, True)),
)
NORM_POOLS = ((64, 112, STEM_WINDOW), (192, 56, PoolWindow(3, 2, 0, True)))
COLUMNS, LINES = (4, 8, 16), (7, 16, 32)  # of a strip or tile


@dataclass(frozen=True, slots=True)
class Pass:
    """One kernel on one shape, ours and torch's."""

    name: str
    num_bytes: int
    ours: Sequence[Callable[[], Any]]  # one call per copy of the inputs
    torchs: Sequence[Callable[[], Any]] = ()


def pools(batch: int, channels: int, side: int, window: PoolWindow) -> list[Pass]:
    copies = max(2, int(ROTATED_BYTES / (batch * channels * side * side * DTYPE.itemsize)))
    images = [random_tensor(batch, channels, side, side, dtype=DTYPE).requires_grad_() for _ in range(copies)]
    assert isinstance(window.pad, int)
    plain = partial(F.max_pool2d, kernel_size=3, stride=window.stride, padding=window.pad, ceil_mode=window.ceil)
    pool = partial(ops.max_pool, window=window)
    dy = random_tensor(*pool(images[0]).shape, dtype=DTYPE)
    num_bytes = images[0].nbytes + dy.nbytes + dy.numel()
    name = f"{channels}, {side}, stride {window.stride}"
    forward = [[partial(function, x) for x in images] for function in (pool, plain)]
    both = [[partial(gradients, function, [x], dy) for x in images] for function in (pool, plain)]
    return [Pass(f"pool {name}", num_bytes, *forward), Pass(f"with gradient {name}", 2 * num_bytes, *both)]


def norm_pools(batch: int, channels: int, side: int, window: PoolWindow) -> list[Pass]:
    operands = []
    for _ in range(2):
        x, of = random_tensor(batch, channels, side, side, dtype=DTYPE), random_norm(channels)
        operands.append(NormInput(x, statistics(x, of, channel_rows(x, (batch,))), of.weight, of.bias))
    forward = [partial(norm_pool.write_pooled, operand, (batch,), window) for operand in operands]
    y, peak, place = forward[0]()
    sums = torch.zeros(2, 1, channels, device="cuda")
    backward = [partial(norm_pool.input_gradient, y, place, operand, sums, (batch,), window) for operand in operands]
    image_bytes = operands[0].x.nbytes
    return [
        Pass(f"norm and pool {channels}, {side}", image_bytes + y.nbytes + peak.nbytes + place.nbytes, forward),
        Pass(f"its gradient {channels}, {side}", 2 * image_bytes + y.nbytes + place.nbytes, backward),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--sweep", action="store_true")
    given = parser.parse_args()
    measured = [one for pool in POOLS for one in pools(given.batch, *pool)]
    measured += [one for pool in NORM_POOLS for one in norm_pools(given.batch, *pool)]
    print(f"{'us':>33}  bytes   ours  torch")
    for one in measured:
        torchs = try_time(list(one.torchs)) * 1000 if one.torchs else float("nan")
        bytes_us = 1e6 * one.num_bytes / COPY_BYTES_PER_S
        print(f"{one.name:>33} {bytes_us:6.0f} {try_time(list(one.ours)) * 1000:6.0f} {torchs:6.0f}", flush=True)
    if given.sweep:
        for one in (one for one in measured if one.torchs):
            times = {}
            for columns, lines in product(COLUMNS, LINES):
                ops._STRIP_COLUMNS, ops._STRIP_LINES = columns, lines
                times[columns, lines] = try_time(list(one.ours)) * 1000
            best = sorted(times, key=lambda key: times[key])[:4]
            print(f"{one.name:>33}", *(f"{key[0]}x{key[1]}: {times[key]:.0f}" for key in best), flush=True)


if __name__ == "__main__":
    main()
