"""The files each form of data consists of: packed shards, a tree of folders, tar shards, TFRecords.

Owns names, layout and order of what is written. Refuses to know where samples come from and how writing survives a
crash. Invariant: what is written is a function of the samples, their positions and the set they belong to: no times,
no owners, no names of this machine.
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

from reconv.data.convert.staging import Facts, StagingDir
from reconv.data.convert.transcode import Formed, OutputFormat, Wanted, size_of
from reconv.data.dataset import I64, Sample, Split
from reconv.data.readers.folder import is_image_name
from reconv.data.readers.packed import shard_name
from reconv.data.readers.shards.packed_format import Description, write_shard
from reconv.data.readers.shards.tfrecord_format import encode_example, write_record
from reconv.errors import DataError, UsageError

# Samples: the most that one core does again after a kill, about 450 MB of ImageNet at 110 kB a file. A mapped shard
# takes one of the process's file descriptors, of which there are often 1024: ImageNet takes 326.
PER_SHARD = 4096
_SHUFFLE_SEED = 0


@dataclass(frozen=True, slots=True)
class Whole:
    """The split that a piece is part of."""

    split: Split
    num_samples: int
    class_names: tuple[str, ...]
    fingerprint: str
    form: OutputFormat
    per_shard: int
    class_ids: tuple[int, ...] = ()  # of images with boxes


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples that are written together: where they come from, in order, and where in the split they begin."""

    name: str
    number: int
    num_pieces: int
    first: int
    indices: I64


Numbered = Iterable[tuple[int, Formed]]  # each with its place in the piece
Write = Callable[[StagingDir, Piece, Whole, Numbered], Facts | None]  # what must be known when all pieces are written
Finish = Callable[[StagingDir, Whole, Sequence[Facts]], None]


@dataclass(frozen=True, slots=True)
class Kind:
    """A form of data: what it takes, whether training samples are shuffled, how pieces are called and written."""

    wanted: Wanted
    is_shuffled: bool  # where readers go through a shard from its beginning to its end
    is_one_file: bool  # a piece is one file of that name
    has_class_list: bool  # a file with the class names lies beside the shards
    piece_name: Callable[[Split, int, int], str]
    write: Write
    num_shards: Mapping[Split, int] | None = None  # as published; None: by samples in a shard
    finish: Finish | None = None  # what a split needs besides its pieces, once all are written


def pieces(kind: Kind, whole: Whole, num_shards: int | None) -> list[Piece]:
    """The samples of a split dealt to pieces, in a fixed order."""
    order = np.arange(whole.num_samples, dtype=np.int64)
    if kind.is_shuffled and whole.split == "train":
        numbers = list(range(whole.num_samples))
        random.Random(_SHUFFLE_SEED).shuffle(numbers)
        order = np.array(numbers, np.int64)
    if num_shards is None:
        starts = list(range(0, whole.num_samples, whole.per_shard))
    elif num_shards > whole.num_samples:
        raise UsageError(
            f"{num_shards:,} shards for {whole.num_samples:,} {whole.split} samples",
            why="some would be empty",
            then="name fewer: --shards TRAIN,VAL",
        )
    else:
        starts = [number * whole.num_samples // num_shards for number in range(num_shards)]
    ends = [*starts[1:], whole.num_samples]
    return [
        Piece(kind.piece_name(whole.split, number, len(starts)), number, len(starts), start, order[start:end])
        for number, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def _write_packed(room: StagingDir, piece: Piece, whole: Whole, samples: Numbered) -> None:
    description = Description(
        split=whole.split,
        shard=piece.number,
        num_shards=piece.num_pieces,
        per_shard=whole.per_shard,
        num_samples=whole.num_samples,
        source=whole.fingerprint,
        form=whole.form.words,
        class_names=whole.class_names,
    )
    with room.new_file(piece.name) as file:
        write_shard(file, description, (formed.sample for _, formed in samples))


def _write_tar(room: StagingDir, piece: Piece, whole: Whole, samples: Numbered) -> None:
    """WebDataset's layout: a key, and under it the image, its class number and, as JSON, names."""
    with (
        room.new_file(piece.name) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for number, formed in samples:
            sample = formed.sample
            key = f"{piece.first + number:08}"
            said = json.dumps({"class": whole.class_names[sample.target], "name": sample.name}, sort_keys=True)
            _add(tar, f"{key}.{formed.ending}", encoded(sample))
            _add(tar, f"{key}.cls", str(sample.target).encode())
            _add(tar, f"{key}.json", said.encode())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _write_folder(room: StagingDir, piece: Piece, whole: Whole, samples: Numbered) -> None:
    """split/class/file. One sync serves the whole piece, instead of one for each of a million files."""
    made: set[str] = set()
    for number, formed in samples:
        sample = formed.sample
        class_name = _safe_class(whole.class_names[sample.target])
        file = file_name(formed, whole.split, class_name, int(piece.indices[number]))
        path = room.path / whole.split / class_name / file
        if str(path.parent) not in made:
            room.make_folder(path.parent)
            made.add(str(path.parent))
        room.put_unsynced(path, encoded(sample))
    os.sync()


def file_name(formed: Formed, split: str, class_name: str, index: int) -> str:
    """The sample's path below its class folder: its own where it comes from such a tree, else its number."""
    parts = PurePosixPath(formed.sample.name).parts
    below = parts[1:] if parts[:1] == (split,) or parts[:1] == ("validation",) else parts
    own = "/".join(below[1:])
    is_safe = not any(part.startswith((".", "/")) or "\0" in part for part in parts)
    if below[:1] != (class_name,) or not is_safe or not is_image_name(own):
        return f"{index:08}.{formed.ending}"
    # Readers look into the file and not at its ending, but people do not.
    fits = own.lower().endswith({"jpg": (".jpg", ".jpeg")}.get(formed.ending, f".{formed.ending}"))
    return own if fits or not formed.is_changed else f"{own}.{formed.ending}"


def _safe_class(name: str) -> str:
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        raise DataError(
            f"class {name!r} cannot be a folder",
            why="its name begins with a dot or holds a slash",
            then="convert to packed, tar or tfrecord instead",
        )
    return name


def _write_tfrecord(room: StagingDir, piece: Piece, whole: Whole, samples: Numbered) -> None:
    """The features of the published ImageNet records; labels count from 1."""
    with room.new_file(piece.name) as file:
        for _, formed in samples:
            sample = formed.sample
            data = encoded(sample)
            width, height = size_of(data, sample.name)
            class_name = whole.class_names[sample.target].encode("utf-8", "surrogateescape")
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


def _tfrecord_name(split: Split, number: int, num_shards: int) -> str:
    return f"{'train' if split == 'train' else 'validation'}-{number:05}-of-{num_shards:05}"


def encoded(sample: Sample) -> bytes:
    """The file of a sample that was formed into one."""
    if not isinstance(sample.data, bytes):
        raise TypeError("pixels where a file is needed")
    return sample.data


KINDS: Mapping[str, Kind] = {
    "packed": Kind("any", False, True, False, shard_name, _write_packed),
    "folder": Kind("file", False, False, False, lambda split, number, _: f"{split}-{number:06}", _write_folder),
    "tar": Kind("file", True, True, True, lambda split, number, _: f"{split}-{number:06}.tar", _write_tar),
    "tfrecord": Kind("jpeg", True, True, False, _tfrecord_name, _write_tfrecord, {"train": 1024, "val": 128}),
}
