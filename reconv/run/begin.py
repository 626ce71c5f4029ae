"""What is settled before a run has parts: which recipe it is, which folder is its, and whether there is work to do.

Owns those decisions, which rank 0 makes for all processes. Refuses to know plans and parts. Invariant: nothing is
written before the recipe is whole, and the run folder is written to by the holder of its lock alone.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reconv.errors import DataError
from reconv.parallel.world import World
from reconv.recipe.load import Override, load
from reconv.recipe.schema import Recipe
from reconv.report.exporters import require_packages
from reconv.report.summary import read_summary
from reconv.run import parts
from reconv.run.folder import Choice, check_same_run, choose_folder, existing_run, known_data_path
from reconv.run.start import refuse_absent_weights


@dataclass(frozen=True, slots=True)
class Start:
    """What a command says about a run."""

    recipe: str | Path
    data: str | Path | None
    overrides: Sequence[Override]
    resume: bool
    out: Path | None
    runs: Path


@dataclass(frozen=True, slots=True)
class Claim:
    """The folder of a run, held, and what should be said about it."""

    choice: Choice
    said: tuple[str, ...] = ()
    is_finished: bool = False
    summary: dict[str, Any] = field(default_factory=dict)  # of a run that is finished


def resolve(start: Start) -> Recipe:
    """The whole recipe of a command, with what it needs at hand."""
    given = [*start.overrides, *([("data.path", str(start.data), "--data")] if start.data is not None else [])]
    recipe = load(str(start.recipe), given).recipe
    earlier = existing_run(recipe, out=start.out, runs=start.runs) if start.resume else None
    recipe = parts.with_data_path(recipe, known_data_path(earlier) if earlier else None)
    require_packages(recipe.records)
    if not start.resume:  # a run that goes on no longer needs them
        refuse_absent_weights(recipe)
    return recipe


def claim_folder(start: Start, recipe: Recipe, stack: ExitStack) -> Claim:
    """Choose the folder of a run and hold it until the stack is unwound."""
    choice = choose_folder(recipe, out=start.out, resume=start.resume, runs=start.runs)
    stack.enter_context(choice.folder.lock())
    said = check_same_run(choice.folder, recipe) if choice.exists else ()
    if choice.exists and choice.folder.is_finished() and not any(line.startswith("length") for line in said):
        return Claim(choice, said, is_finished=True, summary=read_summary(choice.folder.path))
    return Claim(choice, said)


def refuse_different_data(world: World, sources: parts.Sources) -> None:
    """Refuse to train together on data that is not the same everywhere."""
    if world.size == 1:
        return
    found = world.gather((platform.node(), sources.fingerprint()))
    others = [(rank, host) for rank, (host, fingerprint) in enumerate(found) if fingerprint != found[0][1]]
    if others:
        listed = ", ".join(f"rank {rank} on {host}" for rank, host in others[:4])
        raise DataError(
            "the processes do not have the same data",
            where=f"{listed}, unlike rank 0 on {found[0][0]}",
            why="files are missing, or --data names another folder there",
            then="compare `reconv data check PATH` on both machines",
        )
