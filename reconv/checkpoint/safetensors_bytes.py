"""The bytes of a safetensors file, taken from the memory of the tensors.

The layout is that of the `safetensors` library, which copies every tensor twice, needs contiguous ones, and writes
metadata in random order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import groupby

import torch
from torch import Tensor

# In the order in which the library lays them out: the last ones first.
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
_RANKS = {dtype: rank for rank, dtype in enumerate(_DTYPES)}
_MIN_PIECE_BYTES = 2**16  # smaller pieces are joined


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The content of a safetensors file; equal tensors and metadata give equal bytes."""
    return b"".join(encode_pieces(tensors, metadata))


def encode_pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> list[memoryview]:
    """The content of a safetensors file in pieces, most of them the memory of a tensor.

    Nothing large is copied, unless a tensor is on a device or not contiguous. So a checkpoint is written at the speed
    of the disk, and without holding the GIL, which a training loop in another thread needs.
    """
    names = sorted(tensors, key=lambda name: (-_RANKS[tensors[name].dtype], name))
    entries: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        dtype, shape = _DTYPES[tensors[name].dtype], list(tensors[name].shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = memoryview(len(text).to_bytes(8, "little") + text)
    return _join_small([header, *(_memory(tensors[name]) for name in names if tensors[name].numel())])


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, in the order of its elements."""
    data: memoryview = tensor.detach().cpu().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data


def _join_small(pieces: Iterable[memoryview]) -> list[memoryview]:
    joined: list[memoryview] = []
    for is_small, group in groupby(pieces, lambda piece: piece.nbytes < _MIN_PIECE_BYTES):
        neighbors = list(group)
        joined += [memoryview(b"".join(neighbors))] if is_small else neighbors
    return joined
