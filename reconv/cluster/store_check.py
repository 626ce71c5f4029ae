"""Checks of an object store by `reconv doctor --store URL`: access, latency and permission to write."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

from reconv.cluster.environment_checks import CheckResult
from reconv.core.errors import ReconvError
from reconv.storage.object_stores.errors import MissingObjectError, StoreError
from reconv.storage.object_stores.store import ObjectInfo, ObjectStore, as_url, open_object_store
from reconv.storage.range_cache import BLOCK_BYTES
from reconv.storage.remote_index import INDEX_NAME, parse_index

TOPIC = "object store"


def check_store(url: str) -> list[CheckResult]:
    """Access to the objects at an address; each failure with what to do about it."""
    try:
        return list(_check(open_object_store(as_url(url))))
    except StoreError as error:
        return [CheckResult(TOPIC, "access", None, f"{error.filename}: {error.strerror}", "missing", error.hint)]
    except ReconvError as error:
        return [CheckResult(TOPIC, "access", None, error.what, "missing", error.hint)]


def _check(store: ObjectStore) -> Iterator[CheckResult]:
    began_s = time.perf_counter()
    items = _objects(store)
    listed_s = time.perf_counter() - began_s
    num_bytes = sum(item.num_bytes for item in items)
    text = f"{len(items):,} objects, {num_bytes / 1e9:.2f} GB at {store.root}, listed in {listed_s:.1f} s"
    advice = "" if items else "nothing is stored there: check the address, or upload the data"
    yield CheckResult(TOPIC, "access", len(items), text, "ok" if items else "note", advice)
    if items:
        yield from _read(store, max(items, key=lambda item: item.num_bytes))
    yield _write(store)


def _objects(store: ObjectStore) -> list[ObjectInfo]:
    """The objects of the index, else of the listing."""
    try:
        index = store.info(INDEX_NAME)
    except MissingObjectError:
        return store.list()
    return parse_index(store.read(index, 0, index.num_bytes), store.root)


def _read(store: ObjectStore, largest: ObjectInfo) -> Iterator[CheckResult]:
    """The latency of a request, and the speed of one."""
    began_s = time.perf_counter()
    item = store.info(largest.name)
    latency_ms = 1000 * (time.perf_counter() - began_s)
    yield CheckResult(TOPIC, "latency_ms", latency_ms, f"{latency_ms:.0f} ms for a request")
    length = min(item.num_bytes, BLOCK_BYTES)
    began_s = time.perf_counter()
    store.read(item, 0, length)
    speed = length / 1e6 / (time.perf_counter() - began_s)
    yield CheckResult(TOPIC, "range_mb_per_s", speed, f"{length / 1e6:.1f} MB read at {speed:.1f} MB/s by one request")


def _write(store: ObjectStore) -> CheckResult:
    name = f"reconv-doctor-{secrets.token_hex(4)}"
    try:
        store.write(name, b"written by reconv doctor")
        store.delete(name)
    except (StoreError, ReconvError) as error:
        why = error.what if isinstance(error, ReconvError) else error.strerror
        text = f"not possible: {why}; fine for --data, not for --out"
        return CheckResult(TOPIC, "write", False, text, "note")
    return CheckResult(TOPIC, "write", True, "an object was written and deleted")
