"""Collectives of objects: typed JSON and raw arrays, sent as tensors of bytes.

torch's own object collectives unpickle what they receive, which runs code of whoever sent it. Here the receiver builds
plain values, arrays and the classes that are marked with `reconv.core.message`, and nothing else.
"""

from __future__ import annotations

import base64
import json
import pathlib
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor

from reconv.core.errors import RankLostError, RemoteRankError
from reconv.core.message import classes, message_name

T = TypeVar("T")

_PLAIN = (type(None), bool, int, float, str)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_ARRAY_DTYPE = re.compile(r"[<>|=][biufcSU][0-9]{1,6}")  # no objects
_LENGTH_BYTES = 8
_ALIGNMENT = 16
_MAX_BYTES = 64 << 30  # of one object


def all_gather(item: T) -> list[T]:
    """The items of all ranks, in rank order; called by every rank."""
    content = encode(item)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(content)], dtype=torch.int64))
    lengths = [_checked_length(int(size)) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(content)] = torch.frombuffer(content, dtype=torch.uint8)
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    received = zip(parts, lengths, strict=True)
    return [cast(T, _decode_from(rank, part[:length])) for rank, (part, length) in enumerate(received)]


def broadcast(item: T | None, source: int = 0) -> T:
    """The item of one rank; called by every rank."""
    is_source = dist.get_rank() == source
    content = encode(item) if is_source else bytearray()
    length = torch.tensor([len(content)], dtype=torch.int64)
    dist.broadcast(length, source)
    size = _checked_length(int(length))
    sent = torch.frombuffer(content, dtype=torch.uint8) if is_source else torch.empty(size, dtype=torch.uint8)
    dist.broadcast(sent, source)
    return cast(T, item if is_source else _decode_from(source, sent))


def exchange(item: T, target: int, source: int) -> T:
    """Send an item to one rank and return that of another one; called by every rank."""
    content = encode(item)
    lengths = [torch.tensor([len(content)], dtype=torch.int64), torch.zeros(1, dtype=torch.int64)]
    _send_and_receive(lengths[0], target, lengths[1], source)
    received = torch.empty(_checked_length(int(lengths[1])), dtype=torch.uint8)
    _send_and_receive(torch.frombuffer(content, dtype=torch.uint8), target, received, source)
    return cast(T, _decode_from(source, received))


def _send_and_receive(sent: Tensor, target: int, received: Tensor, source: int) -> None:
    work = dist.isend(sent, target)
    dist.recv(received, source)
    assert work is not None
    work.wait()


def _checked_length(length: int) -> int:
    if not _LENGTH_BYTES <= length <= _MAX_BYTES:
        raise RankLostError(f"another rank announces an object of {length:,} bytes", why=_FOREIGN)
    return length


_FOREIGN = "it is no rank of this run, or runs another version"


def _decode_from(rank: int, content: Tensor) -> object:
    try:
        return decode(content.numpy().data)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError) as error:
        raise RankLostError(
            f"rank {rank} sent something that is not a message of a rank",
            why=f"{_FOREIGN} ({type(error).__name__}: {error})"[:300],
            hint="start all ranks with the same version of Reconv, and set RECONV_SECRET on all of them",
        ) from error


# The format: the length of the JSON text (8 bytes, little-endian), the text, and the arrays that it refers to.
# Numbers, texts, booleans and null are themselves, a list is a list, and all else is {kind: content}.


def encode(item: object) -> bytearray:
    """The bytes of an object; raises TypeError if it has a part that cannot be sent."""
    arrays = bytearray()
    text = json.dumps(_to_json(item, arrays), separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH_BYTES) % _ALIGNMENT)
    return bytearray(len(text).to_bytes(_LENGTH_BYTES, "little")) + text + arrays


def decode(content: memoryview) -> object:
    """The object that `encode` was given; raises one of several exceptions if the bytes are anything else."""
    end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    if end > len(content):
        raise ValueError("the text is cut off")
    return _from_json(json.loads(bytes(content[_LENGTH_BYTES:end])), content[end:])


def _to_json(item: Any, arrays: bytearray) -> object:
    kind = type(item)
    if kind in _PLAIN:
        return item
    if kind is list:
        return [_to_json(part, arrays) for part in item]
    if kind in (tuple, torch.Size, set, frozenset):
        name = "tuple" if kind is torch.Size else kind.__name__
        return {name: [_to_json(part, arrays) for part in item]}
    if kind is dict:
        return {"dict": [[_to_json(key, arrays), _to_json(value, arrays)] for key, value in item.items()]}
    if kind is bytes:
        return {"bytes": base64.b64encode(item).decode()}
    if isinstance(item, pathlib.PurePath):
        return {"path": str(item)}
    if kind is torch.dtype:
        return {"dtype": str(item).removeprefix("torch.")}
    if isinstance(item, np.ndarray | np.generic):
        array = np.asarray(item)
        name = "array" if isinstance(item, np.ndarray) else "scalar"
        return {name: [_array_dtype(array.dtype.str).str, list(array.shape), _append(arrays, array.tobytes())]}
    if isinstance(item, Tensor):
        flat = item.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return {
            "tensor": [
                str(item.dtype).removeprefix("torch."),
                list(item.shape),
                _append(arrays, flat.numpy().tobytes()),
            ]
        }
    if isinstance(item, RemoteRankError):
        return {"error": item.to_dict()}
    return _class_to_json(item, arrays)


def _class_to_json(item: Any, arrays: bytearray) -> object:
    name = message_name(type(item))
    if classes.get(name) is not type(item):
        raise TypeError(f"ranks cannot send each other a {name}; mark the class with reconv.core.message.message")
    if isinstance(item, BaseModel):
        content, explicit = item.__dict__, sorted(item.model_fields_set)
        return {"section": [name, {key: _to_json(value, arrays) for key, value in content.items()}, explicit]}
    if isinstance(item, tuple):
        return {"named": [name, [_to_json(part, arrays) for part in item]]}
    return {"class": [name, {f.name: _to_json(getattr(item, f.name), arrays) for f in fields(cast(Any, item))}]}


def _append(arrays: bytearray, content: Any) -> list[int]:
    """Append the bytes of an array; returns where they lie."""
    arrays += b"\0" * (-len(arrays) % _ALIGNMENT)
    start = len(arrays)
    arrays += content
    return [start, len(arrays)]


def _array_dtype(name: object) -> np.dtype[Any]:
    if not isinstance(name, str) or not _ARRAY_DTYPE.fullmatch(name):
        raise TypeError(f"ranks cannot send each other an array of {name}")
    return np.dtype(name)


def _from_json(value: Any, arrays: memoryview) -> Any:
    if isinstance(value, list):
        return [_from_json(part, arrays) for part in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    return _READERS[kind](content, arrays)


def _read_dict(content: Any, arrays: memoryview) -> dict[Any, Any]:
    return {_from_json(key, arrays): _from_json(value, arrays) for key, value in content}


def _read_array(content: Any, arrays: memoryview) -> Any:
    name, shape, (start, end) = content
    flat = np.frombuffer(arrays[start:end], dtype=_array_dtype(name))
    return flat.reshape(tuple(shape)).copy()


def _read_tensor(content: Any, arrays: memoryview) -> Tensor:
    name, shape, (start, end) = content
    flat = torch.empty(end - start, dtype=torch.uint8)
    flat.numpy()[:] = np.frombuffer(arrays[start:end], dtype=np.uint8)
    return flat.view(_DTYPES[name]).reshape(tuple(shape))


def _read_class(content: Any, arrays: memoryview) -> object:
    name, values = content
    cls = classes[name]
    if not is_dataclass(cls) or {f.name for f in fields(cls)} != set(values):
        raise TypeError(f"{name} has other fields")
    item = object.__new__(cls)
    for field, value in values.items():
        object.__setattr__(item, field, _from_json(value, arrays))
    return item


def _read_named(content: Any, arrays: memoryview) -> object:
    name, values = content
    return cast(Any, classes[name])._make(_from_json(part, arrays) for part in values)


def _read_section(content: Any, arrays: memoryview) -> BaseModel:
    """A part of a recipe, as it was checked by the rank that sends it."""
    name, values, explicit = content
    cls = classes[name]
    if not issubclass(cls, BaseModel) or set(cls.model_fields) != set(values):
        raise TypeError(f"{name} has other fields")
    return cls.model_construct(set(explicit), **{key: _from_json(value, arrays) for key, value in values.items()})


_READERS: Mapping[str, Callable[[Any, memoryview], Any]] = {
    "tuple": lambda content, arrays: tuple(_from_json(part, arrays) for part in content),
    "set": lambda content, arrays: {_from_json(part, arrays) for part in content},
    "frozenset": lambda content, arrays: frozenset(_from_json(part, arrays) for part in content),
    "dict": _read_dict,
    "bytes": lambda content, arrays: base64.b64decode(content, validate=True),
    "path": lambda content, arrays: pathlib.Path(content),
    "dtype": lambda content, arrays: _DTYPES[content],
    "array": _read_array,
    "scalar": lambda content, arrays: _read_array(content, arrays)[()],
    "tensor": _read_tensor,
    "error": lambda content, arrays: RemoteRankError.from_dict(content),
    "class": _read_class,
    "named": _read_named,
    "section": _read_section,
}
