"""Winograd convolutions for the layers and batches where they are faster than oneDNN's direct ones.

Which convolutions are Winograd's depends on the shape of a batch alone, never on the number of threads or on timing,
so that ranks give the bits of one process (tests/inference/test_winograd.py).

The optional compiled library has the convolution of 3x3, stride 1 and padding 1 in fp32 on a CPU, by Winograd's
F(4x4, 3x3). It runs on the threads of torch. A convolution gives an image the same bits in any batch and on any number
of threads.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconv.kernels.ops.conv_candidates import ConvConfig

# Measured against oneDNN 3.12 on one core with AVX-512 and AVX2; see benchmarks/LOG.md.
# Not by the number of threads: ranks with fewer of them give the bits of one process.
_MIN_CHANNELS = 16
_MIN_TILES = 12  # transformed weights are four times as large: fewer tiles wait for memory
_MIN_FILLED_FRACTION = 0.5  # of the pixels of the tiles

_ACTIVATIONS = ("none", "relu")
_MAX_DIFFERENCE = 1e-4  # from the direct convolution, relative to the largest output
LIBRARY = Path(__file__).with_name("_winograd.so")
VERSION = 1  # of the functions and of the layout of weights
TILE = 4  # side of the outputs that are computed together
PLAIN, AVX2, AVX512 = range(3)  # instructions

_NUM_POINTS = (TILE + 2) ** 2
_NEAR, _FAR = 0.5, 2.0  # squares of the points P and Q of csrc/winograd/kernels.h
_LINE_BYTES = 64
_HUGE_PAGE_BYTES = 2 << 20


def with_winograd(direct: nn.Module, weight: Tensor, bias: Tensor, config: ConvConfig) -> nn.Module:
    """`direct`, or a module that equals it and is faster for some batches; both take (x, other, gate)."""
    if not is_supported(weight, config):
        return direct
    convolution = WinogradConvolution(direct, weight, bias, config)
    return convolution if _equals_direct(convolution, weight) else direct


def is_supported(weight: Tensor, config: ConvConfig) -> bool:
    """True if the library has such a convolution, for instructions that were measured, on the threads of torch."""
    is_plain = config.stride == config.padding == config.dilation == (1, 1) and config.groups == 1
    is_float = weight.dtype == torch.float32 and tuple(weight.shape[2:]) == (3, 3)
    has_channels = min(weight.shape[:2]) >= _MIN_CHANNELS
    if not (is_plain and is_float and has_channels and config.act in _ACTIVATIONS):
        return False
    return not problem() and fastest_instructions() != PLAIN and (torch.get_num_threads() == 1 or can_use_threads())


def is_faster(batch: int, height: int, width: int) -> bool:
    """True if a supported convolution of so many images is faster than a direct one."""
    num_tiles = batch * -(-height // TILE) * -(-width // TILE)
    min_pixels = _MIN_FILLED_FRACTION * num_tiles * TILE * TILE
    return num_tiles >= _MIN_TILES and batch * height * width >= min_pixels


class WinogradConvolution(nn.Module):
    """act(conv(x) + bias + other): by Winograd's algorithm where that is faster, else by `direct`."""

    def __init__(self, direct: nn.Module, weight: Tensor, bias: Tensor, config: ConvConfig) -> None:
        super().__init__()
        self.direct = direct
        self._weights = transform_weights(weight, bias)
        self._has_relu = config.act == "relu"

    def forward(self, x: Tensor, other: Tensor | None, gate: Tensor | None) -> Tensor:
        if gate is None and is_faster(len(x), x.shape[2], x.shape[3]):
            return self.winograd(x, other)
        y: Tensor = self.direct(x, other, gate)
        return y

    def winograd(self, x: Tensor, other: Tensor | None) -> Tensor:
        """The output by Winograd's algorithm, for any batch."""
        return winograd_conv(x, self._weights, other, self._has_relu)


def _equals_direct(convolution: WinogradConvolution, weight: Tensor) -> bool:
    """True if both ways give the same on one small image."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, weight.shape[1], TILE + 2, TILE + 1, generator=generator)
    x = x.contiguous(memory_format=torch.channels_last)
    expected = convolution.direct(x, None, None).double()
    difference = (convolution.winograd(x, None).double() - expected).abs().max()
    return bool(difference <= _MAX_DIFFERENCE * expected.abs().max().clamp(min=1e-30))


class ConvolutionCall(ctypes.Structure):
    """The arguments of a convolution, as `convolution_call` of csrc/winograd/winograd.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "weights", "bias", "other", "output", "workspace", "parallel")),
        ("batch", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("height", "width", "in_channels", "out_channels")),
        *((name, ctypes.c_int32) for name in ("apply_relu", "num_threads", "instructions")),
    )


class TransformedWeights(NamedTuple):
    """The weights of a convolution in the layout of the library."""

    panels: Tensor  # [panels, 36, in_channels, panel_width]
    bias: Tensor  # [out_channels]
    instructions: int


@cache
def problem() -> str:
    """Reason why the library cannot be used; empty if it can."""
    try:
        version: int = ctypes.CDLL(str(LIBRARY)).reconv_winograd_version()  # not by `_load`: others have other calls
    except (OSError, AttributeError) as error:  # AttributeError: it is another library
        return "it was not compiled" if not LIBRARY.exists() else f"it does not load: {error}"
    return "" if version == VERSION else f"it has version {version} instead of {VERSION}: compile it again"


@cache
def _load(path: Path) -> ctypes.CDLL:
    """The library with its functions declared."""
    library = ctypes.CDLL(str(path))
    library.reconv_winograd_workspace.restype = ctypes.c_int64
    library.reconv_winograd_convolution.argtypes = (ctypes.POINTER(ConvolutionCall),)
    library.reconv_winograd_convolution.restype = None
    return library


def fastest_instructions() -> int:
    """The fastest instructions of this processor: PLAIN, AVX2 or AVX512."""
    instructions: int = _load(LIBRARY).reconv_winograd_instructions()
    return instructions


@cache
def _torch_parallel() -> int | None:
    """The address of GOMP_parallel in torch's OpenMP: its threads are used, and no others; None without it."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value  # torch has made its symbols global
    except AttributeError:
        return None


def can_use_threads() -> bool:
    """True if a convolution can run on the threads of torch."""
    return _torch_parallel() is not None


def transform_weights(weight: Tensor, bias: Tensor | None, instructions: int | None = None) -> TransformedWeights:
    """Weights [out_channels, in_channels, 3, 3], transformed in float64 and rounded once; without a bias it is zero."""
    instructions = fastest_instructions() if instructions is None else instructions
    width = _load(LIBRARY).reconv_winograd_panel_width(instructions)
    out_channels, in_channels = weight.shape[:2]
    num_panels = -(-out_channels // width)
    padded = F.pad(weight.detach().double().contiguous(), (0, 0, 0, 0, 0, 0, 0, num_panels * width - out_channels))
    columns = padded.view(num_panels, width, in_channels, 9).permute(0, 3, 2, 1).reshape(num_panels, 9, -1)
    panels = _empty_on_huge_pages((num_panels, _NUM_POINTS, in_channels, width))
    panels.view(num_panels, _NUM_POINTS, -1).copy_(_weight_transform() @ columns)
    bias = torch.zeros(out_channels) if bias is None else bias.detach().float().contiguous()
    return TransformedWeights(panels, bias, instructions)


def _empty_on_huge_pages(shape: tuple[int, ...]) -> Tensor:
    """A tensor on huge pages where the kernel has them: layers of 256 to 512 channels are 1.05 to 1.26 x as fast."""
    num_bytes = 4 * math.prod(shape)
    if num_bytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)  # keeps the memory alive


def _weight_transform() -> Tensor:
    """The matrix [36, 9] that transforms a kernel of 3x3, for the points 0, +-P, +-Q and infinity, in float64."""
    rows = [(1 / (_NEAR * _FAR), 0.0, 0.0)]
    for square, other in ((_NEAR, _FAR), (_FAR, _NEAR)):
        scale = 2 * square * (square - other)
        rows += [(1 / scale, point / scale, square / scale) for point in (square**0.5, -(square**0.5))]
    matrix = torch.tensor([*rows, (0.0, 0.0, 1.0)], dtype=torch.float64)
    return torch.kron(matrix, matrix)


def winograd_conv(x: Tensor, weights: TransformedWeights, other: Tensor | None = None, relu: bool = False) -> Tensor:
    """relu(conv(x) + bias + other) in channels_last, for x [n, in_channels, h, w] and other [n, out_channels, h, w]."""
    batch, in_channels, height, width = x.shape
    out_channels = len(weights.bias)
    x = _channels_last(x, (batch, weights.panels.shape[2], height, width))
    output = torch.empty((batch, out_channels, height, width), memory_format=torch.channels_last)
    other = None if other is None else _channels_last(other, output.shape)
    other_address = None if other is None else other.data_ptr()
    num_threads = torch.get_num_threads() if can_use_threads() else 1
    library = _load(LIBRARY)
    num_floats = num_threads * library.reconv_winograd_workspace(in_channels, weights.instructions)
    call = ConvolutionCall(
        *(x.data_ptr(), weights.panels.data_ptr(), weights.bias.data_ptr(), other_address, output.data_ptr()),
        *(_workspace(num_floats), _torch_parallel(), batch, height, width, in_channels, out_channels),
        *(relu, num_threads, weights.instructions),
    )
    library.reconv_winograd_convolution(ctypes.byref(call))
    return output


def _channels_last(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The images in the memory format that the library reads; it would read anything, so they are checked."""
    if tuple(images.shape) != tuple(shape) or images.dtype != torch.float32 or images.device.type != "cpu":
        found = f"{images.dtype} {tuple(images.shape)} on {images.device}"
        raise ValueError(f"expected float32 {tuple(shape)} on the CPU, not {found}")
    return images.contiguous(memory_format=torch.channels_last)


_own = threading.local()  # memory of the calling thread


def _workspace(num_floats: int) -> int:
    """The address of memory that no other thread uses, aligned to a cache line; its content is undefined."""
    buffer: Tensor | None = getattr(_own, "buffer", None)
    if buffer is None or buffer.numel() < num_floats + _LINE_BYTES // 4:
        buffer = _own.buffer = torch.empty(num_floats + _LINE_BYTES // 4, dtype=torch.float32)
    return -(-buffer.data_ptr() // _LINE_BYTES) * _LINE_BYTES
