"""The bytes of a safetensors file, in one buffer and with one copy of every tensor.

The layout is that of the `safetensors` library, which copies every tensor twice, needs contiguous ones, and writes
metadata in random order. Everything that takes long runs without the GIL, so that a training loop in another thread
goes on meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

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


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> memoryview:
    """The content of a safetensors file; equal tensors and metadata give equal bytes."""
    names = sorted(tensors, key=lambda name: (-_RANKS[tensors[name].dtype], name))
    entries: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        dtype, shape = _DTYPES[tensors[name].dtype], list(tensors[name].shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    buffer = torch.empty(first + end, dtype=torch.uint8, device="cpu")  # a bytearray would be filled with zeros first
    data: memoryview = buffer.numpy().data
    data[:first] = len(text).to_bytes(8, "little") + text
    _copy_into(buffer[first:], [tensors[name] for name in names])
    return data


def _copy_into(buffer: Tensor, tensors: list[Tensor]) -> None:
    """Copy tensors of any layout and device, one after the other."""
    for tensor, part in zip(tensors, buffer.split([tensor.nbytes for tensor in tensors]), strict=True):
        if tensor.numel():
            part.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
