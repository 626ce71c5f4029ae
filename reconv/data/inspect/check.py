"""Check a dataset before training: read and decode every sample once and report what is wrong.

Files are only read. The issues depend only on the data, not on the number of workers.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from reconv.core.errors import DataError
from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.dataset import I64, Dataset, Sample, Split, all_targets, check_class_names, is_multilabel
from reconv.data.decode.pillow import to_image
from reconv.data.inspect.draw_boxes import DrawnBox, class_color, draw_boxes
from reconv.data.inspect.examine import Examined, RejectedSample, decode_examined, encode_examined, examine
from reconv.data.inspect.lenient_open import DataIssue, Report, open_leniently, printable
from reconv.data.pipeline.detection import decode_annotated
from reconv.distributed.process_group import ProcessGroup
from reconv.distributed.shared_work import open_journal, part_size, run_parts
from reconv.recipe.parts.data import DataConfig

_CHUNK = 32  # samples of one task
_SMALL_CLASS_RATIO = 20  # a class with less than 1/20 of the median is suspicious
_TINY_SIDE_PX = 8
_MAX_GROUPS = 1000  # groups of duplicates that are named; all are counted
_UNLIKELY_CLASSES = ("newfolder", "untitledfolder", "macosx", "lost+found", "images", "thumbs")

Progress = Callable[[int, int], None]  # samples done, total samples


@dataclass(slots=True)
class SplitReport:
    """Counts and sizes of one split."""

    num_samples: int
    bad: list[tuple[str, str]] = field(default_factory=list)  # path, reason
    bad_kinds: list[str] = field(default_factory=list)  # parallel to `bad`
    classes: Counter[str] = field(default_factory=Counter)  # samples per class, or boxes
    num_boxes: int | None = None  # None for classification
    formats: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    orientations: Counter[int] = field(default_factory=Counter)
    num_bytes: int = 0
    num_multipage: int = 0  # TIFFs with more than one page
    widths: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    heights: I64 = field(default_factory=lambda: np.empty(0, np.int64))

    def as_json(self) -> dict[str, Any]:
        return {
            "num_samples": self.num_samples,
            "num_bad": len(self.bad),
            **({} if self.num_boxes is None else {"num_boxes": self.num_boxes}),
            "num_bytes": self.num_bytes,
            "classes": dict(self.classes),
            "formats": dict(self.formats.most_common()),
            "modes": dict(self.modes.most_common()),
            "orientations": {str(number): count for number, count in sorted(self.orientations.items())},
            "width_px": min_median_max(self.widths),
            "height_px": min_median_max(self.heights),
            "bad": [{"path": path, "why": why} for path, why in self.bad],
        }


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of checking a dataset."""

    origin: str
    splits: Mapping[Split, SplitReport]
    class_names: tuple[str, ...]
    issues: tuple[DataIssue, ...]
    examples: Mapping[str, tuple[Split, tuple[int, ...]]]  # for the contact sheet: some good samples of each class
    datasets: Mapping[Split, Dataset]

    @property
    def errors(self) -> list[DataIssue]:
        return [issue for issue in self.issues if issue.level == "error"]

    def as_json(self) -> dict[str, Any]:
        """The content of check.json."""
        return {
            "origin": self.origin,
            "ok": not self.errors,
            "num_classes": len(self.class_names),
            "splits": {split: report.as_json() for split, report in self.splits.items()},
            "issues": [
                {"level": i.level, "kind": i.kind, "text": i.text, "count": i.total, "paths": list(i.paths)}
                for i in self.issues
            ],
        }


def check(path: str, data: DataConfig, workers: int, progress: Progress = lambda done, total: None) -> CheckReport:
    """Read and decode every sample of every split; `path` is a folder or the name of a dataset in the package."""
    report = check_in_ranks(path, data, workers, progress, ProcessGroup.single())
    assert report is not None
    return report


def check_in_ranks(
    path: str,
    data: DataConfig,
    workers: int,
    progress: Progress,
    process_group: ProcessGroup,
    journal_dir: Path | None = None,
) -> CheckReport | None:
    """Check a dataset on several ranks, which share its samples; rank 0 gets the report, the others None.

    Samples that have been read are kept in `journal_dir`, which all ranks must see.
    """
    issues: list[DataIssue] = []
    datasets = open_leniently(path, data, issues.append)
    names = next(iter(datasets.values())).class_names
    check_class_names(names, path)
    scans = {split: _SplitScan(len(dataset)) for split, dataset in datasets.items()}
    for index, examined, split in _examine_all(path, datasets, workers, progress, process_group, journal_dir):
        scans[split].add(index, examined, names)
    if not process_group.is_rank0:
        return None
    for split, dataset in datasets.items():
        if isinstance(dataset, DetectionDataset):
            scans[split].report.num_boxes = int(dataset.box_counts().sum())
    _report_samples(scans, issues.append)
    _report_duplicates(scans, datasets, issues.append)
    _report_classes(names, scans, issues.append)
    order = {"error": 0, "warning": 1}
    return CheckReport(
        origin=_origin(list(datasets.values())),
        splits={split: scan.report for split, scan in scans.items()},
        class_names=names,
        issues=tuple(sorted(issues, key=lambda issue: order[issue.level])),
        examples=_choose_examples(names, scans, datasets),
        datasets=datasets,
    )


def _origin(datasets: Sequence[Dataset]) -> str:
    """The origin of the first split, with what the others add to it."""
    first = datasets[0].origin
    return first + "".join(other.origin.removeprefix(first) for other in datasets if other.origin.startswith(first))


@contextmanager
def _pool(num_workers: int) -> Iterator[ThreadPoolExecutor]:
    """Threads, because decoding and hashing release the GIL; an interrupt cancels what is left."""
    pool = ThreadPoolExecutor(max(1, num_workers), "reconv-check")
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _examine_all(
    path: str,
    datasets: Mapping[Split, Dataset],
    workers: int,
    progress: Progress,
    process_group: ProcessGroup,
    journal_dir: Path | None,
) -> Iterator[tuple[int, Examined, Split]]:
    """Every sample in order, on rank 0; the ranks examine parts of equal size."""
    total, done = sum(map(len, datasets.values())), 0
    size = part_size(total, _CHUNK)
    starts = {
        f"{split}-{start:010}": (split, start)
        for split, dataset in datasets.items()
        for start in range(0, len(dataset), size)
    }

    def examine_part(part: str) -> bytes:
        nonlocal done
        split, first = starts[part]
        dataset, found = datasets[split], []
        stop = min(first + size, len(dataset))
        for chunk in pool.map(partial(_examine_chunk, dataset, stop), range(first, stop, _CHUNK)):
            for examined in chunk:
                found.append(examined)
                done += process_group.world_size  # the others are as fast
                progress(min(done, total), total)
        return encode_examined(found)

    modified_ns = process_group.on_rank0(lambda: os.stat(path).st_mtime_ns if os.path.exists(path) else 0)
    splits = {split: [len(dataset), _fingerprint(dataset)] for split, dataset in datasets.items()}
    plan = {"path": path, "modified_ns": modified_ns, "splits": splits}
    with open_journal(process_group, journal_dir, plan) as journal, _pool(workers) as pool:
        payloads = run_parts(process_group, list(starts), examine_part, journal)
        for (split, first), payload in zip(starts.values(), payloads, strict=process_group.is_rank0):
            for index, examined in enumerate(decode_examined(payload), first):
                yield index, examined, split


def _fingerprint(dataset: Dataset) -> str:
    try:
        return dataset.fingerprint()
    except DataError:  # of a missing image, which the check will report
        return ""


def _examine_chunk(dataset: Dataset, stop: int, start: int) -> list[Examined]:
    return [examine(dataset, index) for index in range(start, min(start + _CHUNK, stop))]


class _SplitScan:
    """Compact record of the samples of a split: 44 bytes each."""

    def __init__(self, num_samples: int) -> None:
        self.report = SplitReport(num_samples)
        self.targets = np.full(num_samples, -1, np.int64)  # -1: bad
        self.digests = np.zeros((num_samples, 2), np.uint64)
        self.report.widths = np.zeros(num_samples, np.int64)
        self.report.heights = np.zeros(num_samples, np.int64)

    def add(self, index: int, sample: Examined, names: Sequence[str]) -> None:
        report = self.report
        if isinstance(sample, RejectedSample):
            report.bad.append((sample.path, sample.why))
            report.bad_kinds.append(sample.kind)
            return
        self.targets[index] = sample.target
        self.digests[index] = np.frombuffer(sample.digest, np.uint64)
        report.widths[index], report.heights[index] = sample.width, sample.height
        report.classes.update(names[label] for label in sample.labels)
        report.formats[sample.format] += 1
        report.modes[sample.mode] += 1
        report.orientations[sample.orientation] += 1
        report.num_bytes += sample.num_bytes
        report.num_multipage += sample.num_pages > 1


def min_median_max(values: npt.NDArray[np.int64]) -> dict[str, float] | None:
    """Minimum, median and maximum over the samples that decode."""
    good = values[values > 0]
    if not len(good):
        return None
    return {"min": int(good.min()), "median": float(np.median(good)), "max": int(good.max())}


def _report_samples(scans: Mapping[Split, _SplitScan], report: Report) -> None:
    for split, scan in scans.items():
        texts = {
            "missing-file": "images in {} that are missing",
            "wrong-size": "images in {} whose size differs from the annotated one",
            "bad-image": "images in {} that cannot be read or decoded",
        }
        for kind, text in texts.items():
            found = zip(scan.report.bad, scan.report.bad_kinds, strict=True)
            if paths := tuple(path for (path, _), own in found if own == kind):
                report(DataIssue("error", kind, text.format(split), paths))
        if not scan.report.num_samples:
            report(DataIssue("error", "empty-split", f"no images in {split}", (split,)))
        shorter = np.minimum(scan.report.widths, scan.report.heights)
        num_tiny = int(((shorter > 0) & (shorter < _TINY_SIDE_PX)).sum())
        if num_tiny:
            text = f"images in {split} with a side below {_TINY_SIDE_PX} pixels"
            report(DataIssue("warning", "tiny-image", text, count=num_tiny))
        if scan.report.num_multipage:
            text = f"TIFFs in {split} with several pages, of which only the first is used"
            report(DataIssue("warning", "multi-page", text, count=scan.report.num_multipage))


def _report_duplicates(scans: Mapping[Split, _SplitScan], datasets: Mapping[Split, Dataset], report: Report) -> None:
    """Identical files: in both splits, with two labels, or repeated within a split."""
    found: dict[str, list[list[tuple[Split, int]]]] = {"leak": [], "two-labels": [], "duplicate": []}
    for group in _identical(scans):
        is_leak = len({split for split, _ in group}) > 1
        has_two_labels = len({int(scans[split].targets[index]) for split, index in group}) > 1
        if is_leak:
            found["leak"].append(group)
        if has_two_labels:
            found["two-labels"].append(group)
        if not is_leak and not has_two_labels:
            found["duplicate"].append(group)
    texts = {
        "leak": "images are in both training and validation",
        "two-labels": "images have two labels",
        "duplicate": "images are repeated within a split",
    }
    for kind, groups in found.items():
        if groups:
            shown = tuple(" = ".join(_name(datasets[s], i) for s, i in group) for group in groups[:_MAX_GROUPS])
            level: Any = "warning" if kind == "duplicate" else "error"
            report(DataIssue(level, kind, f"{texts[kind]} (identical files)", shown, len(groups)))


def _identical(scans: Mapping[Split, _SplitScan]) -> Iterator[list[tuple[Split, int]]]:
    """Groups of two or more samples with the same bytes, in the order of their first sample."""
    splits = list(scans)
    good = [np.flatnonzero(scan.targets >= 0) for scan in scans.values()]
    split_of, index_of = np.repeat(np.arange(len(good)), [len(g) for g in good]), np.concatenate(good)
    if not len(index_of):
        return
    digests = np.concatenate([scan.digests[g] for scan, g in zip(scans.values(), good, strict=True)])
    _, inverse, counts = np.unique(digests, axis=0, return_inverse=True, return_counts=True)
    group_of = inverse.ravel()
    groups: dict[int, list[tuple[Split, int]]] = {}
    for row in np.flatnonzero(counts[group_of] > 1):
        groups.setdefault(int(group_of[row]), []).append((splits[split_of[row]], int(index_of[row])))
    yield from groups.values()


def _name(dataset: Dataset, index: int) -> str:
    try:
        return printable(dataset[index].name)
    except DataError as error:  # deleted since it was read
        return printable(error.where)


def _report_classes(names: Sequence[str], scans: Mapping[Split, _SplitScan], report: Report) -> None:
    """Class names and counts that look like mistakes."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"[\s_-]+", "", name).casefold(), []).append(name)
    same = tuple(" = ".join(map(repr, group)) for group in alike.values() if len(group) > 1)
    if same:
        report(
            DataIssue(
                "warning", "alike", "classes whose names differ only in case, spaces, dashes or underscores", same
            )
        )
    odd = tuple(name for key in _UNLIKELY_CLASSES for name in alike.get(key, ()))
    if odd:
        report(DataIssue("warning", "no-class", "folders that do not look like classes", odd))
    train = scans.get("train")
    if train is None or not train.report.classes:
        return
    if len(names) == 1 and train.report.num_boxes is None:
        report(
            DataIssue("error", "one-class", "there is only one class, so there is nothing to tell apart", tuple(names))
        )
    median = float(np.median([train.report.classes[name] for name in names]))
    small = tuple(
        f"{n}: {train.report.classes[n]}" for n in names if 0 < train.report.classes[n] < median / _SMALL_CLASS_RATIO
    )
    if small:
        what = "images" if train.report.num_boxes is None else "boxes"
        report(
            DataIssue("warning", "small-class", f"classes far below the median of {median:g} training {what}", small)
        )
    if "val" in scans:
        unseen = tuple(n for n in names if train.report.classes[n] and not scans["val"].report.classes[n])
        if unseen:
            report(DataIssue("warning", "not-validated", "classes without a validation image", unseen))


def _choose_examples(
    names: Sequence[str], scans: Mapping[Split, _SplitScan], datasets: Mapping[Split, Dataset]
) -> dict[str, tuple[Split, tuple[int, ...]]]:
    """Up to 8 good samples of up to 24 classes, evenly spaced."""
    split: Split = "train" if "train" in scans else "val"
    members_of = _members(datasets[split], scans[split].targets)
    chosen = np.unique(np.linspace(0, len(names) - 1, min(24, len(names))).round().astype(int))
    examples: dict[str, tuple[Split, tuple[int, ...]]] = {}
    for number in chosen.tolist():
        members = members_of(number)
        if len(members):
            places = np.unique(np.linspace(0, len(members) - 1, min(8, len(members))).round().astype(int))
            examples[names[number]] = (split, tuple(members[places].tolist()))
    return examples


def _members(dataset: Dataset, targets: I64) -> Callable[[int], I64]:
    """A function from a class to its good samples, or to those with a box of it."""
    if is_multilabel(dataset):
        rows = all_targets(dataset)
        return lambda number: np.flatnonzero((targets >= 0) & (rows[:, number] > 0))
    if not isinstance(dataset, DetectionDataset):
        return lambda number: np.flatnonzero(targets == number)
    labels = [(index, dataset.annotation(index).labels) for index in np.flatnonzero(targets >= 0).tolist()]
    owners = np.repeat([index for index, _ in labels], [len(own) for _, own in labels]).astype(np.int64)
    flat = np.concatenate([np.empty(0, np.int64), *(own for _, own in labels)])
    return lambda number: np.unique(owners[flat == number])


def class_tiles(report: CheckReport) -> Iterator[tuple[str, int, list[Image.Image]]]:
    """For each class on the contact sheet: its name, its number of samples or boxes, and example images."""
    for name, (split, indices) in report.examples.items():
        samples = [report.datasets[split][index] for index in indices]
        yield name, report.splits[split].classes[name], [_tile(sample, report.class_names) for sample in samples]


def _tile(sample: Sample, names: Sequence[str]) -> Image.Image:
    """The image with its boxes drawn."""
    annotation = sample.annotation
    if annotation is None:
        return to_image(sample.data, 3, sample.name)
    boxes = [
        DrawnBox((left, top, right, bottom), names[label] if label >= 0 else "?", class_color(label))
        for (left, top, right, bottom), label in zip(
            annotation.boxes_xyxy.tolist(), annotation.labels.tolist(), strict=True
        )
    ]
    return draw_boxes(decode_annotated(sample, annotation, 3), boxes)
