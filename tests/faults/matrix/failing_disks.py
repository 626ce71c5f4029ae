"""Disks that fail from some moment on: full, over quota, read-only, broken, gone; and folders of data likewise."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab import FOREVER, Fault, Lab, train_args
from preload import CHANGES

ALL = (
    "open",
    "create",
    "read",
    "write",
    "fsync",
    "rename",
    "unlink",
    "mkdir",
    "stat",
    "listdir",
    "truncate",
    "statvfs",
)
DISKS = {
    "full": (("create", "write", "fsync", "mkdir", "rename"), "ENOSPC"),
    "over quota": (("write", "fsync", "mkdir"), "EDQUOT"),
    "read-only": (tuple(call for call in (*CHANGES, "utime") if call != "fsync"), "EROFS"),
    "broken": (ALL, "EIO"),
    "gone": (ALL, "ESTALE"),
    "without rights": (("open", "create", "unlink", "mkdir", "rename", "listdir"), "EACCES"),
}
NUM_MOMENTS = 24
DATA_CODES = ("EIO", "ESTALE", "EACCES", "EMFILE", "ETIMEDOUT")
DATA_SETTINGS = {"data__source": "folder", "data__subset_percent": "100"}


def cases(lab: Lab) -> Iterator[dict[str, Any]]:
    for start in ("new", "middle"):
        counts = lab.counts(start)
        for disk, (calls, _) in DISKS.items():
            total = sum(counts[call] for call in calls)
            for number in range(NUM_MOMENTS):
                first = 1 + number * total // NUM_MOMENTS
                yield {"start": start, "disk": disk, "first": first, "last": FOREVER}
                if number % 2:  # it works again a little later
                    yield {"start": start, "disk": disk, "first": first, "last": first + 3 + number}


def run(lab: Lab, case: dict[str, Any], folder: Path) -> str:
    run = lab.start_run(case["start"], folder)
    calls, code = DISKS[case["disk"]]
    fault = Fault(calls, "fail", case["first"], case["last"], getattr(errno, code))
    return lab.check(lab.command(train_args(run, "--resume"), fault, below=run), run, (6,))


def data_folder(lab: Lab) -> Path:
    """A few images in class folders."""
    from PIL import Image

    folder = lab.folder / "images"
    if not folder.exists():
        for split in ("train", "val"):
            for label, shade in (("dark", 40), ("light", 200)):
                (folder / split / label).mkdir(parents=True)
                for number in range(8):
                    Image.new("L", (8, 8), shade + number).save(folder / split / label / f"{number}.png")
    return folder


def data_args(lab: Lab, run: Path, *more: str) -> list[str]:
    """The training on images in folders."""
    return train_args(run, "--data", str(data_folder(lab)), *more, **DATA_SETTINGS)


def data_cases(lab: Lab) -> Iterator[dict[str, Any]]:
    data_folder(lab)
    ended = lab.command(data_args(lab, lab.folder / "of-images"), Fault((), "nothing"), below=data_folder(lab))
    if ended.code:
        raise RuntimeError(ended.stderr)
    for call in ("open", "read", "stat", "listdir"):
        for number in range(1, ended.counts[call] + 1, 1 if ended.counts[call] < 60 else ended.counts[call] // 50):
            for forever in (False, True):
                code = DATA_CODES[(number + forever) % len(DATA_CODES)]
                yield {"call": call, "number": number, "code": code, "forever": forever}


def run_data(lab: Lab, case: dict[str, Any], folder: Path) -> str:
    from lab import weights_of

    reference = lab.folder / "of-images"
    if not reference.exists():
        lab.command(data_args(lab, reference))
    run, last = folder / "run", FOREVER if case["forever"] else case["number"]
    fault = Fault((case["call"],), "fail", case["number"], last, getattr(errno, case["code"]))
    ended = lab.command(data_args(lab, run), fault, below=data_folder(lab))
    problem = ended.problem(data_folder(lab), (6,))
    if problem:
        return problem
    if ended.code:
        ended = lab.command(data_args(lab, run, "--resume"))
    same = weights_of(run) == weights_of(reference)
    return (
        "" if ended.code == 0 and same else f"the resume ended with {ended.code}, weights equal: {same}: {ended.stderr}"
    )
