"""Commands that share their work over ranks: one output, byte for byte that of one process, also after a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rank_commands import command_in_ranks, run_command

from reconv.core.errors import RunLockedError
from reconv.data.inspect.examine import ExaminedSample, RejectedSample, decode_examined, encode_examined
from reconv.distributed.shared_work import part_size
from reconv.storage.work_journal import WorkJournal


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """60 training and 20 validation images of two classes; one is empty, and two are identical."""
    random, root = np.random.default_rng(0), tmp_path / "images"
    for split, count in (("train", 30), ("val", 10)):
        for name in ("ant", "bee"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 255, (20, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number:03}.jpg")
    (root / "val/ant/000.jpg").write_bytes((root / "train/ant/000.jpg").read_bytes())
    return root


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


CONVERSIONS = [
    ("packed", 2),
    pytest.param("packed", 3, marks=pytest.mark.slow),
    pytest.param("folder", 2, marks=pytest.mark.slow),
    pytest.param("tar", 3, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "size"), CONVERSIONS)
def test_converted_data_is_that_of_one_process(images: Path, tmp_path: Path, kind: str, size: int) -> None:
    options = ["--to", kind, "--per-shard", "9"]
    assert run_command(["data", "convert", str(images), str(tmp_path / "one"), *options]).code == 0
    results = command_in_ranks(size, "data", "convert", images, tmp_path / "shared", *options)
    assert [result.code for result in results] == [0] * size
    assert "is complete" in results[0].out
    assert not any(result.out + result.err for result in results[1:])
    assert contents(tmp_path / "shared") == contents(tmp_path / "one")
    assert len(contents(tmp_path / "one")) >= 10


def test_an_error_of_a_conversion_is_printed_once_and_ends_all_ranks(images: Path, tmp_path: Path) -> None:
    (images / "train/bee/017.jpg").write_bytes(b"no image")
    results = command_in_ranks(2, "data", "convert", images, tmp_path / "out", "--to", "packed", "--per-shard", "9")
    assert [result.code for result in results] == [3, 3]
    assert "".join(result.err for result in results).count("017.jpg") >= 1
    assert sum("error:" in result.err for result in results) == 1
    assert not (tmp_path / "out").exists()


def test_a_damaged_shard_of_a_killed_conversion_is_written_again(images: Path, tmp_path: Path) -> None:
    options = ["--to", "packed", "--per-shard", "9"]
    assert run_command(["data", "convert", str(images), str(tmp_path / "one"), *options]).code == 0
    staging = tmp_path / ".cut.converting"
    last = images / "val/bee/001.jpg"
    content = last.read_bytes()
    last.write_bytes(bytes(len(content)))  # its shard fails
    assert run_command(["data", "convert", str(images), str(tmp_path / "cut"), *options, "--workers", "1"]).code == 3
    last.write_bytes(content)
    shards = sorted(staging.glob("train-*.packed"))
    assert len(shards) == 7
    shards[2].write_bytes(shards[2].read_bytes()[:-1] + b"x")
    assert run_command(["data", "convert", str(images), str(tmp_path / "cut"), *options]).code == 0
    assert contents(tmp_path / "cut") == contents(tmp_path / "one")


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_check_has_the_report_of_one_process(images: Path, tmp_path: Path, size: int) -> None:
    (images / "train/bee/017.jpg").write_bytes(b"no image")
    one, out = run_command(["data", "check", str(images), "--out", str(tmp_path / "one")]), tmp_path / "shared"
    assert one.code == 3
    results = command_in_ranks(size, "data", "check", images, "--out", out)
    assert [result.code for result in results] == [3] * size
    assert results[0].out.replace(str(out), str(tmp_path / "one")) == one.out
    assert not any(result.out + result.err for result in results[1:])
    assert contents(out) == contents(tmp_path / "one")
    assert sorted(contents(out)) == ["check.json", "contact.png"]


@pytest.mark.slow
def test_ranks_that_see_other_data_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("waiting.py").write_text(_WAITING_DATASET.replace("160 if", "160 + int(os.environ['RANK']) if"))
    Path("go").touch()
    results = command_in_ranks(2, "data", "check", "waiting.py:make", "--out", "out")
    assert [result.code for result in results] == [3, 3]
    assert sum("the ranks do not have the same data" in result.err for result in results) == 1


_WAITING_DATASET = """
import os, time
from pathlib import Path
import numpy as np

class Images:
    classes = ["a", "b"]
    def __init__(self, split, count):
        self.split, self.count = split, count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        while index >= 100 and not Path("go").exists():
            time.sleep(0.02)
        with open("read.txt", "a") as log:
            log.write(f"{self.split} {index}\\n")
        return np.full((8, 8 + (self.split == "val"), 3), index % 251, np.uint8), index % 2

def make(split, path=None):
    return Images(split, 160 if split == "train" else 32)
"""


def test_a_check_that_was_killed_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("waiting.py").write_text(_WAITING_DATASET)
    command = ["data", "check", "waiting.py:make", "--out", "out", "--workers", "1"]
    killed = subprocess.Popen([sys.executable, "-m", "reconv", *command])
    deadline_s = time.monotonic() + 60
    while len(list(Path("out").glob(".checking/*.part"))) < 3:  # of 32 samples each
        assert killed.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    Path("go").touch()
    Path("read.txt").unlink()
    assert run_command(command).code == 0
    read = [line for line in Path("read.txt").read_text().splitlines() if line.startswith("train")]
    kept = [line for line in read if int(line.split()[1]) < 96]
    assert len(kept) < 32  # those of the contact sheet, and none of the 96 that had been examined
    assert len(read) - len(kept) >= 64
    assert sorted(contents(Path("out"))) == ["check.json", "contact.png"]


def test_examined_samples_survive_their_encoding() -> None:
    good = ExaminedSample(3, (3, 4), "JPEG", "RGB", 10, 20, 6, 999, bytes(range(16)), 2)
    bad = RejectedSample("a\\n.jpg", "empty", "bad-image")
    assert list(decode_examined(encode_examined([good, bad, good]))) == [good, bad, good]


def test_a_journal_keeps_parts_of_its_plan_only_and_no_damaged_ones(tmp_path: Path) -> None:
    journal = WorkJournal(tmp_path / "journal", {"files": 3})
    with journal.locked():
        journal.write("a", b"one")
        journal.write("b", b"two")
        with pytest.raises(RunLockedError), WorkJournal(tmp_path / "journal", {"files": 3}).locked():
            pass
    path = tmp_path / "journal/b.part"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with journal.locked():
        assert (journal.read("a"), journal.read("b"), journal.read("c")) == (b"one", None, None)
    other = WorkJournal(tmp_path / "journal", {"files": 4})
    with other.locked():
        assert other.read("a") is None


@pytest.mark.parametrize(("items", "size"), [(1, 32), (8192, 32), (100_000, 384), (10_000_000, 4096)])
def test_parts_are_multiples_and_neither_few_nor_large(items: int, size: int) -> None:
    assert part_size(items, 32) == size
