"""Every system call on the files of a run fails in turn: once, or from then on."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab import FOREVER, Fault, Lab, train_args
from preload import CALLS

# What a disk, a network disk, a quota or a limit can say to each kind of call.
CODES = {
    "open": ("EIO", "ESTALE", "EACCES", "EMFILE"),
    "create": ("ENOSPC", "EROFS", "EACCES", "EMFILE"),
    "read": ("EIO", "ESTALE"),
    "write": ("ENOSPC", "EDQUOT", "EIO"),
    "fsync": ("EIO", "ENOSPC"),
    "rename": ("EIO", "ENOSPC", "EROFS"),
    "unlink": ("EIO", "EROFS"),
    "mkdir": ("ENOSPC", "EACCES"),
    "flock": ("EIO", "ENOLCK"),
    "stat": ("EIO", "ESTALE"),
    "listdir": ("EIO", "EMFILE"),
    "truncate": ("EIO", "EROFS"),
    "utime": ("EROFS", "EIO"),
    "close": ("EIO", "EDQUOT"),
    "statvfs": ("EIO",),
}


def cases(lab: Lab) -> Iterator[dict[str, Any]]:
    for start in ("new", "middle"):
        counts = lab.counts(start)
        for call in CALLS:
            for number in range(1, counts[call] + 1):
                codes = CODES.get(call, ())
                for forever in (False, True) if codes else ():
                    code = codes[(number + forever) % len(codes)]
                    yield {"start": start, "call": call, "number": number, "code": code, "forever": forever}


def run(lab: Lab, case: dict[str, Any], folder: Path) -> str:
    run = lab.start_run(case["start"], folder)
    code = getattr(errno, case["code"])
    last = FOREVER if case["forever"] else case["number"]
    ended = lab.command(
        train_args(run, "--resume"), Fault((case["call"],), "fail", case["number"], last, code), below=run
    )
    return lab.check(ended, run, (6,))
