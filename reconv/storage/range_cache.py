"""A bounded cache of ranges of remote objects on the local disk, shared by all processes of a machine.

A block is one file: its bytes and their CRC-32C, which every other process checks when it maps the block. It gets its
name only when it is complete, so a killed process leaves nothing that could be taken for data.
The key contains the object's version: a changed object never finds the blocks of the old one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import re
import shutil
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import google_crc32c

from reconv.core.errors import UsageError
from reconv.core.text import printable
from reconv.storage.cache import REMOTE_FOLDER, cache_dir
from reconv.storage.mounts import is_local
from reconv.storage.object_stores.errors import StoreUnavailableError, retry_store
from reconv.storage.object_stores.store import ObjectInfo, ObjectStore, join_url, open_object_store

BLOCK_BYTES = 4 << 20
LIMIT_VARIABLE = "RECONV_CACHE_LIMIT"  # as in 200GB
_FOOTER_BYTES = 8
_MAGIC = b"RCB1"
_TOUCH_S = 60.0  # how exact the order of last use is
_SCAN_S = 30.0  # between two counts of what the cache holds
_FULL_SCAN_S = 1.0  # the same when it seems to be full: another process may have made room
_REFUSED_S = 30.0  # without another attempt, after the disk has refused to write
_MAX_MAPS = 4096
_MAX_COPIES = 32  # blocks in memory, where the cache is on a network disk and cannot be mapped safely
_SWEEP_MAPS = 64  # new maps between two looks for deleted files
_EVICT_TO = 0.95  # of the limit
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG})
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True)
class Block:
    """One block of an object: its place in the cache, and its range."""

    path: str
    start: int
    length: int


@dataclass(slots=True)
class _MappedBlock:
    view: memoryview
    touched_s: float


@dataclass(frozen=True, slots=True)
class CachedObject:
    """A version of an object in a store, and its key in the cache."""

    root: str  # of the store
    item: ObjectInfo
    folder: str

    @classmethod
    def of(cls, root: str, item: ObjectInfo, cache: RangeCache) -> CachedObject:
        version = "\0".join([join_url(root, item.name), item.etag, str(item.num_bytes), str(item.crc32c)])
        key = hashlib.blake2b(version.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
        return cls(root, item, f"{cache.folder}/{key[:2]}/{key[2:]}")

    @property
    def store(self) -> ObjectStore:
        """Opened when something is missing in the cache: a worker process may never need it."""
        return _open_store(self.root)

    @property
    def url(self) -> str:
        return join_url(self.root, self.item.name)

    def blocks(self, start: int, length: int) -> list[Block]:
        """The blocks that hold a range."""
        numbers = range(start // BLOCK_BYTES, (start + length - 1) // BLOCK_BYTES + 1) if length else range(0)
        return [self.block(number) for number in numbers]

    def block(self, number: int) -> Block:
        start = number * BLOCK_BYTES
        return Block(f"{self.folder}-{number:06}", start, min(BLOCK_BYTES, self.item.num_bytes - start))


@lru_cache(maxsize=16)
def _open_store(root: str) -> ObjectStore:
    return open_object_store(root)


class RangeCache:
    """Reads ranges of objects by blocks; what does not fit or cannot be written is read from the store each time."""

    def __init__(self, folder: Path | None = None, limit_bytes: int | None = None) -> None:
        self.folder = folder or cache_dir() / REMOTE_FOLDER / "blocks"
        self._limit_bytes = limit_bytes
        self._written: set[str] = set()  # by this process, and not mapped yet: their checksums need no check
        self._mapped: dict[str, _MappedBlock] = {}  # by path; their checksums were right
        self._used_bytes = 0
        self._counted_s = float("-inf")
        self._refused_s = float("-inf")
        self._has_warned = False
        self._is_local = is_local(self.folder)
        self._lock = threading.Lock()

    @property
    def limit_bytes(self) -> int:
        """Most bytes the cache may hold: $RECONV_CACHE_LIMIT, else half of what is free or already its own."""
        if self._limit_bytes is None:
            text = os.environ.get(LIMIT_VARIABLE)
            if text:
                self._limit_bytes = parse_size(text)
            else:
                self._limit_bytes = (_free_bytes(self.folder) + self._count()) // 2
        return self._limit_bytes

    def read(self, cached: CachedObject, start: int, length: int) -> memoryview:
        """Exactly these bytes of the object; a view of the cache's file, if they lie in one block."""
        parts = []
        for block in cached.blocks(start, length):
            first = max(0, start - block.start)
            last = min(block.length, start + length - block.start)
            view = self._view(block)
            parts.append(self._miss(cached, block, first, last) if view is None else view[first:last])
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def has(self, block: Block) -> bool:
        """True if the block is in the cache; its content is checked when it is read."""
        return os.path.exists(block.path)

    def fetch(
        self, cached: CachedObject, block: Block, *, may_evict: bool, stop: threading.Event | None = None
    ) -> bytes | None:
        """Download a block into the cache unless it is there; returns its bytes if they could not be kept.

        Another process or thread that downloads it is waited for. None: the block is in the cache.
        """
        if not self._make_room(block.length, may_evict):
            return retry_store(lambda: _download(cached, block), cached.url, stop)
        try:
            part = _lock_part(block)
        except OSError as error:
            self._warn(error)
            return retry_store(lambda: _download(cached, block), cached.url, stop)
        if part is None:
            return None
        try:
            data = retry_store(lambda: _download(cached, block), cached.url, stop)
            return None if self._keep(part, block, data) else data
        finally:
            os.close(part)

    def _keep(self, part: int, block: Block, data: bytes) -> bool:
        """Write a block and give it its name; False if the disk refuses."""
        try:
            os.ftruncate(part, 0)
            for rest in (memoryview(data), memoryview(_footer(data))):
                while rest:
                    rest = rest[os.write(part, rest) :]
            if not _is_own_part(part, block):  # deleted meanwhile to make room
                return False
            os.rename(f"{block.path}.part", block.path)
        except FileNotFoundError:
            return False
        except OSError as error:
            with suppress(OSError):
                os.unlink(f"{block.path}.part")
            if error.errno not in _FULL:
                raise
            self._warn(error)
            return False
        self._written.add(block.path)
        with self._lock:
            self._used_bytes += len(data) + _FOOTER_BYTES
        return True

    def _miss(self, cached: CachedObject, block: Block, first: int, last: int) -> memoryview:
        """Bytes of a block that is not in the cache: all of it if there is room, else only what is asked for."""
        if not self._make_room(block.length, may_evict=False):
            item, start = cached.item, block.start + first
            if item.crc32c is None:
                return memoryview(retry_store(lambda: cached.store.read(item, start, last - first), cached.url))
        data = self.fetch(cached, block, may_evict=False)
        view = self._view(block) if data is None else memoryview(data)
        if view is None:  # deleted or damaged meanwhile
            view = memoryview(retry_store(lambda: _download(cached, block), cached.url))
        return view[first:last]

    def _view(self, block: Block) -> memoryview | None:
        """The block, mapped; None if it is not in the cache, or damaged, and then it is deleted."""
        mapped = self._mapped.get(block.path)
        if mapped is not None:
            if time.monotonic() - mapped.touched_s > _TOUCH_S:
                if not _touch(block.path):
                    self._mapped.pop(block.path, None)  # another process has deleted the file
                mapped.touched_s = time.monotonic()
            return mapped.view
        content = _map_file(block.path) if self._is_local else _read_file(block.path)
        if content is None:
            return None
        is_own = block.path in self._written and len(content) == block.length + _FOOTER_BYTES
        self._written.discard(block.path)
        if not is_own and not _is_intact(content, block.length):
            print(printable(f"{block.path} is damaged: downloading it again"), file=sys.stderr, flush=True)
            with suppress(OSError):
                os.unlink(block.path)
            return None
        _touch(block.path)
        view = content[: block.length]
        self._mapped[block.path] = _MappedBlock(view, time.monotonic())
        if len(self._mapped) % _SWEEP_MAPS == 0 or not self._is_local:
            self._unmap_deleted()
        return view

    def _unmap_deleted(self) -> None:
        """Forget blocks that other processes have deleted, which frees their disk space, and the oldest of too many."""
        paths = list(self._mapped)
        surplus = paths[: max(0, len(paths) - (_MAX_MAPS if self._is_local else _MAX_COPIES))]
        for path in {*surplus, *(path for path in paths if not os.path.exists(path))}:
            self._mapped.pop(path, None)

    def has_room(self, block: Block, may_evict: bool) -> bool:
        """True if the block could be kept."""
        return self._make_room(block.length, may_evict)

    def _make_room(self, num_bytes: int, may_evict: bool) -> bool:
        """True if a block may be written; deletes those that were not used for the longest time, if allowed."""
        limit = self.limit_bytes
        if num_bytes > limit or time.monotonic() - self._refused_s < _REFUSED_S:
            return False
        with self._lock:
            interval_s = _SCAN_S if self._used_bytes + num_bytes <= limit else _FULL_SCAN_S
            if time.monotonic() - self._counted_s > interval_s:
                self._count()
            if self._used_bytes + num_bytes <= limit:
                return True
            if not may_evict:
                return False
            self._evict(int(_EVICT_TO * limit) - num_bytes)
            return True

    def _count(self) -> int:
        self._used_bytes = sum(size for _, size, _ in self._entries())
        self._counted_s = time.monotonic()
        return self._used_bytes

    def _evict(self, target_bytes: int) -> None:
        used = 0
        entries = sorted(self._entries())
        used = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if used <= max(0, target_bytes):
                break
            with suppress(OSError):
                os.unlink(path)
            self._mapped.pop(path, None)
            used -= size
        self._used_bytes = used
        self._counted_s = time.monotonic()

    def _entries(self) -> list[tuple[int, int, str]]:
        """Last use, size and path of each block, also of those that are being downloaded."""
        found = []
        with suppress(OSError), os.scandir(self.folder) as folders:
            for folder in folders:
                with suppress(OSError), os.scandir(folder.path) as entries:
                    for entry in entries:
                        with suppress(OSError):
                            status = entry.stat(follow_symlinks=False)
                            found.append((status.st_mtime_ns, status.st_size, entry.path))
        return found

    def _warn(self, error: OSError) -> None:
        self._refused_s = time.monotonic()
        if not self._has_warned:
            self._has_warned = True
            text = f"{self.folder}: {error.strerror}; data that is not in the cache is read from the store each time"
            print(printable(text), file=sys.stderr, flush=True)


def parse_size(text: str) -> int:
    """Bytes of a size such as 500MB or 1.5T."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise UsageError(f"{text!r} is not a size", where=LIMIT_VARIABLE, hint=f"export {LIMIT_VARIABLE}=200GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _download(cached: CachedObject, block: Block) -> bytes:
    data = cached.store.read(cached.item, block.start, block.length)
    expected = cached.item.crc32c
    if expected is not None and block.length == cached.item.num_bytes and google_crc32c.value(data) != expected:
        raise StoreUnavailableError(
            cached.url,
            "its checksum is not the one in the index",
            "upload the file again, or write the index again: reconv data index DIR",
        )
    return data


def _footer(data: bytes) -> bytes:
    return _MAGIC + int(google_crc32c.value(data)).to_bytes(4, "little")


def _is_intact(content: memoryview, length: int) -> bool:
    return len(content) == length + _FOOTER_BYTES and content[length:] == _footer(bytes(content[:length]))


def _map_file(path: str) -> memoryview | None:
    """A file, mapped; None if it cannot be. Blocks are never truncated, only deleted, so the map stays valid."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError):  # ValueError: it is empty
        return memoryview(b"")
    finally:
        os.close(descriptor)


def _read_file(path: str) -> memoryview | None:
    """The content of a file; None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return memoryview(file.read())
    except OSError:
        return None


def _touch(path: str) -> bool:
    """Note that a block is in use; False if it was deleted."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    except OSError:  # a disk that has become read-only
        return True
    return True


def _lock_part(block: Block) -> int | None:
    """The file that a block is written to, locked by this thread; None if the block is in the cache by then."""
    os.makedirs(os.path.dirname(block.path), exist_ok=True)
    while True:
        part = os.open(f"{block.path}.part", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(part, fcntl.LOCK_EX)  # released by the kernel when a process dies
            is_there = os.path.exists(block.path)
            if not is_there and _is_own_part(part, block):
                return part
        except BaseException:
            os.close(part)
            raise
        os.close(part)  # what was locked has got its name, or was deleted
        if is_there:
            return None


def _is_own_part(part: int, block: Block) -> bool:
    try:
        return os.path.samestat(os.fstat(part), os.stat(f"{block.path}.part"))
    except FileNotFoundError:
        return False


def _free_bytes(folder: Path) -> int:
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    return shutil.disk_usage(existing).free
