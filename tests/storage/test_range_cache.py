"""The cache of ranges of remote objects."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from web_folder import WebFolder

from reconv.core.errors import UsageError
from reconv.storage import range_cache
from reconv.storage.object_stores.errors import ChangedObjectError, StoreUnavailableError
from reconv.storage.object_stores.store import open_object_store
from reconv.storage.range_cache import CachedObject, RangeCache, parse_size

_BLOCK = 1000
_SIZE = 3500


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_cache, "BLOCK_BYTES", _BLOCK)


@pytest.fixture
def content(web: WebFolder) -> bytes:
    data = random.Random(0).randbytes(_SIZE)
    (web.folder / "a.packed").write_bytes(data)
    return data


def _open(web: WebFolder, cache: RangeCache) -> CachedObject:
    store = open_object_store(web.url)
    return CachedObject.of(store.root, store.info("a.packed"), cache)


def _blocks(cache: RangeCache) -> list[Path]:
    return sorted(path for path in cache.folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("fault", ["503", "cut", "truncated", "slow"])
def test_a_failing_request_is_repeated_and_the_bytes_are_right(
    web: WebFolder, content: bytes, tmp_path: Path, fault: str
) -> None:
    cache = RangeCache(tmp_path / "c", 10**6)
    cached = _open(web, cache)
    web.faults.extend([fault, fault])
    assert cache.read(cached, 900, 1300) == content[900:2200]
    assert not web.faults
    assert cache.read(cached, 0, _SIZE) == content


def test_what_was_read_is_not_asked_for_again_not_even_by_another_process(
    web: WebFolder, content: bytes, tmp_path: Path
) -> None:
    first, second = RangeCache(tmp_path / "c", 10**6), RangeCache(tmp_path / "c", 10**6)
    assert first.read(_open(web, first), 0, _SIZE) == content
    num_requests = web.num_gets()
    assert num_requests == 4
    cached = _open(web, second)
    assert second.read(cached, 1, _SIZE - 2) == content[1:-1]
    assert web.num_gets() == num_requests


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
def test_a_damaged_block_is_downloaded_again(
    web: WebFolder, content: bytes, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = RangeCache(tmp_path / "c", 10**6)
    cached = _open(web, cache)
    cache.read(cached, 0, 10)
    [block] = _blocks(cache)
    data = block.read_bytes()
    block.write_bytes({"flip": bytes([data[0] ^ 4]) + data[1:], "truncate": data[:-1], "empty": b""}[damage])
    assert RangeCache(tmp_path / "c", 10**6).read(cached, 0, 10) == content[:10]
    assert "is damaged: downloading it again" in capsys.readouterr().err
    assert block.read_bytes() == data


def test_the_cache_stays_below_its_limit_and_keeps_what_was_used_last(
    web: WebFolder, content: bytes, tmp_path: Path
) -> None:
    cache = RangeCache(tmp_path / "c", 2500)
    cached = _open(web, cache)
    for number in range(4):
        cache.fetch(cached, cached.block(number), may_evict=True)
        assert sum(path.stat().st_size for path in _blocks(cache)) <= 2500
    assert cache.has(cached.block(3))
    assert not cache.has(cached.block(0))
    assert cache.read(cached, 0, _SIZE) == content


def test_without_room_only_the_bytes_that_are_asked_for_are_read(
    web: WebFolder, content: bytes, tmp_path: Path
) -> None:
    cache = RangeCache(tmp_path / "c", 10)
    assert cache.read(_open(web, cache), 990, 30) == content[990:1020]
    assert _blocks(cache) == []


def test_a_full_disk_makes_no_wrong_bytes(
    web: WebFolder, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(range_cache.os, "write", refuse)
    cache = RangeCache(tmp_path / "c", 10**6)
    cached = _open(web, cache)
    assert cache.read(cached, 0, _SIZE) == content
    assert cache.read(cached, 5, 10) == content[5:15]
    assert capsys.readouterr().err.count("No space left on device; data that is not in the cache") == 1
    monkeypatch.undo()
    assert _blocks(cache) == []


def test_a_changed_object_is_an_error_and_its_blocks_are_not_mixed(
    web: WebFolder, content: bytes, tmp_path: Path
) -> None:
    cache = RangeCache(tmp_path / "c", 10**6)
    old = _open(web, cache)
    cache.read(old, 0, 10)
    changed = content[::-1]
    (web.folder / "a.packed").write_bytes(changed)
    with pytest.raises(ChangedObjectError, match="it is now"):
        cache.read(old, 2000, 10)
    assert cache.read(old, 0, 10) == content[:10]  # the cache still has that version
    assert cache.read(_open(web, cache), 0, _SIZE) == changed


def test_a_store_that_stays_away_is_an_error(web: WebFolder, content: bytes, tmp_path: Path) -> None:
    cache = RangeCache(tmp_path / "c", 10**6)
    cached = _open(web, cache)
    web.is_down = True
    with pytest.raises(StoreUnavailableError, match="503"):
        cache.read(cached, 0, 10)
    assert web.num_gets() == 4


def test_threads_that_miss_together_download_once(web: WebFolder, content: bytes, tmp_path: Path) -> None:
    caches = [RangeCache(tmp_path / "c", 10**6) for _ in range(6)]
    cached = _open(web, caches[0])
    web.faults.append("slow")
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda c=c: found.append(bytes(c.read(cached, 0, 900)))) for c in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [content[:900]] * 6
    assert web.num_gets() == 1


_DOWNLOAD = """
import sys
from pathlib import Path
from reconv.storage import range_cache
range_cache.BLOCK_BYTES = 1000
from reconv.storage.range_cache import CachedObject, RangeCache
from reconv.storage.object_stores.store import open_object_store
cache = RangeCache(Path(sys.argv[2]), 10**6)
store = open_object_store(sys.argv[1])
cached = CachedObject.of(store.root, store.info("a.packed"), cache)
part = range_cache._lock_part(cached.block(0))
range_cache.os.write(part, b"half")
print("locked", flush=True)
import time
time.sleep(60)
"""


def test_a_killed_process_leaves_nothing_that_is_taken_for_data(web: WebFolder, content: bytes, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _DOWNLOAD, web.url, str(tmp_path / "c")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    cache = RangeCache(tmp_path / "c", 10**6)
    assert [path.suffix for path in _blocks(cache)] == [".part"]
    assert cache.read(_open(web, cache), 0, 10) == content[:10]
    assert [path.suffix for path in _blocks(cache)] == [""]


def test_sizes_have_units() -> None:
    assert [parse_size(text) for text in ("5", "1.5kB", "2 GB", "3T")] == [5, 1500, 2 * 10**9, 3 * 10**12]
    with pytest.raises(UsageError, match="not a size"):
        parse_size("much")
