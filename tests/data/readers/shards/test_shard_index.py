"""The index of shards: built once, stored beside the data or in the cache, rebuilt when out of date."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from reconv.core.errors import DataError
from reconv.data.readers.shards.index import ScannedShard, ShardIndex, open_index
from reconv.storage.local import ReadWindow

SCAN_COUNT: list[str] = []


def scan(path: str) -> ScannedShard:
    """One sample for each byte of the file; its label is the byte."""
    SCAN_COUNT.append(path)
    data = Path(path).read_bytes()
    if b"!" in data:
        raise DataError("broken", where=path)
    return ScannedShard([(at, 1, byte) for at, byte in enumerate(data)], data, {byte: chr(byte) for byte in data})


def opened(folder: Path) -> tuple[ShardIndex, int]:
    """The index, and how many files were scanned for it."""
    SCAN_COUNT.clear()
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    index = open_index("kind", "train", folder, names, scan)
    return index, len(SCAN_COUNT)


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RECONV_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(5):
        (folder / f"shard-{number}").write_text("abcde"[: number + 1] * 3)
    return folder


def test_an_index_is_built_once_and_then_mapped(shards: Path) -> None:
    first, num_scanned = opened(shards)
    again, num_scanned_again = opened(shards)
    assert (num_scanned, num_scanned_again) == (5, 0)
    assert first.rows.tolist() == again.rows.tolist()
    assert len(first.rows) == 3 * (1 + 2 + 3 + 4 + 5)
    assert first.rows["shard"].tolist() == sorted(first.rows["shard"].tolist())
    assert (first.digest, first.names) == (again.digest, again.names)
    assert again.names == {ord(letter): letter for letter in "abcde"}
    assert again.stored == str(shards / ".reconv-kind-train.index")
    assert not again.rows.flags.owndata
    assert not again.rows.flags.writeable
    assert first.rows.itemsize == 20


def test_no_file_of_the_data_is_changed(shards: Path) -> None:
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in shards.iterdir()}
    opened(shards)
    after = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in shards.iterdir()}
    kept = after.pop(".reconv-kind-train.index")
    assert kept[0]
    assert after == before


def test_the_index_is_cached_if_the_data_folder_is_read_only(shards: Path, tmp_path: Path) -> None:
    (shards / ".reconv-kind-train.index").mkdir()  # a file cannot take the place of a folder, whoever asks
    first, num_scanned = opened(shards)
    again, num_scanned_again = opened(shards)
    assert (num_scanned, num_scanned_again) == (5, 0)
    assert Path(first.stored).parent == tmp_path / "cache" / "indexes"
    assert first.stored == again.stored
    assert [path.name for path in shards.iterdir() if path.name.startswith(".")] == [".reconv-kind-train.index"]


def test_the_index_stays_in_memory_if_nothing_is_writable(shards: Path, tmp_path: Path) -> None:
    (shards / ".reconv-kind-train.index").mkdir()
    (tmp_path / "cache").write_text("a file, not a folder")
    index, num_scanned = opened(shards)
    assert num_scanned == 5
    assert len(index.rows) == 45
    assert "in memory" in index.stored


def test_a_changed_added_or_removed_shard_rebuilds_the_index(shards: Path) -> None:
    digests = {opened(shards)[0].digest}
    (shards / "shard-2").write_text("xyz")
    index, num_scanned = opened(shards)
    assert num_scanned == 5
    digests.add(index.digest)
    (shards / "shard-5").write_text("q")
    index, num_scanned = opened(shards)
    assert (num_scanned, int(index.rows["label"][-1])) == (6, ord("q"))
    digests.add(index.digest)
    (shards / "shard-0").unlink()
    index, num_scanned = opened(shards)
    assert num_scanned == 5
    assert len(digests | {index.digest}) == 4


def test_another_modification_time_rebuilds_the_index(shards: Path) -> None:
    opened(shards)
    path = shards / "shard-0"
    path.write_text("zzz")
    os.utime(path, ns=(1, 1))
    index, num_scanned = opened(shards)
    assert num_scanned == 5
    assert index.rows["label"][:3].tolist() == [ord("z")] * 3


def test_a_damaged_index_is_rebuilt(shards: Path) -> None:
    kept = Path(opened(shards)[0].stored)
    whole = kept.read_bytes()
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    cases = [b"", whole[:5], whole[:40], whole[:-1], whole + b"x", bytes(flipped), b"x" + whole[1:]]
    cases += [whole[:20] + b"\xff" * 20 + whole[40:], whole[:15] + b"\xff" * 8 + whole[23:]]
    for number, content in enumerate(cases):
        kept.write_bytes(content)
        index, num_scanned = opened(shards)
        assert num_scanned == 5, number
        assert len(index.rows) == 45
        assert kept.read_bytes() == whole


def test_the_first_damaged_shard_is_named_first(shards: Path) -> None:
    for number in (3, 1, 4):
        (shards / f"shard-{number}").write_text("!")
    for _ in range(5):
        with pytest.raises(DataError) as caught:
            opened(shards)
        assert caught.value.where == str(shards / "shard-1")
        assert caught.value.why.endswith(f"2 more: {shards / 'shard-3'}, {shards / 'shard-4'}")
    assert not list(shards.glob(".reconv*"))


def test_empty_shards_are_an_error(shards: Path) -> None:
    for path in shards.iterdir():
        path.write_text("")
    with pytest.raises(DataError, match="no samples"):
        opened(shards)


def test_concurrent_processes_leave_one_complete_index(shards: Path) -> None:
    here = Path(__file__).parent
    code = f"import sys; sys.path.insert(0, {str(here)!r}); import test_shard_index as t; from pathlib import Path\n"
    code += f"print(t.opened(Path({str(shards)!r}))[0].digest)"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    digests = {process.communicate(timeout=60)[0].strip() for process in processes}
    index, num_scanned = opened(shards)
    assert digests == {index.digest}
    assert num_scanned == 0
    assert [path.name for path in shards.iterdir() if path.name.startswith(".")] == [".reconv-kind-train.index"]


def test_a_million_samples_take_under_100_bytes_each_and_are_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "shard-0"
    path.touch()
    samples = np.stack([np.arange(1_000_000) * 110_000, np.full(1_000_000, 110_000), np.arange(1_000_000) % 1000], 1)

    def large(_: str) -> ScannedShard:
        return ScannedShard(samples, b"", {})  # type: ignore[arg-type]

    index = open_index("kind", "train", tmp_path, ["shard-0"], large)
    assert Path(index.stored).stat().st_size < 21 * 1_000_000
    assert not index.rows.flags.owndata
    assert index.rows[999_999].item() == (999_999 * 110_000, 110_000, 0, 999)


def test_the_first_name_of_a_label_wins(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"shard-{number}").touch()

    def named(path: str) -> ScannedShard:
        return ScannedShard([(0, 1, 7)], b"", {7: path[-1]})

    assert open_index("kind", "train", tmp_path, [f"shard-{n}" for n in range(3)], named).names == {7: "0"}


def test_a_window_reads_any_range_in_any_order(tmp_path: Path) -> None:
    data = bytes(range(256)) * 10
    (tmp_path / "file").write_bytes(data)
    window = ReadWindow(tmp_path / "file", chunk_bytes=100)
    for start, length in ((0, 5), (90, 20), (80, 4), (2000, 300), (1999, 1), (2559, 1), (0, 2560), (2560, 0)):
        assert window.read(start, length) == data[start : start + length]
    with pytest.raises(DataError, match="ends early"):
        window.read(2550, 20)
