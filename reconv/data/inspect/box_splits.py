"""Images with boxes opened to be looked at: what training would refuse is told, and all of them are there.

Owns what is told of annotations. Refuses to know pixels. Invariant: every box that the files hold is in the sources,
whatever is wrong with it, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.boxes.box_table import FAULTS, PROBLEMS, BoxTable, described, find_faults
from reconv.data.dataset import Split
from reconv.data.inspect.issue import SPLITS, DataIssue, Tell, printable
from reconv.data.readers.detect import Found
from reconv.data.readers.detection.box_table_dataset import BoxTableDataset
from reconv.data.readers.detection.box_tfrecord import BoxTFRecordDataset, has_boxes, read_box_records
from reconv.data.readers.detection.coco import read_coco
from reconv.data.readers.detection.voc import read_voc
from reconv.data.readers.detection.yolo import read_yolo
from reconv.errors import DataError
from reconv.recipe.data_fields import DataConfig

ReadSplit = Callable[[Path, Split], BoxTable]
_READERS: dict[str, ReadSplit] = {"coco": read_coco, "voc": read_voc, "yolo": read_yolo}
_MAX_NAMED = 1000  # boxes or images; all are counted


def box_reader(found: Found) -> ReadSplit | None:
    """What reads the boxes of the data that were found; None: they have none."""
    if found.kind == "tfrecord" and has_boxes(found.path):
        return read_box_records
    return _READERS.get(found.kind)


def open_box_splits(found: Found, read_split: ReadSplit, tell: Tell) -> dict[Split, DetectionDataset]:
    """Each split there is, with all its boxes, and their faults told."""
    opened: dict[Split, DetectionDataset] = {}
    tables: dict[Split, BoxTable] = {}
    refused: list[DataError] = []
    for split in SPLITS:
        try:
            tables[split] = read_split(found.path, split)
            opened[split] = _source(found, split, tables[split])
        except DataError as error:
            refused.append(error)
    if not opened:
        raise refused[0]
    for refusal in refused:
        tell(DataIssue("fault", "unreadable-split", f"{refusal.what}: {refusal.why}", (printable(refusal.where),)))
    for split, table in tables.items():
        for finding in _findings(split, table):
            tell(finding)
    if "train" in tables:
        seen = np.unique(tables["train"].labels)
        never = tuple(name for label, name in enumerate(tables["train"].class_names) if label not in seen)
        if never:
            tell(DataIssue("warning", "never-trained", "classes without a box in training", never))
    return opened


def _source(found: Found, split: Split, table: BoxTable) -> DetectionDataset:
    if found.kind == "tfrecord":
        return BoxTFRecordDataset(found.path, split, DataConfig(), found.why, is_patient=True)
    return BoxTableDataset(found.kind, table, np.arange(len(table)), f"{found.kind} data at {found.path} ({found.why})")


def _findings(split: Split, table: BoxTable) -> Iterator[DataIssue]:
    """What is wrong with the files of a split, then with its boxes."""
    told = [problem for problem in table.problems if problem.kind != "unknown-class"]  # which its boxes tell again
    for kind in dict.fromkeys(problem.kind for problem in told):
        own = [f"{printable(problem.where)}: {problem.text}" for problem in told if problem.kind == kind]
        yield DataIssue("fault", kind, f"{PROBLEMS[kind]}, in {split}", tuple(own[:_MAX_NAMED]), len(own))
    for fault, rows in find_faults(table).items():
        if len(rows):
            named = tuple(printable(text) for text in described(table, rows[:_MAX_NAMED].tolist()))
            yield DataIssue("fault", fault, f"boxes in {split}, each of which {FAULTS[fault]}", named, len(rows))
    empty = np.flatnonzero(np.diff(table.offsets) == 0)
    if len(empty):
        named = tuple(printable(table.files[index]) for index in empty[:_MAX_NAMED].tolist())
        yield DataIssue("warning", "unannotated", f"images in {split} without a box", named, len(empty))
