"""The index of a folder for object stores: name, size and CRC-32C of each file, so that nothing has to be listed.

`reconv data index DIR` writes it before the upload. A web server needs it; a bucket with millions of objects is
opened much faster with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import google_crc32c

from reconv.core.errors import DataError
from reconv.storage.data_errors import unreadable
from reconv.storage.files import disk_errors, write_atomic
from reconv.storage.object_stores.store import MAX_OBJECT_BYTES, ObjectInfo, check_name

INDEX_NAME = "reconv-index.txt"
_FIRST_LINE = "reconv file index 1"
_CRC = re.compile(r"[0-9a-f]{8}")
_SIZE = re.compile(r"[0-9]{1,15}")
_CHUNK_BYTES = 1 << 22


def write_index(folder: Path) -> tuple[int, int]:
    """Write the index of all files below a folder; returns their number and bytes."""
    items = [_describe(folder, name) for name in _file_names(folder)]
    if not items:
        raise DataError(f"{folder} has no files", where=str(folder), hint="reconv data index DIR")
    lines = [_FIRST_LINE, *(f"{item.crc32c:08x} {item.num_bytes} {item.name}" for item in items)]
    body = "\n".join(lines) + "\n"
    crc = google_crc32c.value(body.encode("utf-8", "surrogateescape"))
    with disk_errors(folder):
        write_atomic(folder / INDEX_NAME, (body + f"end {crc:08x}\n").encode("utf-8", "surrogateescape"))
    return len(items), sum(item.num_bytes for item in items)


def parse_index(content: bytes, root: str) -> list[ObjectInfo]:
    """The files in an index; versions are not in it."""
    text = content.decode("utf-8", "surrogateescape")
    body, _, last = text.removesuffix("\n").rpartition("\n")
    lines = body.split("\n")
    crc = google_crc32c.value((body + "\n").encode("utf-8", "surrogateescape"))
    if lines[0] != _FIRST_LINE or last != f"end {crc:08x}":
        raise _bad_index(root, "it is truncated or damaged")
    items = sorted(_parse_lines(lines[1:], root), key=lambda item: item.name)
    for item, following in pairwise(items):
        if item.name == following.name:
            raise _bad_index(root, f"it names a file twice: {item.name!r:.80}")
    return items


def _parse_lines(lines: Iterable[str], root: str) -> Iterable[ObjectInfo]:
    for line in lines:
        try:
            crc, size, name = line.split(" ", 2)
        except ValueError as error:
            raise _bad_index(root, f"a line is malformed: {line!r:.80}") from error
        if _CRC.fullmatch(crc) is None or _SIZE.fullmatch(size) is None or int(size) > MAX_OBJECT_BYTES:
            raise _bad_index(root, f"a line is malformed: {line!r:.80}")
        check_name(root, name)
        yield ObjectInfo(name, int(size), "", int(crc, 16))


def _bad_index(root: str, why: str) -> DataError:
    return DataError(
        f"the index of {root} cannot be used",
        where=f"{root}/{INDEX_NAME}",
        why=why,
        hint="write and upload it again: reconv data index DIR",
    )


def _file_names(folder: Path) -> list[str]:
    """All files below a folder, without hidden ones and the index, sorted; links to folders are not followed."""
    found: list[str] = []

    def refuse(error: OSError) -> None:
        raise unreadable(folder, error)

    for place, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inner = os.path.relpath(place, folder)
        found += [os.path.normpath(os.path.join(inner, name)) for name in files if not name.startswith(".")]
    return sorted(name for name in found if name != INDEX_NAME)


def _describe(folder: Path, name: str) -> ObjectInfo:
    crc, size = 0, 0
    if "\n" in name:
        raise DataError("a file name has a line break", where=repr(name), hint="rename the file")
    try:
        with open(folder / name, "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                crc = google_crc32c.extend(crc, chunk)
                size += len(chunk)
    except OSError as error:
        raise unreadable(folder / name, error) from error
    return ObjectInfo(name, size, "", crc)
