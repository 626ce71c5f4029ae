"""Reads TensorFlow checkpoints without TensorFlow.

The format is the "tensor bundle" of TensorFlow 1 savers (V2) and of TensorFlow 2: `PREFIX.index`, a table from tensor
names to dtype, shape, data file, offset, size and checksum; and `PREFIX.data-00000-of-00002` and so on. Checksums are
verified, malformed files raise nothing but `CheckpointError`, and memory stays within the size of the files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reconv.checkpoint.interop.sstable import has_footer, read_table
from reconv.checkpoint.locate import INDEX_SUFFIX, tensorflow_prefix
from reconv.core.errors import CheckpointError
from reconv.storage import read_limits
from reconv.storage.bounded import read_bytes
from reconv.storage.tensorflow_encoding import Field, MalformedError, masked_crc32c, read_message

_VERSION = 1  # of the bundle format
_MAX_RANK = 8
_MAX_NUMEL = 1 << 48

# By the number of tensorflow.DataType: numpy dtype of the stored bytes, torch dtype.
_DTYPES: Mapping[int, tuple[str, torch.dtype]] = {
    1: ("<f4", torch.float32),
    2: ("<f8", torch.float64),
    3: ("<i4", torch.int32),
    4: ("u1", torch.uint8),
    5: ("<i2", torch.int16),
    6: ("i1", torch.int8),
    9: ("<i8", torch.int64),
    10: ("?", torch.bool),
    14: ("<i2", torch.bfloat16),
    19: ("<f2", torch.float16),
}
_NOT_NUMERIC = frozenset({7, 20, 21})  # strings, resource handles, variants


@dataclass(frozen=True, slots=True)
class _Header:
    num_files: int = 1
    is_big_endian: bool = False
    oldest_reader: int = 0


@dataclass(slots=True)
class _Entry:
    """The dtype, shape and location of a tensor."""

    name: str
    dtype: int = 0
    shape: list[int] = field(default_factory=list)
    file: int = 0
    offset: int = 0
    num_bytes: int = 0
    checksum: int = 0
    is_sliced: bool = False


def read_tensorflow(path: Path) -> dict[str, Tensor]:
    """Read every numeric tensor of a checkpoint under its TensorFlow name."""
    prefix = tensorflow_prefix(path)
    if prefix is None:
        raise CheckpointError(
            "not a TensorFlow checkpoint",
            where=str(path),
            why="there is no .index file with this prefix, nor a folder with a `checkpoint` file",
            hint=f"ls '{path.parent}', and use the part of the name before .index",
        )
    index = prefix.with_name(prefix.name + INDEX_SUFFIX)
    try:
        header, entries = _read_index(read_bytes(index, read_limits.TF_INDEX_BYTES))
    except OSError as error:
        raise CheckpointError(
            "the index of the checkpoint cannot be read", where=str(index), why=str(error), hint="copy it again"
        ) from error
    except MalformedError as error:
        raise CheckpointError(
            "not a TensorFlow checkpoint, or a damaged one",
            where=str(index),
            why=str(error),
            hint="copy the index and its data files again; the older single-file format must be converted first",
        ) from error
    return _read_data(prefix, header, _numeric(entries, index))


def _read_index(data: bytes) -> tuple[_Header, list[_Entry]]:
    if not has_footer(data):
        raise MalformedError("it does not end with the footer of an index: incomplete, or another kind of file")
    header: _Header | None = None
    entries: list[_Entry] = []
    for key, value in read_table(data):
        if header is None:
            if key:
                raise MalformedError("its first entry is not the header")
            header = _parse_header(value)
            continue
        entries.append(_parse_entry(_name(key), value))
    if header is None:
        raise MalformedError("it is empty")
    if header.is_big_endian:
        raise MalformedError("it was written on a big-endian machine, which is not supported")
    if header.oldest_reader > _VERSION or not 0 < header.num_files < 100_000:
        raise MalformedError(f"its header ({header}) is of an unknown version")
    return header, entries


def _name(key: bytes) -> str:
    """The name of a tensor; slices of partitioned tensors have binary keys that begin with a zero."""
    try:
        return key.decode("utf-8", errors="replace" if key.startswith(b"\0") else "strict")
    except UnicodeDecodeError as error:
        raise MalformedError(f"the tensor name {key[:80]!r} is not text") from error


def _parse_header(data: bytes) -> _Header:
    fields = dict(read_message(data))
    version = dict(read_message(_as_bytes(fields.get(3, b""))))
    return _Header(_as_int(fields.get(1, 0)), _as_int(fields.get(2, 0)) != 0, _as_int(version.get(2, 0)))


def _parse_entry(name: str, data: bytes) -> _Entry:
    entry = _Entry(name)
    for number, value in read_message(data):
        if number == 2:
            entry.shape = _parse_shape(_as_bytes(value))
        elif number == 7:
            entry.is_sliced = True
        elif number == 1:
            entry.dtype = _as_int(value)
        elif number == 3:
            entry.file = _as_int(value)
        elif number == 4:
            entry.offset = _as_int(value)
        elif number == 5:
            entry.num_bytes = _as_int(value)
        elif number == 6:
            entry.checksum = _as_int(value)
    return entry


def _parse_shape(data: bytes) -> list[int]:
    """The dimensions; protocol buffers omit zeros."""
    shape = []
    for number, value in read_message(data):
        if number == 2:
            shape.append(_as_int(dict(read_message(_as_bytes(value))).get(1, 0)))
    return shape


def _as_int(value: Field) -> int:
    if isinstance(value, bytes):
        raise MalformedError("a number field is not a number")
    return value


def _as_bytes(value: Field) -> bytes:
    if isinstance(value, int):
        raise MalformedError("a message field is a number")
    return value


def _numeric(entries: list[_Entry], index: Path) -> list[_Entry]:
    """The numeric tensors, with supported dtypes and consistent shapes."""
    for entry in entries:
        if entry.is_sliced:
            raise _unsupported(entry, index, "is stored in slices", "save the checkpoint without partitioning")
    numeric = [entry for entry in entries if entry.dtype not in _NOT_NUMERIC]
    for entry in numeric:
        if entry.dtype not in _DTYPES:
            raise _unsupported(
                entry, index, f"has the unsupported DataType {entry.dtype}", "save the checkpoint without it"
            )
        num_elements = math.prod(entry.shape)
        is_sane = len(entry.shape) <= _MAX_RANK and math.prod(max(n, 1) for n in entry.shape) <= _MAX_NUMEL
        if not is_sane or num_elements * np.dtype(_DTYPES[entry.dtype][0]).itemsize != entry.num_bytes:
            why = f"has shape {entry.shape} in {entry.num_bytes} bytes"
            raise _unsupported(entry, index, why, "copy the checkpoint again")
    return numeric


def _unsupported(entry: _Entry, index: Path, what: str, hint: str) -> CheckpointError:
    return CheckpointError(f"the tensor {entry.name} {what}", where=str(index), hint=hint)


def _read_data(prefix: Path, header: _Header, entries: list[_Entry]) -> dict[str, Tensor]:
    by_file: dict[int, list[_Entry]] = {}
    for entry in entries:
        by_file.setdefault(entry.file, []).append(entry)
    tensors: dict[str, Tensor] = {}
    for number, in_file in sorted(by_file.items()):
        path = prefix.with_name(f"{prefix.name}.data-{number:05d}-of-{header.num_files:05d}")
        try:
            _check_extent(path, in_file)
            for entry in sorted(in_file, key=lambda e: e.offset):
                tensors[entry.name] = _read_tensor(path, entry)
        except OSError as error:
            raise CheckpointError(
                "a data file of the checkpoint is missing or cannot be read",
                where=str(path),
                why=f"it should have {len(in_file)} tensors, such as {in_file[0].name}: {error.strerror}",
                hint=f"copy all {header.num_files} data files to the directory of the index",
            ) from error
    return {entry.name: tensors[entry.name] for entry in entries}


def _check_extent(path: Path, entries: list[_Entry]) -> None:
    """Reject tensors that overlap or exceed the file, before memory is allocated for them."""
    size, end, last = path.stat().st_size, 0, ""
    for entry in sorted(entries, key=lambda e: (e.offset, e.num_bytes)):
        if entry.num_bytes and entry.offset < end:
            raise _damaged(path, entry, f"it overlaps {last}")
        end, last = max(end, entry.offset + entry.num_bytes), entry.name
        if end > size:
            raise _damaged(path, entry, f"it ends at byte {end}, but the file has {size}")


def _read_tensor(path: Path, entry: _Entry) -> Tensor:
    """One tensor, with its checksum verified."""
    raw: npt.NDArray[np.uint8] = np.fromfile(path, np.uint8, entry.num_bytes, offset=entry.offset)
    if len(raw) != entry.num_bytes or masked_crc32c(raw.tobytes()) != entry.checksum:
        raise _damaged(path, entry, "its checksum does not match")
    stored, dtype = _DTYPES[entry.dtype]
    if dtype is torch.bool:
        return torch.from_numpy(raw != 0).reshape(entry.shape)
    # astype copies only on big-endian machines
    native = raw.view(stored).astype(np.dtype(stored).newbyteorder("="), copy=False)
    return torch.from_numpy(native).view(dtype).reshape(entry.shape)


def _damaged(path: Path, entry: _Entry, why: str) -> CheckpointError:
    return CheckpointError(
        f"the tensor {entry.name} is damaged", where=str(path), why=why, hint="copy the checkpoint again"
    )
