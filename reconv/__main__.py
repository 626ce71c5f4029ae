"""`python -m reconv`: the same program as the command `reconv`, for torchrun and friends."""

from __future__ import annotations

from reconv.cli import main

if __name__ == "__main__":
    main()
