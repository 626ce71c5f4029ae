"""Writers of classification data: packed shards, a tree of class folders, tar shards and TFRecords.

The bytes written depend only on the samples, their order and their split: no times, owners or names of the machine.
"""

from __future__ import annotations

import io
import json
import os
import random
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np

from reconv.core.errors import DataError, UsageError
from reconv.data.convert.staging import Facts, StagingDir
from reconv.data.convert.transcode import Encoding, TranscodedSample, TranscodeOptions, size_of
from reconv.data.dataset import I64, Sample, Split
from reconv.data.file_list import is_image_name
from reconv.data.readers.shards.packed import shard_name
from reconv.data.readers.shards.packed_format import PackedShardInfo, write_shard
from reconv.data.readers.shards.tfrecord_format import encode_example, write_record

# Samples. A killed conversion repeats at most this many per core, about 450 MB of ImageNet at 110 kB a file. A mapped
# shard takes a file descriptor, of which a process often has 1024: ImageNet takes 326.
PER_SHARD = 4096
_SHUFFLE_SEED = 0


@dataclass(frozen=True, slots=True)
class SplitInfo:
    """The split that is written."""

    split: Split
    num_samples: int
    class_names: tuple[str, ...]
    fingerprint: str
    options: TranscodeOptions
    per_shard: int
    class_ids: tuple[int, ...] = ()  # detection only


@dataclass(frozen=True, slots=True)
class OutputShard:
    """Samples that are written together: their dataset indices in order, and the position of the first in the split."""

    name: str
    number: int
    num_shards: int
    first: int
    indices: I64


NumberedSamples = Iterable[tuple[int, TranscodedSample]]  # with the position in the shard
WriteShard = Callable[[StagingDir, OutputShard, SplitInfo, NumberedSamples], Facts | None]  # returns facts for `finish`
FinishSplit = Callable[[StagingDir, SplitInfo, Sequence[Facts]], None]


@dataclass(frozen=True, slots=True)
class DatasetWriter:
    """Writer of one output format."""

    encoding: Encoding
    shard_name: Callable[[Split, int, int], str]  # of split, number, number of shards
    write: WriteShard
    is_shuffled: bool = False  # training samples, for formats whose readers go through a shard from start to end
    is_one_file: bool = True  # a shard is one file with the shard's name
    has_class_list: bool = False  # a file with the class names is written beside the shards
    num_shards: Mapping[Split, int] | None = None  # the published numbers; None: set by samples per shard
    finish: FinishSplit | None = None  # writes what a split needs besides its shards


def split_into_shards(writer: DatasetWriter, info: SplitInfo, num_shards: int | None) -> list[OutputShard]:
    """The samples of a split dealt to shards, in a fixed order."""
    order = np.arange(info.num_samples, dtype=np.int64)
    if writer.is_shuffled and info.split == "train":
        numbers = list(range(info.num_samples))
        random.Random(_SHUFFLE_SEED).shuffle(numbers)
        order = np.array(numbers, np.int64)
    if num_shards is None:
        starts = list(range(0, info.num_samples, info.per_shard))
    elif num_shards > info.num_samples:
        raise UsageError(
            f"{num_shards:,} shards for {info.num_samples:,} {info.split} samples",
            why="some shards would be empty",
            hint="ask for fewer: --shards TRAIN,VAL",
        )
    else:
        starts = [number * info.num_samples // num_shards for number in range(num_shards)]
    ends = [*starts[1:], info.num_samples]
    return [
        OutputShard(writer.shard_name(info.split, number, len(starts)), number, len(starts), start, order[start:end])
        for number, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def _write_packed(staging: StagingDir, shard: OutputShard, info: SplitInfo, samples: NumberedSamples) -> None:
    description = PackedShardInfo(
        split=info.split,
        shard=shard.number,
        num_shards=shard.num_shards,
        per_shard=info.per_shard,
        num_samples=info.num_samples,
        source=info.fingerprint,
        form=info.options.text,
        class_names=info.class_names,
    )
    with staging.new_file(shard.name) as file:
        write_shard(file, description, (item.sample for _, item in samples))


def _write_tar(staging: StagingDir, shard: OutputShard, info: SplitInfo, samples: NumberedSamples) -> None:
    """WebDataset's layout: KEY.jpg, KEY.cls with the class index, and KEY.json with names."""
    with (
        staging.new_file(shard.name) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for number, item in samples:
            sample = item.sample
            key = f"{shard.first + number:08}"
            description = json.dumps({"class": info.class_names[sample.target], "name": sample.name}, sort_keys=True)
            _add_member(tar, f"{key}.{item.extension}", encoded(sample))
            _add_member(tar, f"{key}.cls", str(sample.target).encode())
            _add_member(tar, f"{key}.json", description.encode())


def _add_member(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _write_folder(staging: StagingDir, shard: OutputShard, info: SplitInfo, samples: NumberedSamples) -> None:
    """split/class/file; one sync per shard instead of one for each of a million files."""
    made_folders: set[str] = set()
    for number, item in samples:
        sample = item.sample
        class_name = _safe_class(info.class_names[sample.target])
        file = file_name(item, info.split, class_name, int(shard.indices[number]))
        path = staging.path / info.split / class_name / file
        if str(path.parent) not in made_folders:
            staging.make_folder(path.parent)
            made_folders.add(str(path.parent))
        staging.write_unsynced(path, encoded(sample))
    os.sync()


def file_name(item: TranscodedSample, split: str, class_name: str, index: int) -> str:
    """The path below the class folder: the original one if the sample comes from such a tree, else its index."""
    parts = PurePosixPath(item.sample.name).parts
    below = parts[1:] if parts[:1] == (split,) or parts[:1] == ("validation",) else parts
    own = "/".join(below[1:])
    is_safe = not any(part.startswith((".", "/")) or "\0" in part for part in parts)
    if below[:1] != (class_name,) or not is_safe or not is_image_name(own):
        return f"{index:08}.{item.extension}"
    # Readers detect the format from the content, but people go by the extension.
    fits = own.lower().endswith({"jpg": (".jpg", ".jpeg")}.get(item.extension, f".{item.extension}"))
    return own if fits or not item.is_changed else f"{own}.{item.extension}"


def _safe_class(name: str) -> str:
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        raise DataError(
            f"class {name!r} cannot be a folder",
            why="its name starts with a dot or contains a slash",
            hint="convert to packed, tar or tfrecord instead",
        )
    return name


def _write_tfrecord(staging: StagingDir, shard: OutputShard, info: SplitInfo, samples: NumberedSamples) -> None:
    """The features of the published ImageNet records; labels start at 1."""
    with staging.new_file(shard.name) as file:
        for _, item in samples:
            sample = item.sample
            data = encoded(sample)
            width, height = size_of(data, sample.name)
            class_name = info.class_names[sample.target].encode("utf-8", "surrogateescape")
            features: dict[str, list[bytes] | list[int]] = {
                "image/encoded": [data],
                "image/format": [b"JPEG"],
                "image/height": [height],
                "image/width": [width],
                "image/filename": [sample.name.rpartition("/")[2].encode("utf-8", "surrogateescape")],
                "image/class/label": [sample.target + 1],
                "image/class/synset": [class_name],
                "image/class/text": [class_name],
            }
            write_record(file, encode_example(features))


def folder_shard_name(split: Split, number: int, num_shards: int) -> str:
    """A name for the journal: such a shard has no file of its own."""
    return f"{split}-{number:06}"


def _tar_name(split: Split, number: int, num_shards: int) -> str:
    return f"{split}-{number:06}.tar"


def _tfrecord_name(split: Split, number: int, num_shards: int) -> str:
    return f"{'train' if split == 'train' else 'validation'}-{number:05}-of-{num_shards:05}"


def encoded(sample: Sample) -> bytes:
    """The encoded image of a sample that was transcoded to a file."""
    if not isinstance(sample.data, bytes):
        raise TypeError("the sample holds pixels, not an encoded image")
    return sample.data


WRITERS: Mapping[str, DatasetWriter] = {
    "packed": DatasetWriter("any", shard_name, _write_packed),
    "folder": DatasetWriter("file", folder_shard_name, _write_folder, is_one_file=False),
    "tar": DatasetWriter("file", _tar_name, _write_tar, is_shuffled=True, has_class_list=True),
    "tfrecord": DatasetWriter(
        "jpeg", _tfrecord_name, _write_tfrecord, is_shuffled=True, num_shards={"train": 1024, "val": 128}
    ),
}
