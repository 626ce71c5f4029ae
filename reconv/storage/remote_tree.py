"""Folders of object stores as folders of the cache, so that every reader finds the files it looks for.

A tree is a snapshot of a listing: names, sizes and versions, in a folder named after the address and a digest of the
listing. Another listing makes another tree, so what a run has opened never changes under it. Images and shards are
empty files of the right size, whose bytes `remote_file` reads through the `RangeCache`; smaller things such as class
lists and tables are downloaded.

Every range is read for the version in the listing (If-Match, or compared afterwards), so a replaced object is an
error and never mixed with the old one (tests/storage/test_remote_tree.py). The empty files have no permissions: only
`reconv.storage` reads their bytes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from reconv.core.errors import DataError
from reconv.storage.cache import CACHE_ENV, STUB_MODE, remote_trees
from reconv.storage.data_errors import unreadable
from reconv.storage.files import disk_errors
from reconv.storage.object_stores.errors import ChangedObjectError, MissingObjectError, StoreError, retry_store
from reconv.storage.object_stores.store import (
    MAX_OBJECT_BYTES,
    ObjectInfo,
    ObjectStore,
    as_url,
    check_name,
    is_url,
    join_url,
    open_object_store,
)
from reconv.storage.range_cache import BLOCK_BYTES, LIMIT_VARIABLE, CachedObject, RangeCache
from reconv.storage.remote_index import INDEX_NAME, parse_index

NUM_CONNECTIONS = 32
_OBJECTS = ".reconv-objects.db"
_URL_FILE = ".reconv-url"
_STREAMED = re.compile(r".*\.(?:jpe?g|png|webp|bmp|tiff?|packed|tar|tfrecords?)|.*-of-\d+", re.IGNORECASE)
_MAX_DOWNLOADED_BYTES = 8 << 30
_MAX_INDEX_BYTES = 1 << 30
_UNUSED_S = 30 * 24 * 3600.0  # after which the tree of an older listing is deleted


def local_data_path(path: str | Path) -> Path:
    """The path itself; for an address in a store the folder that stands for it."""
    return mount(as_url(path)) if is_url(path) else Path(path)


def shown_path(path: str | Path) -> str:
    """Path as users know it: the address, for a file of a tree."""
    text = str(path)
    found = _split(text)
    if found is None:
        return text
    root, name = found
    try:
        url = Path(root, _URL_FILE).read_text(encoding="utf-8")
    except OSError:
        return text
    return join_url(url, name) if name else url


def mount(url: str) -> Path:
    """The tree of an address: made once per process from the store's listing, or from the index in it."""
    return _mount(url, _trees())


@lru_cache(maxsize=64)
def _mount(url: str, trees: str) -> Path:
    store = open_object_store(url)
    try:
        items = _list_objects(store)
    except StoreError as error:
        raise unreadable(url, error) from error
    return _make_tree(store, items)


def is_remote(path: str | bytes) -> bool:
    """True if a path is in a tree."""
    return os.fsdecode(path).startswith(_trees())


def remote_file(path: str | Path) -> RemoteFile | None:
    """The object behind a file of a tree; None for every other file."""
    text = os.fspath(path)
    if not text.startswith(_trees()):
        return None
    found = _split(text)
    if found is None or not found[1] or not _STREAMED.fullmatch(found[1]):
        return None
    return _open_tree(found[0]).file(found[1])


def tree_bytes(path: str) -> int:
    """The bytes of all objects of the tree that a path belongs to."""
    found = _split(path)
    return 0 if found is None else _open_tree(found[0]).num_bytes


class RemoteFile:
    """An object that is read by ranges, through the cache."""

    def __init__(self, path: str, cached: CachedObject, cache: RangeCache) -> None:
        self.path = path
        self.cached = cached
        self.size_bytes = cached.item.num_bytes
        self._cache = cache
        self._next_block = -1  # that a reader from front to back will ask for

    def read(self, start: int, length: int) -> memoryview:
        """Bytes of this version of the object."""
        self._read_ahead(start, length)
        return self._cache.read(self.cached, start, length)

    def _read_ahead(self, start: int, length: int) -> None:
        """Fetch the next blocks in the background if this read continues the last one in another block."""
        number = start // BLOCK_BYTES
        if number == self._next_block:
            last = (self.size_bytes - 1) // BLOCK_BYTES
            for ahead in range(number + 1, min(number + 5, last + 1)):
                fetch_in_background(self._cache, self.cached, ahead)
        if length:
            self._next_block = (start + length - 1) // BLOCK_BYTES + 1


class _Tree:
    """An opened tree: the versions of its objects."""

    def __init__(self, root: str) -> None:
        self._url = Path(root, _URL_FILE).read_text(encoding="utf-8")
        self._root = root
        self._objects = sqlite3.connect(f"file:{root}/{_OBJECTS}?mode=ro", uri=True, check_same_thread=False)
        self._lock = threading.Lock()
        self.file = lru_cache(maxsize=4096)(self._file)
        self.num_bytes = int(self._objects.execute("select sum(size) from objects").fetchone()[0])

    def _file(self, name: str) -> RemoteFile:
        with self._lock:
            row = self._objects.execute("select size, etag, crc from objects where name = ?", (name,)).fetchone()
        if row is None:
            raise MissingObjectError(join_url(self._url, name), "there is no such object")
        item = ObjectInfo(name, *row)
        cache = shared_cache()
        return RemoteFile(os.path.join(self._root, name), CachedObject.of(self._url, item, cache), cache)


_pool_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_fetching: set[str] = set()


def fetch_in_background(cache: RangeCache, cached: CachedObject, number: int) -> None:
    """Download a block of an object if it is not in the cache; errors are raised when it is read."""
    global _pool
    block = cached.block(number)
    with _pool_lock:
        if block.path in _fetching or cache.has(block):
            return
        _fetching.add(block.path)
        _pool = _pool or ThreadPoolExecutor(NUM_CONNECTIONS // 2, thread_name_prefix="reconv-store")

    def fetch() -> None:
        try:
            with suppress(StoreError):
                cache.fetch(cached, block, may_evict=True)
        finally:
            _fetching.discard(block.path)

    _pool.submit(fetch)


def shared_cache() -> RangeCache:
    """The cache of this process."""
    return _shared_cache(_trees(), os.environ.get(LIMIT_VARIABLE))


@lru_cache(maxsize=4)
def _shared_cache(trees: str, limit: str | None) -> RangeCache:
    return RangeCache()


@lru_cache(maxsize=64)
def _open_tree(root: str) -> _Tree:
    return _Tree(root)


def _trees() -> str:
    return _trees_of(os.environ.get(CACHE_ENV))


@lru_cache(maxsize=4)
def _trees_of(cache: str | None) -> str:
    return remote_trees()


_roots: dict[str, str] = {}  # folder -> the tree it belongs to


def _root_of(folder: str) -> str | None:
    """The tree that a folder belongs to."""
    if folder in _roots:
        return _roots[folder]
    place = folder
    while len(place) >= len(_trees()):
        if os.path.isfile(os.path.join(place, _URL_FILE)):
            _roots[folder] = place
            return place
        place = os.path.dirname(place)
    return None


def _split(text: str) -> tuple[str, str] | None:
    """The tree and the object's name; None if the path is not in a tree."""
    if not text.startswith(_trees()):
        return None
    root = _root_of(os.path.dirname(text)) or _root_of(text)
    return None if root is None else (root, text[len(root) + 1 :])


def _list_objects(store: ObjectStore) -> list[ObjectInfo]:
    """The objects of a store: from its index if it has one, else from its listing."""
    try:
        index = retry_store(lambda: store.info(INDEX_NAME), store.root)
    except MissingObjectError:
        items = retry_store(store.list, store.root)
    else:
        if index.num_bytes > _MAX_INDEX_BYTES:
            raise DataError("the index is too large", where=join_url(store.root, INDEX_NAME))
        content = retry_store(lambda: store.read(index, 0, index.num_bytes), store.root)
        items = _with_versions(store, parse_index(content, store.root))
    items = _without_folder_markers([item for item in items if not re.search(r"(?:^|/)\.(?!\.?(?:/|$))", item.name)])
    if not items:
        raise DataError(f"no objects at {store.root}", where=store.root, why="it is empty", hint="check the address")
    folders = {parent for item in items for parent in _parents(item.name)}
    for item in items:
        check_name(store.root, item.name)
        if item.name in folders:
            raise DataError(
                "an object has the name of a folder", where=join_url(store.root, item.name), hint="rename or delete it"
            )
        if item.num_bytes > MAX_OBJECT_BYTES:
            raise DataError("an object is too large", where=join_url(store.root, item.name), hint="check the address")
    return items


def _without_folder_markers(items: list[ObjectInfo]) -> list[ObjectInfo]:
    """The objects without empty ones that have the name of a folder, with which some programs mark it."""
    folders = {parent for item in items for parent in _parents(item.name)}
    return [item for item in items if item.num_bytes or item.name not in folders]


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition("/")[0]:
        yield name


def _with_versions(store: ObjectStore, items: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """Ask for the version of objects that are read in parts; the index has a checksum of those that are read whole."""

    def complete(item: ObjectInfo) -> ObjectInfo:
        if item.num_bytes <= BLOCK_BYTES:
            return item
        found = retry_store(lambda: store.info(item.name), store.root)
        if found.num_bytes != item.num_bytes:
            why = f"it has {found.num_bytes:,} bytes, and {item.num_bytes:,} in {INDEX_NAME}"
            raise ChangedObjectError(join_url(store.root, item.name), why, "write and upload the index again")
        return ObjectInfo(item.name, item.num_bytes, found.etag, item.crc32c, found.modified_s)

    with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
        return list(pool.map(complete, items))


def _make_tree(store: ObjectStore, items: Sequence[ObjectInfo]) -> Path:
    address = urlsplit(store.root)
    digest = hashlib.blake2b(f"{store.root}\n".encode("utf-8", "surrogateescape"), digest_size=6)
    for item in items:
        digest.update(f"{item.name}\0{item.num_bytes}\0{item.etag}\0{item.crc32c}\n".encode("utf-8", "surrogateescape"))
    name = (address.netloc + address.path).strip("/").replace("/", "%") or "root"
    root = Path(_trees(), address.scheme, f"{name[:200]}@{digest.hexdigest()}")
    if (root / _URL_FILE).is_file():
        with suppress(OSError):
            os.utime(root / _URL_FILE)
        return root
    with disk_errors(root, "choose another folder for the cache with RECONV_CACHE=DIR"):
        root.parent.mkdir(parents=True, exist_ok=True)
        _delete_unused(root.parent, name)
        staging = Path(tempfile.mkdtemp(prefix=".making-", dir=root.parent))
        try:
            try:
                _fill_tree(staging, store, items)
            except StoreError as error:
                raise unreadable(store.root, error) from error
            os.rename(staging, root)
        except OSError:
            if not (root / _URL_FILE).is_file():  # else another process was faster
                raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return root


def _fill_tree(staging: Path, store: ObjectStore, items: Sequence[ObjectInfo]) -> None:
    with closing(sqlite3.connect(staging / _OBJECTS)) as objects, objects:
        objects.execute("create table objects (name text primary key, size integer, etag text, crc integer)")
        rows = ((item.name, item.num_bytes, item.etag, item.crc32c) for item in items)
        objects.executemany("insert into objects values (?, ?, ?, ?)", rows)
    for folder in {os.path.dirname(item.name) for item in items}:
        os.makedirs(staging / folder, exist_ok=True)
    downloaded = [item for item in items if not _STREAMED.fullmatch(item.name)]
    if (num_bytes := sum(item.num_bytes for item in downloaded)) > _MAX_DOWNLOADED_BYTES:
        raise DataError(
            f"{num_bytes / 1e9:.0f} GB at {store.root} are neither images nor shards",
            where=join_url(store.root, max(downloaded, key=lambda item: item.num_bytes).name),
            why="only packed, tar and TFRecord shards and images are read in parts",
            hint="name the folder that holds only the dataset",
        )
    with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
        list(pool.map(lambda item: _download(staging, store, item), downloaded))
    for item in items:
        if _STREAMED.fullmatch(item.name):
            with open(staging / item.name, "xb") as file:
                file.truncate(item.num_bytes)
            os.chmod(staging / item.name, STUB_MODE)
            os.utime(staging / item.name, (item.modified_s, item.modified_s))
    (staging / _URL_FILE).write_text(store.root, encoding="utf-8")


def _download(staging: Path, store: ObjectStore, item: ObjectInfo) -> None:
    """Download an object that is needed as a whole, block by block through the cache."""
    cache = shared_cache()
    cached = CachedObject.of(store.root, item, cache)
    with open(staging / item.name, "xb") as file:
        for start in range(0, item.num_bytes, BLOCK_BYTES):
            file.write(cache.read(cached, start, min(BLOCK_BYTES, item.num_bytes - start)))
    os.utime(staging / item.name, (item.modified_s, item.modified_s))


def _delete_unused(folder: Path, name: str) -> None:
    """Delete trees of older listings of the same address that were not opened for a month."""
    for old in folder.glob("*@*"):
        with suppress(OSError):
            is_same = old.name.rpartition("@")[0] == name[:200]
            if is_same and time.time() - (old / _URL_FILE).stat().st_mtime > _UNUSED_S:
                shutil.rmtree(old)
