"""Convert a dataset to another format: plan the shards, write them with all cores, and record what was written.

The bytes written depend only on the data and the target, not on the number of threads or processes or on a kill in
between.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reconv.core.errors import DataError, UsageError
from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.convert.box_writers import BOX_WRITERS, scale_boxes
from reconv.data.convert.staging import Facts, StagingDir, finished_conversion
from reconv.data.convert.transcode import TranscodedSample, TranscodeOptions, transcode
from reconv.data.convert.writers import PER_SHARD, WRITERS, DatasetWriter, OutputShard, SplitInfo, split_into_shards
from reconv.data.dataset import Dataset, Split
from reconv.data.readers.folder import SPLIT_NAMES, FolderDataset, has_class_folders
from reconv.data.readers.imagenet.archives import ImageNetArchiveDataset
from reconv.data.readers.shards.packed_format import EXTENSION
from reconv.data.readers.tar import CLASS_LIST
from reconv.distributed.process_group import ProcessGroup
from reconv.distributed.shared_work import check_same_plan
from reconv.storage.bounded import real_path

FORMAT = 1
Progress = Callable[[int, int], None]
Work = list[tuple[SplitInfo, OutputShard]]


@dataclass(frozen=True, slots=True)
class ConvertTarget:
    """Output of a conversion."""

    kind: str
    options: TranscodeOptions = field(default_factory=TranscodeOptions)
    per_shard: int = PER_SHARD
    num_shards: Mapping[Split, int] = field(default_factory=dict)  # instead of per_shard


@dataclass(frozen=True, slots=True)
class ConvertResult:
    """Samples of each split, samples that had to be re-encoded by reason, and whether all was already there."""

    num_samples: dict[str, int]
    repaired: dict[str, int]
    already_there: bool


def convert(
    datasets: Mapping[Split, Dataset],
    root: Path | None,
    destination: Path,
    target: ConvertTarget,
    workers: int,
    progress: Progress,
    process_group: ProcessGroup | None = None,
) -> ConvertResult:
    """Write the splits to `destination`; `root` is the folder they come from and is cut from the samples' names.

    The ranks of a process group share the shards; rank 0 publishes the conversion.
    """
    ranks = process_group or ProcessGroup.single()
    _check_apart(datasets, root, destination)
    has_boxes = any(isinstance(dataset, DetectionDataset) for dataset in datasets.values())
    writer = find_writer(target.kind, has_boxes)
    if target.options.raw and writer.encoding != "any":
        raise UsageError(f"--raw is for packed data, not for {target.kind}", hint="--to packed --raw")
    infos = {split: _split_info(split, dataset, target) for split, dataset in datasets.items()}
    work = [
        (info, shard)
        for split, info in infos.items()
        for shard in split_into_shards(writer, info, target.num_shards.get(split))
    ]
    plan = _plan(target, writer, infos, work)
    check_same_plan(ranks, plan)
    if (manifest := ranks.on_rank0(lambda: finished_conversion(destination, plan))) is not None:
        return _result(manifest, already_there=True)
    staging = StagingDir(destination, plan)
    with ExitStack() as stack:
        ranks.on_rank0(lambda: stack.enter_context(staging.locked()))
        if (manifest := ranks.on_rank0(staging.publish_if_complete)) is None:
            ranks.set_phase("writing shards")
            own_work = work[ranks.rank :: ranks.world_size]
            _ShardWriter(datasets, root, writer, target.options, staging, progress).run(own_work, workers)
            ranks.all_gather(None)  # all shards are written
            if ranks.is_rank0 and ranks.world_size > 1:
                for _, shard in work:
                    staging.wait_for_record(shard.name)
            manifest = ranks.on_rank0(lambda: _finish(writer, infos, work, plan, staging))
    return _result(manifest, already_there=False)


def find_writer(name: str, has_boxes: bool) -> DatasetWriter:
    """The writer of a format, for images with or without boxes."""
    writers = BOX_WRITERS if has_boxes else WRITERS
    if name not in writers:
        what = "images with boxes" if has_boxes else "images without boxes"
        raise UsageError(f"{what} cannot be written as {name}", hint=f"--to {' or '.join(writers)}")
    return writers[name]


def make_target(
    name: str,
    options: TranscodeOptions,
    per_shard: int | None,
    num_shards: Mapping[Split, int] | None,
    has_boxes: bool = False,
) -> ConvertTarget:
    """A target from command line options, refusing those that do not apply to the format."""
    writer = find_writer(name, has_boxes)
    if writer.num_shards is None:
        if num_shards is not None:
            raise UsageError(f"--shards is for tfrecord, not for {name}", hint="--per-shard N")
        return ConvertTarget(name, options, per_shard or PER_SHARD)
    if per_shard is not None:
        raise UsageError(
            f"--per-shard does not apply to {name}",
            why="its size is set by the number of shards",
            hint="--shards TRAIN,VAL",
        )
    return ConvertTarget(name, options, PER_SHARD, num_shards or writer.num_shards)


class _ShardWriter:
    """Writes the shards of one conversion with threads: Pillow, file operations and digests release the GIL."""

    def __init__(
        self,
        datasets: Mapping[Split, Dataset],
        root: Path | None,
        writer: DatasetWriter,
        options: TranscodeOptions,
        staging: StagingDir,
        progress: Progress,
    ) -> None:
        self._datasets = datasets
        self._root = root
        self._writer = writer
        self._options = options
        self._staging = staging
        self._progress = progress
        self._num_samples = 0
        self._num_done = 0
        self._count_lock = threading.Lock()
        self._stopped = threading.Event()

    def run(self, work: Work, workers: int) -> None:
        """Write every shard that is not done yet; raise the first error in the order of the shards."""
        self._num_samples = sum(len(shard.indices) for _, shard in work)
        with ThreadPoolExecutor(workers, thread_name_prefix="reconv-convert") as pool:
            kept = list(pool.map(self._is_done, [shard for _, shard in work]))
            todo = [item for item, is_kept in zip(work, kept, strict=True) if not is_kept]
            self._advance(self._num_samples - sum(len(shard.indices) for _, shard in todo))
            tasks = [pool.submit(self._write, info, shard) for info, shard in todo]
            try:
                wait(tasks, return_when=FIRST_EXCEPTION)
            finally:
                self._stopped.set()
                pool.shutdown(cancel_futures=True)
        errors = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
        for error in errors:
            if not isinstance(error, _StoppedError):
                raise error

    def _is_done(self, shard: OutputShard) -> bool:
        """True if an earlier command has written the shard, and its bytes are still those of its record."""
        record = self._staging.record(shard.name)
        if record is None or not self._writer.is_one_file:
            return record is not None
        file = self._staging.path / shard.name
        return file.is_file() and _digest(file) == (record.get("blake2b"), record.get("bytes"))

    def _write(self, info: SplitInfo, shard: OutputShard) -> None:
        repaired: dict[str, list[str]] = {}
        own_facts = self._writer.write(self._staging, shard, info, self._transcoded(info, shard, repaired))
        facts: dict[str, Any] = {"samples": len(shard.indices), "repaired": repaired, **(own_facts or {})}
        if self._writer.is_one_file:
            facts["blake2b"], facts["bytes"] = _digest(self._staging.path / shard.name)
        self._staging.mark_done(shard.name, facts)

    def _transcoded(
        self, info: SplitInfo, shard: OutputShard, repaired: dict[str, list[str]]
    ) -> Iterator[tuple[int, TranscodedSample]]:
        """The shard's samples as they will be written; adds the names of repaired ones to `repaired`."""
        dataset = self._datasets[info.split]
        num_classes = len(info.class_names)
        for number, index in enumerate(shard.indices):
            if self._stopped.is_set():
                raise _StoppedError
            sample = dataset[int(index)]
            if sample.annotation is None and not 0 <= sample.target < num_classes:
                why = f"there are {num_classes} classes, 0 to {num_classes - 1}"
                raise DataError(f"label {sample.target} out of range", where=sample.name, why=why)
            item = transcode(sample, self._options, self._writer.encoding)
            item = item if sample.annotation is None else scale_boxes(item)
            name = _relative_name(sample.name, self._root)
            if item.repaired:
                repaired.setdefault(item.repaired, []).append(name)
            yield number, replace(item, sample=replace(item.sample, name=name))
            self._advance(1)

    def _advance(self, count: int) -> None:
        with self._count_lock:
            self._num_done += count
            self._progress(self._num_done, self._num_samples)


class _StoppedError(Exception):
    """Another shard failed, or the conversion was interrupted."""


def _digest(path: Path) -> tuple[str, int]:
    """The BLAKE2b digest of a file, and its size."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest(), file.tell()


def _check_apart(datasets: Mapping[Split, Dataset], root: Path | None, destination: Path) -> None:
    """Raise UsageError if what is written to `destination` would be read as a part of the data at `root`."""
    if root is None:
        return
    source, target = real_path(root), real_path(destination)
    if target != source and source not in target.parents:
        return
    kinds = {getattr(dataset, "kind", "") for dataset in datasets.values()}
    has_own_folders = kinds == {ImageNetArchiveDataset.kind} or (
        kinds == {FolderDataset.kind} and not has_class_folders(root)
    )
    if has_own_folders and target != source and target.relative_to(source).parts[0] not in SPLIT_NAMES:
        return  # beside train/, as in /imagenet/tf_records: no reader of /imagenet looks there
    raise UsageError(
        f"{destination} lies inside the data to convert",
        where=str(root),
        why="it would be read as a part of that data",
        hint=f"choose a folder beside it, such as {root.parent / (root.name + '-new')}",
    )


def _split_info(split: Split, dataset: Dataset, target: ConvertTarget) -> SplitInfo:
    ids = dataset.class_ids if isinstance(dataset, DetectionDataset) else ()
    return SplitInfo(
        split, len(dataset), dataset.class_names, dataset.fingerprint(), target.options, target.per_shard, ids
    )


def _plan(target: ConvertTarget, writer: DatasetWriter, infos: Mapping[Split, SplitInfo], work: Work) -> Facts:
    """Everything that decides the bytes, as JSON gives it back."""
    splits = {
        split: {
            "samples": info.num_samples,
            "fingerprint": info.fingerprint,
            "pieces": sum(owner is info for owner, _ in work),
        }
        for split, info in infos.items()
    }
    names = sorted({info.class_names for info in infos.values()})
    if len(names) != 1:
        raise DataError("training and validation have different classes", why="each split has its own list of classes")
    return {
        "format": FORMAT,
        "kind": target.kind,
        "form": target.options.facts(writer.encoding),
        "per_shard": None if target.num_shards else target.per_shard,
        "splits": splits,
        "class_names": list(names[0]),
    }


def _finish(
    writer: DatasetWriter, infos: Mapping[Split, SplitInfo], work: Work, plan: Facts, staging: StagingDir
) -> Facts:
    """Write what belongs to whole splits and publish the conversion; the manifest."""
    for info in infos.values():
        if writer.finish is not None:
            records = [staging.record(shard.name) or {} for owner, shard in work if owner is info]
            writer.finish(staging, info, records)
    if writer.has_class_list:
        staging.write_text(CLASS_LIST, "".join(f"{name}\n" for name in plan["class_names"]))
    manifest = _manifest(plan, writer, staging, work)
    staging.publish(manifest)
    return manifest


def _manifest(plan: Facts, writer: DatasetWriter, staging: StagingDir, work: Work) -> Facts:
    files: list[Facts] = []
    repaired: dict[str, list[str]] = {}
    for _, shard in work:
        record = staging.record(shard.name)
        if record is None:
            raise DataError(f"{shard.name} is not complete", where=str(staging.path), hint="run the same command again")
        for why, names in record["repaired"].items():
            repaired.setdefault(why, []).extend(names)
        if writer.is_one_file:
            files.append({"file": shard.name, **{key: record[key] for key in ("samples", "bytes", "blake2b")}})
    if not writer.is_one_file:
        _check_distinct_names(staging, work)
    return {"plan": plan, "files": files, "repaired": {why: sorted(names) for why, names in repaired.items()}}


def _check_distinct_names(staging: StagingDir, work: Work) -> None:
    """A folder must have as many files as there are samples; otherwise two samples had the same name."""
    for info in {id(info): info for info, _ in work}.values():
        num_files = sum(len(files) for _, _, files in os.walk(staging.path / info.split))
        if num_files != info.num_samples:
            raise DataError(
                f"{info.num_samples:,} {info.split} samples became {num_files:,} files",
                where=str(staging.path / info.split),
                why="samples of one class have the same file name",
                hint="convert to packed or tar instead",
            )


def _result(manifest: Facts, already_there: bool) -> ConvertResult:
    num_samples = {split: facts["samples"] for split, facts in manifest["plan"]["splits"].items()}
    repaired = {why: len(names) for why, names in sorted(manifest["repaired"].items())}
    return ConvertResult(num_samples, repaired, already_there)


def _relative_name(name: str, root: Path | None) -> str:
    """The sample's name without the folder or packed shard it was read from."""
    _, packed, inner = name.partition(f"{EXTENSION}:")
    if packed:
        return inner
    prefix = "" if root is None else f"{root}{os.sep}"
    return name[len(prefix) :] if prefix and name.startswith(prefix) else name
