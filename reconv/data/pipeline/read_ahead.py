"""Download what a loader will read from an object store, in the order in which it will be read.

The order of samples is known, so no request has to wait for its turn: parts of several MB are fetched by many requests
at once into the cache that all workers and ranks of a machine read from. Nothing here changes what is read; a part that
is not there yet is fetched when it is read.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from reconv.core.text import printable
from reconv.data.dataset import I64, Dataset, sample_ranges
from reconv.storage.object_stores.errors import RetryStoppedError, StoreError
from reconv.storage.range_cache import Block, CachedObject, RangeCache
from reconv.storage.remote_tree import (
    NUM_CONNECTIONS,
    RemoteFile,
    remote_file,
    shared_cache,
    shown_path,
    tree_bytes,
)

_MAX_AHEAD_BYTES = 2 << 30
_AHEAD_FRACTION = 0.25  # of the cache
_WAIT_S = 0.2
_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class _Policy:
    """Distance to fetch ahead, and permission to displace what was used before."""

    may_evict: bool
    ahead_bytes: int | None  # None: everything


class ReadAhead:
    """Fetches parts of objects in the background, up to some bytes ahead of the step that is being read."""

    def __init__(
        self,
        dataset: Dataset,
        steps: Iterable[int],
        indices_of: Callable[[int], I64],
        cache: RangeCache,
        policy: _Policy,
    ) -> None:
        self._dataset = dataset
        self._steps = steps
        self._indices_of = indices_of
        self._cache = cache
        self._policy = policy
        self._shards: dict[str, RemoteFile] = {}  # by path: looking one up takes as long as the rest for a sample
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._ahead: deque[tuple[int, int]] = deque()  # step of first use and bytes of what was fetched
        self._ahead_bytes = 0
        self._free_requests = threading.Semaphore(2 * NUM_CONNECTIONS)
        self._pool = ThreadPoolExecutor(NUM_CONNECTIONS, thread_name_prefix="reconv-read-ahead")
        self._thread = threading.Thread(target=self._run, name="reconv-read-ahead", daemon=True)
        self._thread.start()

    def reached(self, step: int) -> None:
        """The batch of a step was read."""
        with self._changed:
            while self._ahead and self._ahead[0][0] <= step:
                self._ahead_bytes -= self._ahead.popleft()[1]
            self._changed.notify()

    def close(self) -> None:
        """Stop; requests under way end by themselves."""
        self._stop.set()
        with self._changed:
            self._changed.notify()
        self._thread.join()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        recent: dict[str, None] = {}  # blocks that were looked at, oldest first
        with suppress(StoreError):  # reading it raises the same error, which is reported then
            for step in self._steps:
                for cached, block in self._blocks(self._indices_of(step)):
                    if block.path in recent:
                        continue
                    recent[block.path] = None
                    if self._policy.may_evict and len(recent) > _recent_limit(self._cache, block):
                        del recent[next(iter(recent))]
                    if self._cache.has(block):
                        continue
                    if not self._cache.has_room(block, self._policy.may_evict):
                        if not self._policy.may_evict:
                            return  # full for good
                    elif not self._fetch(step, cached, block):
                        return

    def _blocks(self, indices: I64) -> Iterator[tuple[CachedObject, Block]]:
        for path, start, length in sample_ranges(self._dataset, indices):
            file = self._shards.get(path) or remote_file(path)
            if file is not None:
                if length is not None:
                    self._shards[path] = file
                size = file.size_bytes - start if length is None else length
                for block in file.cached.blocks(start, size):
                    yield file.cached, block

    def _fetch(self, step: int, cached: CachedObject, block: Block) -> bool:
        """Start to fetch a block once there is room for it; False to stop."""
        limit = self._policy.ahead_bytes
        with self._changed:
            while limit is not None and self._ahead_bytes + block.length > limit and self._ahead_bytes:
                if self._stop.is_set():
                    return False
                self._changed.wait(_WAIT_S)
            self._ahead.append((step, block.length))
            self._ahead_bytes += block.length
        while not self._free_requests.acquire(timeout=_WAIT_S):
            if self._stop.is_set():
                return False
        if self._stop.is_set():
            return False
        self._pool.submit(self._download, cached, block)
        return True

    def _download(self, cached: CachedObject, block: Block) -> None:
        try:
            with suppress(StoreError, RetryStoppedError, OSError):
                self._cache.fetch(cached, block, may_evict=self._policy.may_evict, stop=self._stop)
        finally:
            self._free_requests.release()


@contextmanager
def read_ahead(
    dataset: Dataset, steps: Iterable[int], indices_of: Callable[[int], I64], in_order: bool
) -> Iterator[Callable[[int], None] | None]:
    """Fetch the samples of the steps ahead while the block runs; call the result when a step was read.

    The result is None for data that is in no object store.

    `in_order`: each part of the data is needed once, for a while, and then not again in this pass.
    """
    root = _remote_root(dataset)
    if root is None:
        yield None
        return
    ahead = ReadAhead(dataset, steps, indices_of, shared_cache(), _policy(root, in_order))
    try:
        yield ahead.reached
    finally:
        ahead.close()


def _remote_root(dataset: Dataset) -> str | None:
    """A path of a dataset that is in an object store."""
    found = sample_ranges(dataset, np.zeros(1, np.int64)) if len(dataset) else []
    return found[0][0] if found and remote_file(found[0][0]) is not None else None


def _policy(path: str, in_order: bool) -> _Policy:
    limit, total = shared_cache().limit_bytes, tree_bytes(path)
    ahead = min(_MAX_AHEAD_BYTES, int(_AHEAD_FRACTION * limit))
    if total <= 0.95 * limit:
        return _Policy(may_evict=True, ahead_bytes=ahead if in_order else None)
    if in_order:
        return _Policy(may_evict=True, ahead_bytes=ahead)
    if path not in _warned:
        _warned.add(path)
        text = (
            f"{shown_path(path)}: the data has {total / 1e9:.1f} GB and the cache {limit / 1e9:.1f} GB, and all "
            "samples are shuffled one by one: most are read by a request of their own. Raise RECONV_CACHE_LIMIT, or "
            "train a new run with --set data.shuffle_window=32768"
        )
        print(printable(text), file=sys.stderr, flush=True)
    # What is in the cache stays: in a random order no part is more useful than another.
    return _Policy(may_evict=False, ahead_bytes=ahead)


def _recent_limit(cache: RangeCache, block: Block) -> int:
    """Number of blocks to remember: fewer than the cache holds, so that a forgotten one may have been displaced."""
    return max(16, int(0.5 * cache.limit_bytes / max(1, block.length)))
