"""`RunOptions`: what a run is started with, by the command line, Python and other processes. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reconv.core.custom_code import CodeConsent
    from reconv.recipe.loader import Override


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of a run, as they were given; other processes get them pickled."""

    recipe: str  # a preset's name or a YAML file
    overrides: Sequence[Override] = ()
    data: str | Path | None = None
    out: Path | None = None
    resume: bool = False
    runs: Path = Path("runs")
    device: str = "auto"
    nic: str | None = None
    console: str | None = None  # auto, plan, plain, quiet or json; None: no console
    command: Sequence[str] = ()
    stop_after: str | None = None  # as in 100step or 3h
    stop_at: str | None = None  # the point of the run, as in 25% or 2ep
    trust_code: bool = False  # that a teacher or initial weights name; that of the recipe needs no question
    objects: Mapping[str, Any] = field(default_factory=dict)  # passed from Python, by their names in the recipe
    consent: CodeConsent | None = None  # to the code of the recipe, if that is a saved one; None: it is the user's
    mirror: str | None = None  # the address of a copy of the run in an object store
    return_when_interrupted: bool = False  # after Ctrl-C and a save, return the result instead of raising
