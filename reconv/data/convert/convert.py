"""Converting a data set: all pieces, on all cores, once each.

Owns the plan of a conversion, its threads and its manifest. Refuses to know formats. Invariant: the destination's bytes
are a function of the sources and the target; neither the number of threads nor a kill in between changes them.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.convert.box_writers import BOX_KINDS, following
from reconv.data.convert.staging import Facts, StagingDir, finished
from reconv.data.convert.transcode import Formed, OutputFormat, formed
from reconv.data.convert.writers import KINDS, PER_SHARD, Kind, Piece, Whole, pieces
from reconv.data.dataset import Dataset, Split
from reconv.data.readers.shards.packed_format import ENDING
from reconv.data.readers.tar import CLASS_LIST
from reconv.errors import DataError, UsageError

FORMAT = 1
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Target:
    """What to make."""

    kind: str
    form: OutputFormat = field(default_factory=OutputFormat)
    per_shard: int = PER_SHARD
    num_shards: Mapping[Split, int] = field(default_factory=dict)  # instead of per_shard


@dataclass(frozen=True, slots=True)
class Converted:
    """How many samples each split has, how many were repaired and why, and whether all was there before."""

    num_samples: dict[str, int]
    repaired: dict[str, int]
    already_there: bool


def convert(
    sources: Mapping[Split, Dataset],
    root: Path | None,
    destination: Path,
    target: Target,
    workers: int,
    progress: Progress,
) -> Converted:
    """Write the splits to `destination`; `root` is the folder they come from, whose name no sample keeps."""
    _refuse_inside(root, destination)
    kind = kind_of(target.kind, has_boxes=any(isinstance(source, DetectionDataset) for source in sources.values()))
    if target.form.raw and kind.wanted != "any":
        raise UsageError(f"--raw is for packed data, not for {target.kind}", then="--to packed --raw")
    wholes = {split: _whole(split, source, target) for split, source in sources.items()}
    work = [
        (whole, piece) for split, whole in wholes.items() for piece in pieces(kind, whole, target.num_shards.get(split))
    ]
    plan = _plan(target, kind, wholes, work)
    if (manifest := finished(destination, plan)) is not None:
        return _converted(manifest, already_there=True)
    room = StagingDir(destination, plan)
    with room.held():
        if (manifest := room.complete()) is None:
            _Work(sources, root, kind, target.form, room, progress, sum(map(len, sources.values()))).do(work, workers)
            for whole in wholes.values():
                if kind.finish is not None:
                    kind.finish(room, whole, [room.record(piece.name) or {} for owner, piece in work if owner is whole])
            if kind.has_class_list:
                room.put_text(CLASS_LIST, "".join(f"{name}\n" for name in plan["class_names"]))
            manifest = _manifest(plan, kind, room, work)
            room.finish(manifest)
    return _converted(manifest, already_there=False)


def kind_of(name: str, has_boxes: bool) -> Kind:
    """The form of this name for images with boxes, or for others."""
    kinds = BOX_KINDS if has_boxes else KINDS
    if name not in kinds:
        what = "images with boxes" if has_boxes else "images without boxes"
        raise UsageError(f"{what} cannot be written as {name}", then=f"--to {' or '.join(kinds)}")
    return kinds[name]


def make_target(
    name: str,
    form: OutputFormat,
    per_shard: int | None,
    num_shards: Mapping[Split, int] | None,
    has_boxes: bool = False,
) -> Target:
    """A target, or the reason why there is none like it."""
    kind = kind_of(name, has_boxes)
    if kind.num_shards is None:
        if num_shards is not None:
            raise UsageError(f"--shards is for tfrecord, not for {name}", then="--per-shard N")
        return Target(name, form, per_shard or PER_SHARD)
    if per_shard is not None:
        raise UsageError(f"--per-shard is not for {name}", why="its shards are counted", then="--shards TRAIN,VAL")
    return Target(name, form, PER_SHARD, num_shards or kind.num_shards)


class _Work:
    """The pieces of one conversion, written by threads: Pillow, files and digests leave the interpreter alone."""

    def __init__(
        self,
        sources: Mapping[Split, Dataset],
        root: Path | None,
        kind: Kind,
        form: OutputFormat,
        room: StagingDir,
        progress: Progress,
        num_samples: int,
    ) -> None:
        self._sources = sources
        self._root = root
        self._kind = kind
        self._form = form
        self._room = room
        self._progress = progress
        self._num_samples = num_samples
        self._num_done = 0
        self._counting = threading.Lock()
        self._stopped = threading.Event()

    def do(self, work: list[tuple[Whole, Piece]], workers: int) -> None:
        """Write every piece that is not done; the first error, in the order of the pieces, ends the work."""
        todo = [(whole, piece) for whole, piece in work if self._room.record(piece.name) is None]
        self._advance(self._num_samples - sum(len(piece.indices) for _, piece in todo))
        with ThreadPoolExecutor(workers, thread_name_prefix="reconv-convert") as pool:
            tasks = [pool.submit(self._write, whole, piece) for whole, piece in todo]
            try:
                wait(tasks, return_when=FIRST_EXCEPTION)
            finally:
                self._stopped.set()
                pool.shutdown(cancel_futures=True)
        errors = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
        for error in errors:
            if not isinstance(error, _StoppedError):
                raise error

    def _write(self, whole: Whole, piece: Piece) -> None:
        repaired: dict[str, list[str]] = {}
        noted = self._kind.write(self._room, piece, whole, self._formed(whole, piece, repaired))
        facts: dict[str, Any] = {"samples": len(piece.indices), "repaired": repaired, **(noted or {})}
        if self._kind.is_one_file:
            with open(self._room.path / piece.name, "rb") as file:
                facts["blake2b"] = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
                facts["bytes"] = file.tell()
        self._room.done(piece.name, facts)

    def _formed(self, whole: Whole, piece: Piece, repaired: dict[str, list[str]]) -> Iterator[tuple[int, Formed]]:
        """The piece's samples in their new form; repairs are noted on the way."""
        source = self._sources[whole.split]
        num_classes = len(whole.class_names)
        for number, index in enumerate(piece.indices):
            if self._stopped.is_set():
                raise _StoppedError
            sample = source[int(index)]
            if sample.annotation is None and not 0 <= sample.target < num_classes:
                why = f"there are {num_classes} classes, 0 to {num_classes - 1}"
                raise DataError(f"label {sample.target} out of range", where=sample.name, why=why)
            made = formed(sample, self._form, self._kind.wanted)
            made = made if sample.annotation is None else following(made)
            name = _relative(sample.name, self._root)
            if made.repaired:
                repaired.setdefault(made.repaired, []).append(name)
            yield number, replace(made, sample=replace(made.sample, name=name))
            self._advance(1)

    def _advance(self, count: int) -> None:
        with self._counting:
            self._num_done += count
            self._progress(self._num_done, self._num_samples)


class _StoppedError(Exception):
    """Another piece has failed, or the user has had enough."""


def _refuse_inside(root: Path | None, destination: Path) -> None:
    if root is not None:
        there, new = root.resolve(), destination.resolve()
        if new == there or there in new.parents:
            raise UsageError(
                f"{destination} lies in the data that is to be converted",
                where=str(root),
                why="nothing is written where your files are",
                then=f"name a folder beside it, as {root.parent / (root.name + '-new')}",
            )


def _whole(split: Split, source: Dataset, target: Target) -> Whole:
    ids = source.class_ids if isinstance(source, DetectionDataset) else ()
    return Whole(split, len(source), source.class_names, source.fingerprint(), target.form, target.per_shard, ids)


def _plan(target: Target, kind: Kind, wholes: Mapping[Split, Whole], work: list[tuple[Whole, Piece]]) -> Facts:
    """Everything that decides the bytes, as JSON gives it back."""
    splits = {
        split: {
            "samples": whole.num_samples,
            "fingerprint": whole.fingerprint,
            "pieces": sum(owner is whole for owner, _ in work),
        }
        for split, whole in wholes.items()
    }
    names = sorted({whole.class_names for whole in wholes.values()})
    if len(names) != 1:
        raise DataError("training and validation have other classes", why="each split has a list of its own")
    return {
        "format": FORMAT,
        "kind": target.kind,
        "form": target.form.facts(kind.wanted),
        "per_shard": None if target.num_shards else target.per_shard,
        "splits": splits,
        "class_names": list(names[0]),
    }


def _manifest(plan: Facts, kind: Kind, room: StagingDir, work: list[tuple[Whole, Piece]]) -> Facts:
    """What was written, piece by piece, and what was repaired."""
    files: list[Facts] = []
    repaired: dict[str, list[str]] = {}
    for _, piece in work:
        record = room.record(piece.name)
        if record is None:
            raise DataError(f"{piece.name} is not complete", where=str(room.path), then="type the same command again")
        for why, names in record["repaired"].items():
            repaired.setdefault(why, []).extend(names)
        if kind.is_one_file:
            files.append({"file": piece.name, **{key: record[key] for key in ("samples", "bytes", "blake2b")}})
    if not kind.is_one_file:
        _refuse_same_names(room, work)
    return {"plan": plan, "files": files, "repaired": {why: sorted(names) for why, names in repaired.items()}}


def _refuse_same_names(room: StagingDir, work: list[tuple[Whole, Piece]]) -> None:
    """A tree has as many files as there are samples, or two samples had one name."""
    for whole in {id(whole): whole for whole, _ in work}.values():
        found = sum(len(files) for _, _, files in os.walk(room.path / whole.split))
        if found != whole.num_samples:
            raise DataError(
                f"{whole.num_samples:,} {whole.split} samples became {found:,} files",
                where=str(room.path / whole.split),
                why="samples of one class have the same file name",
                then="convert to packed or tar instead",
            )


def _converted(manifest: Facts, already_there: bool) -> Converted:
    num_samples = {split: facts["samples"] for split, facts in manifest["plan"]["splits"].items()}
    repaired = {why: len(names) for why, names in sorted(manifest["repaired"].items())}
    return Converted(num_samples, repaired, already_there)


def _relative(name: str, root: Path | None) -> str:
    """The sample's name without the folder of this machine that it lies in."""
    _, packed, inner = name.partition(f"{ENDING}:")
    if packed:
        return inner
    prefix = "" if root is None else f"{root}{os.sep}"
    return name[len(prefix) :] if prefix and name.startswith(prefix) else name
