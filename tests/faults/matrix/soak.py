"""One training through random faults until it is finished, again and again; its weights are those of a calm one."""

from __future__ import annotations

import errno
import random
import signal
from pathlib import Path
from typing import Any

from damaged_files import damage_file
from lab import FOREVER, Fault, Lab, train_args
from preload import CALLS, CHANGES

NUM_STEPS = 12
SETTINGS = {"length": f"{NUM_STEPS}step"}
CODES = ("EIO", "ESTALE", "ENOSPC", "EACCES", "EROFS", "EMFILE", "EDQUOT")
MAX_FAULTS = 40


def run(lab: Lab, case: dict[str, Any], folder: Path) -> str:
    from lab import hash_checkpoint

    last = f"step-{NUM_STEPS:09d}"
    reference = lab.folder / "of-soak"
    if not reference.exists():
        lab.command(train_args(reference, **SETTINGS))
    draw = random.Random(case["seed"])
    run, story = folder / "run", []
    for _ in range(MAX_FAULTS):
        fault = random_fault(draw)
        story.append(str(fault))
        setup = (lambda: lab.layer.set_clock(draw.choice((-1e6, 1e6)))) if draw.random() < 0.2 else None
        args = train_args(run, "--resume", save__background=draw.choice(("true", "false")), **SETTINGS)
        ended = lab.command(args, fault, below=run, setup=setup)
        if ended.code == 0:
            break
        is_killed = ended.code == -signal.SIGKILL or (fault.action == "signal" and ended.code == -fault.code)
        problem = "" if is_killed else ended.problem("", (6, 75, 130, 143))
        if problem:
            return f"{story}: {problem}"
        if draw.random() < 0.2:
            damage_newest(run, draw, story)
    ended = lab.command(train_args(run, "--resume", **SETTINGS))
    if ended.code:
        return f"{story}: the last resume failed with {ended.code}: {ended.stderr[-600:]}"
    same = hash_checkpoint(run / "checkpoints" / last) == hash_checkpoint(reference / "checkpoints" / last)
    return "" if same else f"{story}: the weights differ"


def random_fault(draw: random.Random) -> Fault:
    """A kill, a signal or a failing call, at a random moment."""
    moment = draw.randint(1, 400)
    match draw.randrange(4):
        case 0:
            return Fault(CHANGES, "kill", moment)
        case 1:
            return Fault(("write",), "tear_and_kill", 1 + moment // 6)
        case 2:
            return Fault((*CHANGES, "open"), "signal", moment, 0, draw.choice((signal.SIGTERM, signal.SIGINT)))
    last = draw.choice((moment, moment + 3, FOREVER))
    return Fault((draw.choice(CALLS[:12]),), "fail", 1 + moment // 4, last, getattr(errno, draw.choice(CODES)))


def damage_newest(run: Path, draw: random.Random, story: list[str]) -> None:
    """Damage the newest of at least two checkpoints: the older one is left to resume from."""
    checkpoints = sorted((run / "checkpoints").glob("step-*")) if (run / "checkpoints").exists() else []
    if len(checkpoints) >= 2:
        name = draw.choice(("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"))
        damage = draw.choice(("flip 0.5", "cut 0.5", "zeros", "missing"))
        if not (checkpoints[-1] / name).exists():
            return  # damaged before, and no checkpoint was saved since
        story.append(f"{checkpoints[-1].name}/{name} {damage}")
        damage_file(run, str((checkpoints[-1] / name).relative_to(run)), damage)
