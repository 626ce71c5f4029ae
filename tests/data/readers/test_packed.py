"""Packed shards: samples round-trip, damage is detected, the index is small."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from data_examples import encode, noise

from reconv.core.errors import DataError, ExitCode
from reconv.data.dataset import Sample
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.detect import detect
from reconv.data.readers.shards.packed import PackedDataset, shard_name
from reconv.data.readers.shards.packed_format import PackedShard, PackedShardInfo, write_shard
from reconv.recipe.parts.data import DataConfig
from reconv.storage.local import MappedFile, UnmappedFile, open_ranges
from reconv.storage.mounts import is_local

CLASSES = ("ant", "bee", "Käfer")


def some_samples(count: int) -> list[Sample]:
    """Encoded files and pixels in turn, of all sizes."""
    samples = []
    for number in range(count):
        pixels = noise(3 + number, 9, 1 if number % 4 == 1 else 3, number)
        data = pixels if number % 2 else encode(pixels, "JPEG")
        samples.append(Sample(data, number % 3, f"train/{CLASSES[number % 3]}/{number}.jpg"))
    return samples


def write_set(root: Path, samples: list[Sample], per_shard: int, split: str = "train") -> Path:
    """A packed split."""
    root.mkdir(exist_ok=True)
    num_shards = -(-len(samples) // per_shard)
    for number in range(num_shards):
        description = PackedShardInfo(split, number, num_shards, per_shard, len(samples), "abc", "", CLASSES)
        with open(root / shard_name(split, number, num_shards), "wb") as file:
            write_shard(file, description, samples[number * per_shard : (number + 1) * per_shard])
    return root


@pytest.mark.parametrize("count", [1, 7, 12])
def test_samples_round_trip(tmp_path: Path, count: int) -> None:
    samples = some_samples(count)
    source = PackedDataset(write_set(tmp_path / "set", samples, 4), "train")
    assert len(source) == count
    assert source.class_names == CLASSES
    assert source.targets.tolist() == [sample.target for sample in samples]
    for index in reversed(range(count)):
        found = source[index]
        assert type(found.data) is type(samples[index].data)
        assert np.array_equal(found.data, samples[index].data)
        assert found.target == samples[index].target
        assert source.name(index) == samples[index].name
        assert found.name.endswith(f".packed:{samples[index].name}")
    for beyond in (-1, count):
        with pytest.raises(IndexError):
            source[beyond]


def test_pixels_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", some_samples(4), 4)
    pixels = PackedDataset(root, "train")[1].data
    assert isinstance(pixels, np.ndarray)
    assert not pixels.flags.owndata and not pixels.flags.writeable


def test_reading_and_mapping_give_the_same_bytes(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(200)))
    mapped, unmapped = MappedFile(file), UnmappedFile(file)
    assert isinstance(open_ranges(file), MappedFile)
    for start, length in ((0, 200), (3, 50), (200, 0)):
        assert bytes(mapped.read(start, length)) == bytes(unmapped.read(start, length))
    for ranges in (mapped, unmapped):
        with pytest.raises(DataError, match="file ends early: 10 of 11 bytes"):
            ranges.read(190, 11)


def test_network_file_systems_are_not_mapped(tmp_path: Path) -> None:
    inner = tmp_path / "far away"
    inner.mkdir()
    mounts = tmp_path / "mounts"
    point = str(inner).replace(" ", "\\040")
    lines = ["1 0 8:1 / / rw - ext4 /dev/sda rw", f"2 1 0:9 / {point} rw,noatime shared:3 - nfs4 server:/x rw"]
    mounts.write_text("\n".join(lines))
    assert is_local(tmp_path / "near.packed", mounts)
    assert not is_local(inner / "x.packed", mounts)
    assert is_local(inner / "x.packed", tmp_path / "no such table")
    mounts.write_text("\n".join([*lines, f"3 1 0:9 / {point} rw - ext4 /dev/sdb rw"]))
    assert is_local(inner / "x.packed", mounts)


def test_the_packed_index_takes_under_100_bytes_per_sample(tmp_path: Path) -> None:
    name = "train/n01440764/n01440764_10026.JPEG"
    samples = [Sample(bytes(10), 0, name) for _ in range(1000)]
    source = PackedDataset(write_set(tmp_path / "set", samples, 300), "train")
    assert source.index_bytes / len(source) < 100


def test_the_fingerprint_depends_on_the_samples_but_not_on_the_path(tmp_path: Path) -> None:
    samples = some_samples(5)
    changed = [
        samples,
        samples[::-1],
        [Sample(samples[0].data, 2, samples[0].name), *samples[1:]],
        [Sample(bytes(9), samples[0].target, samples[0].name), *samples[1:]],
    ]
    prints = [
        PackedDataset(write_set(tmp_path / f"{number}", some, 2), "train").fingerprint()
        for number, some in enumerate(changed)
    ]
    assert len(set(prints)) == len(changed) == 4
    again = PackedDataset(write_set(tmp_path / "again", samples, 2), "train")
    assert again.fingerprint() == prints[0]


def test_packed_data_is_detected_and_its_splits_are_opened(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", some_samples(5), 2)
    write_set(root, some_samples(3), 2, "val")
    assert (detect(tmp_path).kind, detect(tmp_path).path) == ("packed", root)
    assert len(open_dataset("auto", tmp_path, "train", DataConfig())) == 5
    source = open_dataset("packed", root, "val", DataConfig())
    assert (source.kind, len(source)) == ("packed", 3)
    assert "packed shards" in source.origin
    write_set(tmp_path / "other", some_samples(2), 2)
    with pytest.raises(DataError, match="more than one packed dataset"):
        detect(tmp_path)


def test_a_missing_split_is_named(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", some_samples(5), 2)
    with pytest.raises(DataError, match="no val shards"):
        PackedDataset(root, "val")


def test_every_damaged_byte_is_detected(tmp_path: Path) -> None:
    path = write_set(tmp_path / "set", some_samples(3), 3) / shard_name("train", 0, 1)
    whole = path.read_bytes()
    clean = [sample.data for sample in some_samples(3)]
    noticed = harmless = 0
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        try:
            shard = PackedShard(path)
            found = [shard[number].data for number in range(len(shard))]
        except DataError as error:
            assert str(path) in error.where
            assert error.code == ExitCode.DATA
            noticed += 1
        else:  # a byte between two payloads
            assert all(np.array_equal(one, other) for one, other in zip(found, clean, strict=True))
            harmless += 1
    assert noticed > 50
    assert harmless * 64 < len(whole)


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99])
def test_a_truncated_shard_is_refused_when_opened(tmp_path: Path, share: float) -> None:
    path = write_set(tmp_path / "set", some_samples(3), 3) / shard_name("train", 0, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(DataError, match=r"damaged packed shard(.|\n)*train-00000"):
        PackedShard(path)


def test_a_shard_truncated_while_open_is_an_error_not_a_crash(tmp_path: Path) -> None:
    source = PackedDataset(write_set(tmp_path, some_samples(9), 9), "train")
    assert source[8].target == 2
    os.truncate(next(tmp_path.glob("*.packed")), 100)
    with pytest.raises(DataError, match="ends early") as caught:
        source[8]
    assert caught.value.where.endswith("train-00000-of-00001.packed")


def test_all_damaged_shards_are_named_at_once(tmp_path: Path) -> None:
    shards = sorted(write_set(tmp_path, some_samples(9), 3).glob("*.packed"))
    for path in shards[1:]:
        os.truncate(path, 100)
    with pytest.raises(DataError) as caught:
        PackedDataset(tmp_path, "train")
    assert caught.value.where == str(shards[1])
    assert str(shards[2]) in caught.value.why


def test_shards_of_different_conversions_are_refused(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", some_samples(6), 2)
    lost = root / shard_name("train", 1, 3)
    content = lost.read_bytes()
    lost.unlink()
    with pytest.raises(DataError, match=r"2 of 3 shards are present; the first difference is train-00001-of-00003"):
        PackedDataset(root, "train")
    other = write_set(tmp_path / "other", some_samples(8)[2:], 2)
    lost.write_bytes(content)
    assert len(PackedDataset(root, "train")) == 6
    (root / shard_name("train", 0, 3)).write_bytes((other / shard_name("train", 1, 3)).read_bytes())
    with pytest.raises(DataError, match="another conversion"):
        PackedDataset(root, "train")


def test_a_shard_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = write_set(tmp_path / "set", some_samples(1), 3) / shard_name("train", 0, 1)
    whole = bytearray(path.read_bytes())
    whole[8] = 2
    path.write_bytes(whole)
    with pytest.raises(DataError, match="version 2"):
        PackedShard(path)
