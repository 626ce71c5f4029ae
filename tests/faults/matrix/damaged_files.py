"""Every file of a run directory, damaged in every way: flipped bits, cuts, zeros, other files, pipes, loops."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab import Lab, copy_run, train_args

OFFSETS = (0.0, 0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999)  # as parts of the file
CUTS = (0.0, 0.01, 0.5, 0.99)
PAGE_BYTES = 4096
OTHER_KINDS = ("missing", "folder", "pipe", "loop", "zeros", "empty lines", "garbage", "unicode", "deep json")


def files_of(run: Path) -> list[str]:
    """The files of a run, of the newest and of one older checkpoint."""
    found = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    return [name for name in found if not name.startswith(".")]


def cases(lab: Lab) -> Iterator[dict[str, Any]]:
    for use, run in (("resume", lab.middle), ("report", lab.reference), ("evaluate", lab.reference)):
        names = files_of(run)
        for position, name in enumerate(names):
            is_checkpoint = name.startswith("checkpoints")
            if use == "evaluate" and not is_checkpoint and name not in ("run.json", "recipe.yaml", "best.json"):
                continue
            if use == "report" and is_checkpoint:
                continue
            damages = [f"flip {part}" for part in OFFSETS] + [f"cut {part}" for part in CUTS]
            damages += [f"page {part}" for part in OFFSETS[::3]] + ["append", *OTHER_KINDS]
            damages += [f"swap {names[(position + shift) % len(names)]}" for shift in (1, 5)]
            for damage in damages:
                yield {"use": use, "file": name, "damage": damage}


def damage_file(run: Path, name: str, damage: str) -> None:
    """Damage one file."""
    path = run / name
    kind, _, argument = damage.partition(" ")
    content = bytearray(path.read_bytes())
    size = len(content)
    if kind == "flip" and size:
        at = min(size - 1, int(float(argument) * size))
        content[at] ^= 1 << (at % 8)
    elif kind == "cut":
        del content[int(float(argument) * size) :]
    elif kind == "page":
        at = int(float(argument) * size) // PAGE_BYTES * PAGE_BYTES
        content[at : at + PAGE_BYTES] = bytes(len(content[at : at + PAGE_BYTES]))
    elif kind == "append":
        content += b"\0garbage\n"
    elif kind == "zeros":
        content = bytearray(size)
    elif damage == "empty lines":
        content = bytearray(b"\n" * 100)
    elif kind == "garbage":
        content = bytearray(random.Random(size).randbytes(300))
    elif kind == "unicode":
        content = bytearray("\u202e\x1b[31m{\x00".encode() + b"\xff\xfe")
    elif damage == "deep json":
        content = bytearray(b'{"a":' * 20_000)
    elif kind == "swap":
        content = bytearray((run / argument).read_bytes())
    else:
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "loop":
            path.symlink_to(path.name)
        return
    path.write_bytes(content)


def run(lab: Lab, case: dict[str, Any], folder: Path) -> str:
    run = copy_run(lab.middle if case["use"] == "resume" else lab.reference, folder / "run")
    damage_file(run, case["file"], case["damage"])
    if case["use"] == "resume":
        ended = lab.command(train_args(run, "--resume"))
        return ended.problem(run) or ("" if ended.code else lab.weights_problem(run))
    if case["use"] == "report":
        return lab.command(["report", str(run)]).problem(run)
    ended = lab.call(lambda: load(run))
    return ended.problem(run)


def load(run: Path) -> None:
    """Choose and load the newest and the best checkpoint, as `eval` does; errors end as in a command."""
    import sys

    from reconv.checkpoint.locate import locate
    from reconv.checkpoint.store import open_store
    from reconv.core.errors import ReconvError
    from reconv.storage.files import system_error

    try:
        for which in ("newest", "best"):
            located = locate(run, which=which)  # type: ignore[arg-type]
            assert located.checkpoint is not None and located.run is not None
            open_store(located.run).load(located.checkpoint)
    except ReconvError as error:
        print(error, file=sys.stderr)
        sys.exit(error.code)
    except OSError as error:
        refused = system_error(error)
        print(refused, file=sys.stderr)
        sys.exit(refused.code)
