"""The last words of processes that `--devices` has started, left for the one that started them.

Owns the folder they are left in. Refuses to know who prints them. Invariant: they are whole before a process ends, so
whoever sees that it has ended can read why.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from reconv.errors import ReconvError, RemoteRankError


def leave_words(folder: Path, rank: int, error: ReconvError) -> None:
    """Say what ends this process; what was said first stands."""
    said = folder / f"{rank}.json"
    if not said.exists():
        half = folder / f"{rank}.json.{os.getpid()}.part"
        half.write_text(json.dumps(error.to_dict()))
        half.rename(said)


def read_words(folder: Path) -> list[RemoteRankError]:
    """What each process has left, those first that nobody has told yet."""
    said = [RemoteRankError.from_dict(json.loads(file.read_text())) for file in sorted(folder.glob("*.json"))]
    return sorted(said, key=lambda error: error.is_reported)
