"""Mutations of inputs: a function of the corpus and a key, so that every input can be made again."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

MAX_BYTES = 64 << 10
_MAX_CHANGES = 6
_INTEGERS = (-(1 << 63), -(1 << 31), -1, 0, 1, 127, 255, 256, 65535, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, 10**30)
_TOKENS = (
    *(b"", b"\0", b"\n", b"\r\n", b"\t", b" ", b",", b":", b'"', b"'", b"\\", b"{", b"}", b"[", b"]", b"<", b">", b"&"),
    *(b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"1e-320", b"0x10", b"-0", b"7" * 5000, b'"\\ud800"', b"~"),
    *(b"[" * 300, b'{"a":' * 300, b"../", b"/dev/zero", b"\xff\xfe", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x1b[31m"),
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "\ud800", "\0", "a" * 300, [], {}, [None], [[]], {"": None}, [0] * 50, {"a": {}}),
    *(0, 1, -1, 2, 255, 1 << 31, 1 << 63, -(1 << 63), 10**30, 0.0, -0.5, 1e-320, 1e300, 1.5),
    *(float("nan"), float("inf"), -float("inf")),
)  # fmt: skip
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")


def mutate(corpus: Sequence[bytes], key: str) -> bytes:
    """An input of the corpus with some changes; the same key gives the same input."""
    rng = random.Random(key)
    data = rng.choice(corpus)
    for _ in range(rng.randint(1, _MAX_CHANGES)):
        data = _change(data, corpus, rng)[:MAX_BYTES]
    return data


def _change(data: bytes, corpus: Sequence[bytes], rng: random.Random) -> bytes:
    is_json = data[:1] in (b"{", b"[")
    return rng.choice((_json_value,) * 12 * is_json + _CHANGES)(data, corpus, rng)


def _span(data: bytes, rng: random.Random) -> tuple[int, int]:
    low = rng.randint(0, len(data))
    return low, min(len(data), low + rng.choice((1, 2, 4, 8, 16, 64, 256)))


def _flip_bit(data: bytes, corpus: Sequence[bytes], rng: random.Random) -> bytes:
    if not data:
        return data
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _truncate(data: bytes, corpus: Sequence[bytes], rng: random.Random) -> bytes:
    return data[: rng.randint(0, len(data))]


def _remove(data: bytes, corpus: Sequence[bytes], rng: random.Random) -> bytes:
    low, high = _span(data, rng)
    return data[:low] + data[high:]


def _repeat(data: bytes, corpus: Sequence[bytes], rng: random.Random) -> bytes:
    low, high = _span(data, rng)
    return data[:low] + data[low:high] * rng.choice((2, 3, 50)) + data[high:]


def _splice(data: bytes, corpus: Sequence[bytes], rng: random.Random) -> bytes:
    other = rng.choice(corpus)
    low, high = _span(other, rng)
    at = rng.randint(0, len(data))
    return data[:at] + (other[low:high] if rng.random() < 0.5 else other[low:]) + data[at:]


def _token(data: bytes, corpus: Sequence[bytes], rng: random.Random) -> bytes:
    token, at = rng.choice(_TOKENS), rng.randint(0, len(data))
    return data[:at] + token + data[at + (len(token) if rng.random() < 0.5 else 0) :]


def _binary_integer(data: bytes, corpus: Sequence[bytes], rng: random.Random) -> bytes:
    size, at = rng.choice((1, 2, 4, 8)), rng.randint(0, len(data))
    value = rng.choice(_INTEGERS) % (1 << 8 * size)
    return data[:at] + value.to_bytes(size, rng.choice(("little", "big"))) + data[at + size :]


def _decimal_number(data: bytes, corpus: Sequence[bytes], rng: random.Random) -> bytes:
    """Replace a number that is written out."""
    found = list(_NUMBER.finditer(data))
    if not found:
        return data
    low, high = rng.choice(found).span()
    return data[:low] + rng.choice((str(rng.choice(_INTEGERS)).encode(), *_TOKENS[20:25])) + data[high:]


def _json_value(data: bytes, corpus: Sequence[bytes], rng: random.Random) -> bytes:
    """Replace, remove or move a value of a line of JSON."""
    lines = data.split(b"\n")
    number = rng.randrange(len(lines))
    try:
        root = json.loads(lines[number])
        _ = json.dumps(root)  # what is too deep to write is left alone
    except (ValueError, RecursionError):
        return data
    places: list[tuple[Any, Any]] = []
    level = [root] if isinstance(root, dict | list) else []
    while level:
        inner = level.pop()
        keys: Sequence[Any] = list(inner) if isinstance(inner, dict) else range(len(inner))
        places += [(inner, key) for key in keys]
        level += [inner[key] for key in keys if isinstance(inner[key], dict | list)]
    if not places:
        return data
    holder, key = rng.choice(places)
    kind = rng.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        other, other_key = rng.choice(places)
        holder[key] = json.loads(json.dumps(other[other_key]))
    elif kind == 2 and isinstance(holder, dict):
        holder[rng.choice(("", "x", "\ud800", "1"))] = holder.pop(key)
    else:
        holder[key] = rng.choice(_VALUES)
    lines[number] = json.dumps(root, separators=(",", ":")).encode()
    return b"\n".join(lines)


_CHANGES: tuple[Callable[[bytes, Sequence[bytes], random.Random], bytes], ...] = (
    *(_flip_bit, _truncate, _remove, _repeat, _splice, _token),
    *(_binary_integer, _decimal_number, _flip_bit, _token, _binary_integer, _decimal_number),
)  # fmt: skip
