"""`python -m reconv`: the same program as the command `reconv`, for torchrun and friends."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def _leave_current_folder() -> None:
    """Take the current folder, which `-m` puts first, from the import path: a file in it is no installed package.

    If Reconv itself is imported from there, it comes last: other processes import it again.
    """
    if sys.flags.safe_path or sys.path[:1] != [os.getcwd()]:
        return
    folder = sys.path.pop(0)
    if Path(folder) == Path(__file__).absolute().parents[1]:
        sys.path.append(folder)


if __name__ == "__main__":
    _leave_current_folder()

from reconv.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
