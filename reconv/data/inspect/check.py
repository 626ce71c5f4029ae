"""Looking at a data set before paying for it: every sample is read and decoded once, and what is odd is told.

Owns the pass over all samples and what follows from it. Refuses to know terminals and files of results. Invariant:
user files are only read; the findings are a function of the data, whatever the number of workers.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from reconv.data.boxes.annotations import AnnotationError, DetectionDataset
from reconv.data.dataset import I64, Dataset, Sample, Split
from reconv.data.decode.decode import any_picture, decode_picture
from reconv.data.inspect.draw_boxes import DrawnBox, class_colour, draw_boxes
from reconv.data.inspect.issue import DataIssue, Tell, printable
from reconv.data.inspect.splits import open_splits
from reconv.data.pipeline.box_samples import picture_as_annotated
from reconv.errors import DataError
from reconv.recipe.data_fields import DataConfig

_CHUNK = 32
_ORIENTATION = 0x0112  # the EXIF tag
_SMALL_SHARE = 20  # a class of less than a twentieth of the median is suspicious
_TINY_SIDE_PX = 8
_MAX_GROUPS = 1000  # of duplicates that are named; all are counted
_NO_CLASSES = ("newfolder", "untitledfolder", "macosx", "lost+found", "images", "thumbs")

Progress = Callable[[int, int], None]  # samples done, samples in all


@dataclass(frozen=True, slots=True)
class Seen:
    """One sample that decodes."""

    target: int  # 0 where an image has boxes instead
    labels: tuple[int, ...]  # its class, or those of its boxes
    format: str
    mode: str  # as stored: RGB, L, CMYK, P, ...
    width: int  # upright
    height: int
    orientation: int  # EXIF's; 1: stored upright
    num_bytes: int
    digest: bytes  # of the file as it is


@dataclass(slots=True)
class SplitSeen:
    """What one split holds."""

    num_samples: int
    bad: list[tuple[str, str]] = field(default_factory=list)  # path, why
    bad_kinds: list[str] = field(default_factory=list)  # of each of them
    classes: Counter[str] = field(default_factory=Counter)  # samples of each, or boxes
    num_boxes: int | None = None  # None: these are no images with boxes
    formats: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    orientations: Counter[int] = field(default_factory=Counter)
    num_bytes: int = 0
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
            "width_px": spread_of(self.widths),
            "height_px": spread_of(self.heights),
            "bad": [{"path": path, "why": why} for path, why in self.bad],
        }


@dataclass(frozen=True, slots=True)
class Checked:
    """A data set as it was found."""

    origin: str
    splits: Mapping[Split, SplitSeen]
    class_names: tuple[str, ...]
    findings: tuple[DataIssue, ...]
    samples: Mapping[str, tuple[Split, tuple[int, ...]]]  # for an image: some good samples of each class
    sources: Mapping[Split, Dataset]

    @property
    def faults(self) -> list[DataIssue]:
        return [finding for finding in self.findings if finding.level == "fault"]

    def as_json(self) -> dict[str, Any]:
        """Everything but the images, as plain data."""
        return {
            "origin": self.origin,
            "ok": not self.faults,
            "num_classes": len(self.class_names),
            "splits": {split: seen.as_json() for split, seen in self.splits.items()},
            "findings": [
                {"level": f.level, "kind": f.kind, "text": f.text, "count": f.total, "paths": list(f.paths)}
                for f in self.findings
            ],
        }


def check(path: str, data: DataConfig, workers: int, progress: Progress = lambda done, total: None) -> Checked:
    """Read and decode every sample of every split; `path` is a folder, or digits or synthetic."""
    findings: list[DataIssue] = []
    sources = open_splits(path, data, findings.append)
    names = next(iter(sources.values())).class_names
    total, done = sum(map(len, sources.values())), 0
    tables: dict[Split, _Table] = {}
    with _pool(workers) as pool:
        for split, source in sources.items():
            table = tables[split] = _Table(len(source))
            for index, seen in _examined(source, pool):
                table.put(index, seen, names)
                done += 1
                progress(done, total)
            if isinstance(source, DetectionDataset):
                table.seen.num_boxes = int(source.box_counts().sum())
    _tell_of_samples(tables, findings.append)
    _tell_of_duplicates(tables, sources, findings.append)
    _tell_of_classes(names, tables, findings.append)
    order = {"fault": 0, "warning": 1}
    return Checked(
        origin=next(iter(sources.values())).origin,
        splits={split: table.seen for split, table in tables.items()},
        class_names=names,
        findings=tuple(sorted(findings, key=lambda finding: order[finding.level])),
        samples=_picturesque(names, tables, sources),
        sources=sources,
    )


@contextmanager
def _pool(num_workers: int) -> Iterator[ThreadPoolExecutor]:
    """Threads (decoding and hashing leave the interpreter to others) that give up what is left when interrupted."""
    pool = ThreadPoolExecutor(max(1, num_workers), "reconv-check")
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def examine(source: Dataset, index: int) -> Seen | DataError:
    """One sample, decoded, or why it cannot be."""
    try:
        sample = source[index]
        target, labels = _labels(sample, len(source.class_names))
        if isinstance(sample.data, bytes):
            upright = decode_picture(sample.data, 3, sample.name)
            with Image.open(io.BytesIO(sample.data)) as stored:
                form, mode = stored.format or "unknown", stored.mode
                said = stored.getexif().get(_ORIENTATION)
            orientation = said if isinstance(said, int) and 1 <= said <= 8 else 1  # files say all sorts of things there
            width, height, content = upright.width, upright.height, sample.data
        else:
            height, width, channels = sample.data.shape
            form, mode, orientation = "pixels", "L" if channels == 1 else "RGB", 1
            content = repr(sample.data.shape).encode() + sample.data.tobytes()
    except DataError as error:
        return error
    digest = hashlib.blake2b(content, digest_size=16).digest()
    return Seen(target, labels, form, mode, width, height, orientation, len(content), digest)


def _labels(sample: Sample, num_classes: int) -> tuple[int, tuple[int, ...]]:
    """The sample's class, or those of its boxes, which must be of this very image."""
    if sample.annotation is not None:
        picture_as_annotated(sample, sample.annotation, 3)
        return 0, tuple(label for label in sample.annotation.labels.tolist() if label >= 0)
    if not 0 <= sample.target < num_classes:
        raise DataError(f"label {sample.target}", where=sample.name, why=f"label {sample.target} is no class")
    return sample.target, (sample.target,)


def _examined(source: Dataset, pool: ThreadPoolExecutor) -> Iterator[tuple[int, Seen | DataError]]:
    """Every sample in order, examined by all workers."""
    starts = range(0, len(source), _CHUNK)
    pieces = pool.map(lambda s: [examine(source, i) for i in range(s, min(s + _CHUNK, len(source)))], starts)
    for start, piece in zip(starts, pieces, strict=True):
        yield from enumerate(piece, start)


class _Table:
    """What is kept of each sample of a split: 44 bytes, however many there are."""

    def __init__(self, num_samples: int) -> None:
        self.seen = SplitSeen(num_samples)
        self.targets = np.full(num_samples, -1, np.int64)  # -1: bad
        self.digests = np.zeros((num_samples, 2), np.uint64)
        self.seen.widths = np.zeros(num_samples, np.int64)
        self.seen.heights = np.zeros(num_samples, np.int64)

    def put(self, index: int, seen: Seen | DataError, names: Sequence[str]) -> None:
        split = self.seen
        if isinstance(seen, DataError):
            why = seen.what if isinstance(seen, AnnotationError) else seen.why or seen.what
            split.bad.append((printable(seen.where or f"sample {index}"), why))
            split.bad_kinds.append(_kind_of(seen))
            return
        self.targets[index] = seen.target
        self.digests[index] = np.frombuffer(seen.digest, np.uint64)
        split.widths[index], split.heights[index] = seen.width, seen.height
        split.classes.update(names[label] for label in seen.labels)
        split.formats[seen.format] += 1
        split.modes[seen.mode] += 1
        split.orientations[seen.orientation] += 1
        split.num_bytes += seen.num_bytes


def _kind_of(error: DataError) -> str:
    if isinstance(error, AnnotationError):
        return "wrong-size"
    return "missing-file" if isinstance(error.__cause__, FileNotFoundError) else "bad-image"


def spread_of(values: npt.NDArray[np.int64]) -> dict[str, float] | None:
    """Smallest, median and largest of the samples that decode."""
    good = values[values > 0]
    if not len(good):
        return None
    return {"min": int(good.min()), "median": float(np.median(good)), "max": int(good.max())}


def _tell_of_samples(tables: Mapping[Split, _Table], tell: Tell) -> None:
    for split, table in tables.items():
        texts = {
            "missing-file": "images in {} that are not there",
            "wrong-size": "images in {} of another size than their boxes are of",
            "bad-image": "images in {} that cannot be read or decoded",
        }
        for kind, text in texts.items():
            found = zip(table.seen.bad, table.seen.bad_kinds, strict=True)
            if paths := tuple(path for (path, _), own in found if own == kind):
                tell(DataIssue("fault", kind, text.format(split), paths))
        if not table.seen.num_samples:
            tell(DataIssue("fault", "empty-split", f"there is no image in {split}", (split,)))
        shorter = np.minimum(table.seen.widths, table.seen.heights)
        num_tiny = int(((shorter > 0) & (shorter < _TINY_SIDE_PX)).sum())
        if num_tiny:
            text = f"images in {split} with a side below {_TINY_SIDE_PX} pixels"
            tell(DataIssue("warning", "tiny-image", text, count=num_tiny))


def _tell_of_duplicates(tables: Mapping[Split, _Table], sources: Mapping[Split, Dataset], tell: Tell) -> None:
    """Files that are the same byte for byte: across splits, under two labels, or merely twice."""
    found: dict[str, list[list[tuple[Split, int]]]] = {"leak": [], "two-labels": [], "duplicate": []}
    for group in _equal(tables):
        is_leak = len({split for split, _ in group}) > 1
        has_two_labels = len({int(tables[split].targets[index]) for split, index in group}) > 1
        if is_leak:
            found["leak"].append(group)
        if has_two_labels:
            found["two-labels"].append(group)
        if not is_leak and not has_two_labels:
            found["duplicate"].append(group)
    texts = {
        "leak": "images are in training and in validation",
        "two-labels": "images are there under two labels",
        "duplicate": "images are there more than once in a split",
    }
    for kind, groups in found.items():
        if groups:
            shown = tuple(" = ".join(_name(sources[s], i) for s, i in group) for group in groups[:_MAX_GROUPS])
            level: Any = "warning" if kind == "duplicate" else "fault"
            tell(DataIssue(level, kind, f"{texts[kind]}, byte for byte", shown, len(groups)))


def _equal(tables: Mapping[Split, _Table]) -> Iterator[list[tuple[Split, int]]]:
    """Groups of two or more samples with the same bytes, in the order of their first."""
    splits = list(tables)
    good = [np.flatnonzero(table.targets >= 0) for table in tables.values()]
    split_of, index_of = np.repeat(np.arange(len(good)), [len(g) for g in good]), np.concatenate(good)
    if not len(index_of):
        return
    digests = np.concatenate([table.digests[g] for table, g in zip(tables.values(), good, strict=True)])
    _, inverse, counts = np.unique(digests, axis=0, return_inverse=True, return_counts=True)
    group_of = inverse.ravel()
    groups: dict[int, list[tuple[Split, int]]] = {}
    for row in np.flatnonzero(counts[group_of] > 1):
        groups.setdefault(int(group_of[row]), []).append((splits[split_of[row]], int(index_of[row])))
    yield from groups.values()


def _name(source: Dataset, index: int) -> str:
    try:
        return printable(source[index].name)
    except DataError as error:  # vanished since it was read
        return printable(error.where)


def _tell_of_classes(names: Sequence[str], tables: Mapping[Split, _Table], tell: Tell) -> None:
    """Labels that look like mistakes."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"[\s_-]+", "", name).casefold(), []).append(name)
    same = tuple(" = ".join(map(repr, group)) for group in alike.values() if len(group) > 1)
    if same:
        tell(
            DataIssue(
                "warning", "alike", "classes whose names differ only in case, spaces, dashes or underscores", same
            )
        )
    odd = tuple(name for key in _NO_CLASSES for name in alike.get(key, ()))
    if odd:
        tell(DataIssue("warning", "no-class", "folders that look like no class", odd))
    train = tables.get("train")
    if train is None or not train.seen.classes:
        return
    median = float(np.median([train.seen.classes[name] for name in names]))
    small = tuple(f"{n}: {train.seen.classes[n]}" for n in names if 0 < train.seen.classes[n] < median / _SMALL_SHARE)
    if small:
        what = "images" if train.seen.num_boxes is None else "boxes"
        tell(DataIssue("warning", "small-class", f"classes far below the median of {median:g} training {what}", small))
    if "val" in tables:
        unseen = tuple(n for n in names if train.seen.classes[n] and not tables["val"].seen.classes[n])
        if unseen:
            tell(DataIssue("warning", "not-validated", "classes without a validation image", unseen))


def _picturesque(
    names: Sequence[str], tables: Mapping[Split, _Table], sources: Mapping[Split, Dataset]
) -> dict[str, tuple[Split, tuple[int, ...]]]:
    """Up to 8 good samples of up to 24 classes, evenly spread over both."""
    split: Split = "train" if "train" in tables else "val"
    members_of = _members(sources[split], tables[split].targets)
    chosen = np.unique(np.linspace(0, len(names) - 1, min(24, len(names))).round().astype(int))
    pictured: dict[str, tuple[Split, tuple[int, ...]]] = {}
    for number in chosen.tolist():
        members = members_of(number)
        if len(members):
            places = np.unique(np.linspace(0, len(members) - 1, min(8, len(members))).round().astype(int))
            pictured[names[number]] = (split, tuple(members[places].tolist()))
    return pictured


def _members(source: Dataset, targets: I64) -> Callable[[int], I64]:
    """What gives the good samples of a class, or those with a box of it."""
    if not isinstance(source, DetectionDataset):
        return lambda number: np.flatnonzero(targets == number)
    labels = [(index, source.annotation(index).labels) for index in np.flatnonzero(targets >= 0).tolist()]
    owners = np.repeat([index for index, _ in labels], [len(own) for _, own in labels]).astype(np.int64)
    flat = np.concatenate([np.empty(0, np.int64), *(own for _, own in labels)])
    return lambda number: np.unique(owners[flat == number])


def pictures_of(checked: Checked) -> Iterator[tuple[str, int, list[Image.Image]]]:
    """For each pictured class: its name, how many training images it has, and some of them."""
    for name, (split, indices) in checked.samples.items():
        samples = [checked.sources[split][index] for index in indices]
        yield name, checked.splits[split].classes[name], [_tile(sample, checked.class_names) for sample in samples]


def _tile(sample: Sample, names: Sequence[str]) -> Image.Image:
    """The image, with the boxes it has."""
    said = sample.annotation
    if said is None:
        return any_picture(sample.data, 3, sample.name)
    boxes = [
        DrawnBox((left, top, right, bottom), names[label] if label >= 0 else "?", class_colour(label))
        for (left, top, right, bottom), label in zip(said.boxes_xyxy.tolist(), said.labels.tolist(), strict=True)
    ]
    return draw_boxes(picture_as_annotated(sample, said, 3), boxes)
